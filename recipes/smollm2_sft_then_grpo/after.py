"""Scores of the model before both stages: the base has next to no signal for reinforcement learning."""

import json
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "common"))
import files
import sampling
import smollm2

rows = files.read(files.DATA / "products/test.jsonl")
found = sampling.pass_at_1(smollm2.FOLDER, "math", rows, max_new_tokens=96)
print(json.dumps({f"{name} of base": value for name, value in found.items()}))
