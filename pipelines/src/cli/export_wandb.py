"""Writes a run that comes as JSON on stdin with the wandb package: what `anyroll export-wandb` starts."""

import json
import sys

try:
    import wandb
except ImportError:
    sys.exit(f"{sys.executable} has no wandb: install it there (pip install wandb), or name another with --python")

run = json.load(sys.stdin)
# The id is the folder's name: a run that is exported again goes on where it was, and is not there twice.
with wandb.init(
    project=run["project"],
    entity=run["entity"],
    name=run["name"],
    id=run["id"],
    resume="allow",
    mode=run["mode"],
    dir=run["dir"],
    config=run["config"],
) as board:
    for step, metrics in run["steps"]:
        # What was not finite has no number in JSON.
        board.log({name: float("nan") if value is None else value for name, value in metrics.items()}, step=step)
