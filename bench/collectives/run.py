"""Collectives of anyroll beside torch.distributed's, on the same GPUs in the same run.

    python3 bench/collectives/run.py --gpus 2 4 [--repeats 3] [--anyroll target/release/anyroll] [--json FILE]

Runs with a Python that has torch for GPUs. The two take turns, so that what else the machine does falls on both; the
table has the medians of the repeats, and torch's time over ours: at 1.00 both are equally fast.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def output(command, gpus):
    visible = ",".join(map(str, range(gpus)))
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": visible, "NCCL_NVLS_ENABLE": "0"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"{' '.join(map(str, command))} ended with {done.returncode}:\n{done.stderr}")
    return done.stdout


def ours(anyroll, gpus):
    report = json.loads(output([anyroll, "doctor", "--bench", "--backend", "cuda", "--json"], gpus))
    return {figure["what"]: figure["seconds"] for figure in report["figures"]}, report


def theirs(gpus):
    return json.loads(output([sys.executable, Path(__file__).with_name("torch_side.py")], gpus).splitlines()[-1])


def counterpart(what):
    """torch's name of a measurement of ours: it has one way to sum."""
    return what.replace(" in rank order", "").replace(" by the library", "")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--gpus", type=int, nargs="+", default=[2])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--anyroll", type=Path, default=ROOT / "target/release/anyroll")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    everything = {}
    for gpus in arguments.gpus:
        rounds = [(ours(arguments.anyroll, gpus), theirs(gpus)) for _ in range(arguments.repeats)]
        everything[gpus] = [{"anyroll": report, "torch": torch} for (_, report), torch in rounds]
        print(f"{gpus} GPUs, medians of {arguments.repeats}\n{'':40} anyroll, ms  torch, ms  torch/anyroll")
        for what in rounds[0][0][0]:
            if counterpart(what) not in rounds[0][1]:
                continue
            mine = statistics.median(own[what] for (own, _), _ in rounds)
            other = statistics.median(torch[counterpart(what)] for _, torch in rounds)
            print(f"{what:40} {mine * 1e3:11.3f} {other * 1e3:10.3f} {other / mine:14.2f}")
    if arguments.json:
        arguments.json.write_text(json.dumps(everything))


if __name__ == "__main__":
    main()
