"""The quickstart's config, made short, for the tests of the installed package."""

import json
import subprocess
import sys
from pathlib import Path

ANYROLL = Path(sys.prefix) / "bin/anyroll"
# A run of about a second.
SHORT = {
    "pipeline.rlvr.data.sort.digits": 3,
    "pipeline.rlvr.warmup.steps": 5,
    "pipeline.rlvr.warmup.optimizer.schedule.constant.warmup_steps": 1,
    "pipeline.rlvr.steps": 3,
    "pipeline.rlvr.prompts_per_step": 8,
    "pipeline.rlvr.group_size": 4,
    "pipeline.rlvr.optimizer.schedule.linear.warmup_steps": 1,
    "pipeline.rlvr.rollout.max_new_tokens": 4,
    "pipeline.rlvr.evaluation.prompts": 20,
    "strategy.micro_batch_size": 8,
}
ADAMW = {"adamw": {"learning_rate": 1e-3}}
# A config as a dict.
CONFIG = {
    "name": "from-python",
    "backend": "cpu",
    "model": {"decoder": {"hidden_size": 16, "layers": 1, "heads": 2, "intermediate_size": 32, "max_length": 16}},
    "strategy": {"micro_batch_size": 8},
    "pipeline": {
        "rlvr": {
            "data": {"sort": {"digits": 3}},
            "reward": "exact",
            "steps": 2,
            "prompts_per_step": 4,
            "group_size": 4,
            "rollout": {"max_new_tokens": 4, "batch_size": 16},
            "algorithm": {"advantage": {"grpo": {}}, "loss": {"clipped": {}}},
            "optimizer": ADAMW,
            "evaluation": {"every": 2, "prompts": 8, "samples": 1},
        }
    },
}


def sets(fields):
    """Returns fields as options of the command line."""
    return [part for name, value in fields.items() for part in ("--set", f"{name}={json.dumps(value)}")]


def anyroll(*arguments, folder):
    """Runs the installed program in a folder."""
    return subprocess.run([ANYROLL, *arguments], cwd=folder, capture_output=True, text=True, timeout=240)
