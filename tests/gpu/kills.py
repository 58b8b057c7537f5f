"""Kills or stops a random rank at a random moment of a job of collectives, and looks what becomes of the others.

    cargo build --release -p anyroll-backends --example endure
    python3 tests/gpu/kills.py [--backend cuda] [--ranks 4] [--times 20] [--at-once 1] [--seed 0]

Each time every other rank has to end within 10 s, with an error that names itself and its operation; and when all are
through no process may hold memory of a GPU. `--backend cpu` tries the script where there is none.
"""

import argparse
import concurrent.futures
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DEADLINE_S = 3
MOST_S = 10.0


def free_port(number):
    """Below the ports that the system hands out, of which a rank of another job may take one at any time."""
    for port in range(20_000 + 100 * number, 20_100 + 100 * number):
        with socket.socket() as free:
            if free.connect_ex(("127.0.0.1", port)) != 0:
                return port
    sys.exit("no port is free")


def start(number, endure, backend, ranks):
    port = free_port(number)
    environment = os.environ | {"NCCL_NVLS_ENABLE": "0", "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "FATAL"}
    return [
        subprocess.Popen(
            [endure, backend, str(rank), str(ranks), str(port), str(DEADLINE_S)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(ranks)
    ]


def one(number, draw, arguments):
    """Returns what went wrong, or nothing, and a line that tells what happened."""
    victim, fault = draw.randrange(arguments.ranks), draw.choice([signal.SIGKILL, signal.SIGSTOP])
    delay_s = draw.uniform(0.0, 1.0)
    ranks = start(number, arguments.endure, arguments.backend, arguments.ranks)
    try:
        for rank, process in enumerate(ranks):
            line = process.stdout.readline()
            if line != f"rank {rank} runs\n":
                return f"rank {rank} did not start: {line}{process.stdout.read()}", ""
        time.sleep(delay_s)
        ranks[victim].send_signal(fault)
        begin, problems, ends = time.monotonic(), [], []
        for rank, process in enumerate(ranks):
            if rank == victim:
                continue
            try:
                text, _ = process.communicate(timeout=max(0.1, MOST_S - (time.monotonic() - begin)))
            except subprocess.TimeoutExpired:
                problems.append(f"rank {rank} still ran after {MOST_S} s")
                continue
            ends.append(time.monotonic() - begin)
            if process.returncode != 0:
                problems.append(f"rank {rank} ended with {process.returncode}: {text}")
            elif not re.search(rf"(all_reduce|barrier|nccl\w+) (failed )?on rank {rank}\b", text):
                problems.append(f"rank {rank} does not name itself and its operation: {text}")
        last = f"the last ended {max(ends):.1f} s later" if ends else "nobody ended"
        return "; ".join(problems), f"{number}: {fault.name} of rank {victim} after {delay_s:.2f} s; {last}"
    finally:
        for process in ranks:
            process.kill()
            process.wait()


def device_memory():
    """What processes hold of GPUs."""
    query = ["nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader"]
    return subprocess.run(query, capture_output=True, text=True, check=True).stdout.strip()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--backend", default="cuda")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--times", type=int, default=20)
    parser.add_argument("--at-once", type=int, default=1, help="jobs beside each other, which slow each other down")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--endure", type=Path, default=ROOT / "target/release/examples/endure")
    arguments = parser.parse_args()
    draws = [random.Random(f"{arguments.seed}/{number}") for number in range(arguments.times)]
    failed = 0
    with concurrent.futures.ThreadPoolExecutor(arguments.at_once) as pool:
        jobs = [pool.submit(one, number, draw, arguments) for number, draw in enumerate(draws)]
        for job in jobs:
            problem, line = job.result()
            failed += bool(problem)
            print(f"{line}{': FAILED: ' + problem if problem else ''}", flush=True)
    held = device_memory() if arguments.backend == "cuda" else ""
    print(f"{arguments.times - failed} of {arguments.times} ended in time; device memory left: {held or 'none'}")
    sys.exit(bool(failed or held))


if __name__ == "__main__":
    main()
