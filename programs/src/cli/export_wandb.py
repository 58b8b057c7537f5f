"""Writes a run, given as JSON on stdin, with the wandb package. Started by `anyroll export-wandb`."""

import json
import sys

try:
    import wandb
except ImportError:
    sys.exit(f"{sys.executable} has no wandb: install it there (pip install wandb), or name another with --python")

run = json.load(sys.stdin)
# The id is the folder's name, so that a second export continues the same run.
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
        # JSON has null for numbers that are not finite.
        board.log({name: float("nan") if value is None else value for name, value in metrics.items()}, step=step)
