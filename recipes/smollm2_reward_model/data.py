"""Questions, the model, and pairs of its own answers."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "common"))
import pairs

pairs.ensure()
