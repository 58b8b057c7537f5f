"""The questions and the model."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "common"))
import arithmetic
import smollm2

arithmetic.ensure()
smollm2.ensure()
