"""Starts the ranks of `strategy/examples/train` and of peer.py, one after the other, and prints one JSON line each.

    cargo build --release -p anyroll-strategy --example train
    python3 bench/train/run.py --world-size 4 ours:model=7b,stage=3 peer:model=7b

A run is `ours:` with the example's keys, or `peer:` with peer.py's options (`model=7b,recompute=full`, or
`model=7b,deepspeed=3,offload`).
"""

import argparse
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--world-size", type=int, default=1)
    parser.add_argument("--backend", default="cuda")
    parser.add_argument("--program", default=ROOT / "target/release/examples/train", help="the example")
    parser.add_argument("--python", default=sys.executable, help="one that can import torch and transformers")
    parser.add_argument("--timeout-s", type=float, default=300, help="for each run")
    parser.add_argument("runs", nargs="+")
    options = parser.parse_args()
    failed = 0
    for run in options.runs:
        who, _, keys = run.partition(":")
        keys = [key for key in keys.split(",") if key]
        failed += not start(options, who, keys)
    sys.exit(failed > 0)


def start(options, who, keys):
    """Returns true if every rank ended well."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    ranks = []
    for rank in range(options.world_size):
        environment = {"NCCL_NVLS_ENABLE": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "RANK": str(rank),
                       "LOCAL_RANK": str(rank), "WORLD_SIZE": str(options.world_size), **os.environ}
        if who == "ours":
            command = [options.program, options.backend, rank, options.world_size, port, *keys]
        else:
            flags = [part for key in keys for part in f"--{key.replace('_', '-')}".split("=")]
            command = [options.python, Path(__file__).with_name("peer.py"), *flags]
        ranks.append(subprocess.Popen([str(part) for part in command], env=environment))
    try:
        failed = [rank.wait(options.timeout_s) for rank in ranks]
    except subprocess.TimeoutExpired:
        failed = ["timeout"]
    finally:
        for rank in ranks:
            if rank.poll() is None:
                rank.send_signal(signal.SIGKILL)
    if any(failed):
        print(f"{who} {' '.join(keys)}: ended with {failed}", file=sys.stderr, flush=True)
    return not any(failed)


if __name__ == "__main__":
    main()
