"""Short runs of two ranks on the CPU, for the checks of other launchers. They start in the root of the checkout."""

import json
import os
import socket
import subprocess
import time
from pathlib import Path

CONFIG = "configs/rlvr_sort_cpu_2ranks.yaml"
SETS = {
    "pipeline.rlvr.data.sort.digits": 3,
    "pipeline.rlvr.warmup.steps": 60,
    "pipeline.rlvr.warmup.optimizer.schedule.constant.warmup_steps": 5,
    "pipeline.rlvr.steps": 8,
    "pipeline.rlvr.prompts_per_step": 8,
    "pipeline.rlvr.group_size": 4,
    "pipeline.rlvr.optimizer.schedule.linear.warmup_steps": 2,
    "pipeline.rlvr.rollout.max_new_tokens": 4,
    "pipeline.rlvr.evaluation.every": 4,
    "pipeline.rlvr.evaluation.prompts": 20,
    "pipeline.rlvr.checkpoint.every": 4,
    "strategy.micro_batch_size": 8,
}
# Metrics that differ from run to run.
MEASURED = ("time/", "perf/")


def arguments(output, sets=None):
    """Returns the arguments of `anyroll` for a run in the folder `output`."""
    sets = SETS | (sets or {})
    return ["run", CONFIG, "--output", str(output), *(part for it in sets.items() for part in ("--set", "{}={}".format(*it)))]


def on_one_host(anyroll, output, sets=None):
    """Trains on one host, whose ranks `anyroll` starts itself."""
    subprocess.run([anyroll, *arguments(output, sets)], check=True, capture_output=True, timeout=300)


def metrics(run):
    """Returns a run's metrics of each step, without those of time."""
    steps = [json.loads(line) for line in (Path(run) / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in step.items() if not name.startswith(MEASURED)} for step in steps]


def assert_same(run, reference):
    """Asserts that two runs have bitwise equal metrics, and learned."""
    own, other = metrics(run), metrics(reference)
    for a, b in zip(own, other):
        assert a == b, f"step {b['step']}: {a} is not {b}"
    assert len(own) == len(other), f"{len(own)} steps and {len(other)}"
    assert sum(step.get("grad_norm", 0) > 0 for step in own) > 2, "nothing was learned"


def free_port():
    """Returns a port that nobody listens at."""
    with socket.socket() as it:
        it.bind(("127.0.0.1", 0))
        return it.getsockname()[1]


def processes_of(run):
    """Returns the processes with this folder among their arguments, with their environment: a run's ranks."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if os.fsencode(run) in (folder / "cmdline").read_bytes().split(b"\0"):
                found[int(folder.name)] = (folder / "environ").read_bytes().decode().split("\0")
        except OSError:
            pass  # It ended in between.
    return found


def rank_of(run, rank):
    """Returns the process of a rank."""
    (found,) = [it for it, variables in processes_of(run).items() if f"RANK={rank}" in variables]
    return found


def wait_until(what, holds, timeout_s=120):
    """Waits until `holds()` is true, and returns it."""
    deadline = time.monotonic() + timeout_s
    while not (value := holds()):
        assert time.monotonic() < deadline, f"not within {timeout_s} s: {what}"
        time.sleep(0.05)
    return value
