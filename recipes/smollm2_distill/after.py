"""Scores of the teacher, and of the student before both stages."""

import json
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "common"))
import arithmetic
import files
import sampling

models = {"teacher": ".recipes/models/SmolLM2-135M-arithmetic", "cut student": ".recipes/models/SmolLM2-half"}
rows = files.read(arithmetic.TEST)
found = {who: sampling.pass_at_1(model, "math", rows, max_new_tokens=64) for who, model in models.items()}
print(json.dumps({f"{name} {who}": value for who, values in found.items() for name, value in values.items()}))
