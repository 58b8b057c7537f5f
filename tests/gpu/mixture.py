#!/usr/bin/env python3
"""A mixture of experts that learns to sort, on GPUs, at every stage of ZeRO and in both precisions: whatever a run writes of
its steps, but for times and memory, must be the same at each stage.

    tests/gpu/mixture.py [--anyroll target/release/anyroll] [--devices all] [--steps 30]

Needs one GPU or more with NVIDIA's driver, and a libtorch for it where `ANYROLL_TORCH_LIB` says.
"""

import argparse
import json
import pathlib
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[2]
MIXTURE = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 88, "qk_norm": "true"}
MEASURED = ("time/", "perf/")


def steps_of(args, folder, precision, stage):
    """The metrics of every step, without what is measured."""
    sets = {f"model.decoder.{name}": value for name, value in MIXTURE.items()}
    sets |= {"strategy.precision": precision, "strategy.zero_stage": stage}
    sets |= {"pipeline.rlvr.steps": args.steps, "devices": args.devices, "name": f"{precision}_{stage}"}
    command = [args.anyroll, "run", str(ROOT / "configs/rlvr_sort_cuda.yaml")]
    command += [word for field, value in sets.items() for word in ("--set", f"{field}={value}")]
    subprocess.run(command, cwd=folder, check=True, timeout=300, stdout=subprocess.DEVNULL)
    [metrics] = pathlib.Path(folder).glob(f"runs/{precision}_{stage}-*/metrics.jsonl")
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    return [{name: value for name, value in line.items() if not name.startswith(MEASURED)} for line in lines]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--anyroll", default=str(ROOT / "target/release/anyroll"))
    parser.add_argument("--devices", default="all")
    parser.add_argument("--steps", type=int, default=30)
    args = parser.parse_args()
    failed = False
    with tempfile.TemporaryDirectory() as folder:
        for precision in ("fp32", "bf16"):
            whole = steps_of(args, folder, precision, 0)
            print(f"{precision}: pass@1 {whole[0]['eval/pass@1']} to {whole[-1]['eval/pass@1']}")
            for stage in (1, 2, 3):
                sharded = steps_of(args, folder, precision, stage)
                names = {name for a, b in zip(whole, sharded) for name in a if a[name] != b.get(name)}
                is_same = not names and len(whole) == len(sharded)
                failed |= not is_same
                print(f"{precision} stage {stage}:", "the same" if is_same else f"differs in {sorted(names)}")
    sys.exit(failed)


if __name__ == "__main__":
    main()
