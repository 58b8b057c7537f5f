"""pass@1 of the model before and after the run, which the comparison of pairs does not show."""

import json
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "common"))
import arithmetic
import files
import sampling
import smollm2

rows = files.read(arithmetic.TEST)
measured = {"before": smollm2.FOLDER, "after": sys.argv[1]}
found = {when: sampling.pass_at_1(model, "math", rows) for when, model in measured.items()}
print(json.dumps({f"{name} {when}": value for when, values in found.items() for name, value in values.items()}))
