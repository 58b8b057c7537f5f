"""Checks deploy/ray on a Ray cluster of two nodes on this machine.

    python tests/python/check_ray.py --anyroll target/release/anyroll

It needs Ray; `ci/ray` installs it. It starts in the root of the checkout. Checked are:

1. two ranks on two nodes, and two in one bundle, have the metrics of one host, bitwise, and its output;
2. a signal saves a checkpoint, and the same command continues, bitwise;
3. a rank that is killed, a node that is lost and a driver that is killed end all ranks;
4. a config that is refused, a program and resources that are missing are reported.
"""

import argparse
import os
import re
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from ray.cluster_utils import Cluster
from short_runs import arguments, assert_same, metrics, on_one_host, processes_of, rank_of, wait_until

SCRIPT = "deploy/ray/anyroll_ray.py"
# A run that does not end before it is stopped.
LONG = {"devices": 1, "pipeline.rlvr.steps": 100000}


class Check:
    """A cluster of two nodes with one CPU each, and a folder for runs."""

    def __init__(self, anyroll, folder):
        self.anyroll, self.folder = str(anyroll.resolve()), folder
        self.cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
        self.second = self.add_node()

    def add_node(self):
        """Adds a node that says it has two GPUs. The CPU backend asks for none."""
        return self.cluster.add_node(num_cpus=1, num_gpus=2)

    def start(self, output, sets, options=()):
        """Starts the script, with what it prints in a file."""
        command = [sys.executable, SCRIPT, "--address", self.cluster.address, "--anyroll", self.anyroll, "--bundles", "2"]
        with open(f"{output}.log", "w") as log:
            return subprocess.Popen(
                [*command, *options, *arguments(output, sets), "--auto-resume"], stdout=log, stderr=subprocess.STDOUT
            )

    def run(self, output, sets, options=()):
        return self.start(output, sets, options).wait(300)

    def started(self, name):
        """Returns a script and the folder of its long run, of which a step is done."""
        output = self.folder / name
        script = self.start(output, LONG)
        wait_until(f"a step of {name}", lambda: (output / "metrics.jsonl").exists() and metrics(output))
        assert len(processes_of(output)) >= 3, processes_of(output)
        return script, output

    def nothing_left(self, output):
        wait_until(f"all processes of {output.name} end", lambda: not processes_of(output), 30)


def says(output, words):
    log = Path(f"{output}.log").read_text()
    assert words in log, f"no {words!r} in {log}"


def check_metrics(check):
    reference, output = check.folder / "reference", check.folder / "two_nodes"
    on_one_host(check.anyroll, reference)
    assert check.run(output, {"devices": 1}) == 0, Path(f"{output}.log").read_text()
    assert_same(output, reference)
    says(output, "held-out")
    print("ok: two nodes have the metrics of one host", flush=True)

    output = check.folder / "one_bundle"
    code = check.run(output, {"devices": 2}, ["--bundles", "1", "--gpus", "2", "--cpus", "1"])
    assert code == 0, Path(f"{output}.log").read_text()
    assert_same(output, reference)
    print("ok: two ranks of one bundle have the metrics of one host", flush=True)
    return reference


def check_signal(check, reference):
    output = check.folder / "interrupted"
    sets = {"devices": 1, "pipeline.rlvr.steps": 300}
    longer = check.folder / "longer"
    on_one_host(check.anyroll, longer, {"pipeline.rlvr.steps": 300})
    script = check.start(output, sets)
    wait_until("a step", lambda: (output / "metrics.jsonl").exists() and metrics(output))
    script.send_signal(signal.SIGTERM)
    assert script.wait(60) == 130, Path(f"{output}.log").read_text()
    check.nothing_left(output)
    assert 0 < len(metrics(output)) < 300
    assert check.run(output, sets) == 0, Path(f"{output}.log").read_text()
    assert_same(output, longer)
    print("ok: a signal saves a checkpoint, and the same command continues", flush=True)


def check_failures(check):
    script, output = check.started("killed_rank")
    os.kill(rank_of(output, 1), signal.SIGKILL)
    assert script.wait(60) != 0
    says(output, "anyroll_ray: rank ")
    check.nothing_left(output)
    print("ok: a killed rank ends the job", flush=True)

    script, output = check.started("killed_driver")
    script.kill()
    check.nothing_left(output)
    print("ok: no rank outlives the script", flush=True)

    script, output = check.started("lost_node")
    check.cluster.remove_node(check.second, allow_graceful=False)
    assert script.wait(120) == 1
    # Ray chooses which bundle is on which node.
    log = Path(f"{output}.log").read_text()
    assert re.search(r"^anyroll_ray: bundle [01] failed: ", log, re.MULTILINE), log
    check.nothing_left(output)
    check.second = check.add_node()
    check.cluster.wait_for_nodes()
    print("ok: a lost node ends the job", flush=True)


def check_mistakes(check):
    output = check.folder / "refused"
    assert check.run(output, {"devices": 1, "pipeline.rlvr.group_size": 0}) == 1
    says(output, "group_size")
    output = check.folder / "no_program"
    assert check.run(output, {}, ["--anyroll", "nowhere/anyroll"]) == 1
    says(output, "nowhere/anyroll")
    output = check.folder / "no_room"
    assert check.run(output, {}, ["--cpus", "2", "--wait", "3"]) == 1
    says(output, "no 2 bundles of {'CPU': 2} within 3.0 s: the cluster has {'CPU': 2.0}")
    print("ok: mistakes are reported", flush=True)


def main():
    parser = argparse.ArgumentParser(description="Checks deploy/ray on two nodes of this machine")
    parser.add_argument("--anyroll", type=Path, required=True)
    anyroll = parser.parse_args().anyroll
    with tempfile.TemporaryDirectory() as folder:
        check = Check(anyroll, Path(folder))
        try:
            reference = check_metrics(check)
            check_signal(check, reference)
            check_mistakes(check)
            check_failures(check)
        finally:
            check.cluster.shutdown()


if __name__ == "__main__":
    main()
