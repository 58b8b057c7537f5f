"""Soak: a long RLVR run with everything on, whose processes are sampled. Fails if they grow.

    python3 tests/soak.py target/release/anyroll --hours 2

Two ranks sample asynchronously. Rewards are a Python function, programs in the sandbox, and built-in ones. Evaluations and
checkpoints come often. Memory (proportional set size), descriptors and threads are summed over all processes of the run. A
slope is that of a least-squares line over the last three quarters of the time.
"""

import argparse
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time

MOST_MB_PER_1000_STEPS = 0.5
MOST_DESCRIPTORS_OR_THREADS = 3.0

FUNCTION = "def f(completions, answer, **columns):\n    return [float(it[:1] == gold[:1]) for it, gold in zip(completions, answer)]\n"


def config_sets(folder):
    path = folder / "f.py"
    path.write_text(FUNCTION)
    records = folder / "train.jsonl"
    with records.open("w") as lines:
        for number in range(200):
            tests = json.dumps({"asserts": [f"assert f({number}) == {number}"]})
            lines.write(json.dumps({"prompt": f"{number:04d}>", "answer": tests}) + "\n")
    reward = (
        f"[{{exact: {{}}, domains: [sort]}}, {{python: {{path: {path}, function: f}}, weight: 0.1, domains: [sort]}}, "
        "{code: {}, domains: [programs]}]"
    )
    sources = f"[{{domain: sort, data: {{sort: {{digits: 4}}}}}}, {{domain: programs, data: {{file: {{path: {records}, held_out_percent: 10}}}}}}]"
    return [
        # Other work may take the processors for minutes.
        "strategy.collective_timeout_s=600",
        "pipeline.rlvr.steps=100000000",
        "pipeline.rlvr.warmup.steps=20",
        "pipeline.rlvr.optimizer.schedule={constant: {}}",
        "pipeline.rlvr.prompts_per_step=4",
        "pipeline.rlvr.group_size=4",
        "pipeline.rlvr.mini_batches=1",
        "pipeline.rlvr.rollout.async={ahead: 1}",
        "pipeline.rlvr.evaluation={every: 200, prompts: 8, samples: 2}",
        "pipeline.rlvr.checkpoint={every: 200, keep_last: 2}",
        f"pipeline.rlvr.data={{mix: {sources}}}",
        "model.decoder.max_length=64",
        "pipeline.rlvr.rollout.max_new_tokens=40",
        f"pipeline.rlvr.reward={reward}",
    ]


def tree(root):
    """Process ids of `root` and all below it."""
    parents = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                status = pathlib.Path("/proc", entry, "stat").read_text()
                parents[int(entry)] = int(status.rpartition(")")[2].split()[1])
            except OSError:
                pass
    found, grew = {root}, True
    while grew:
        more = {pid for pid, parent in parents.items() if parent in found} - found
        found |= more
        grew = bool(more)
    return found


def sample(root):
    """Memory in MB, descriptors and threads of the long-lived processes: those of the sandbox come and go."""
    total = [0.0, 0, 0]
    for pid in tree(root):
        folder = pathlib.Path("/proc", str(pid))
        try:
            if "sandbox" in (folder / "comm").read_text():
                continue
            rollup = (folder / "smaps_rollup").read_text()
            kib = next(int(line.split()[1]) for line in rollup.splitlines() if line.startswith("Pss:"))
            row = [kib / 1024, len(os.listdir(folder / "fd")), len(os.listdir(folder / "task"))]
        except (OSError, StopIteration):
            continue
        total = [a + b for a, b in zip(total, row)]
    return total


def slope(xs, ys):
    mean_x, mean_y = sum(xs) / len(xs), sum(ys) / len(ys)
    spread = sum((x - mean_x) ** 2 for x in xs)
    return sum((x - mean_x) * (y - mean_y) for x, y in zip(xs, ys)) / spread if spread else 0.0


def growth(rows):
    """Prints what was sampled; true if something grows."""
    print(f"{rows[-1][0]} steps; {rows[-1][0] - rows[0][0]} of them after the first quarter, {len(rows)} samples")
    grows = False
    for column, name in enumerate(["memory_mb", "descriptors", "threads"], start=1):
        values = [row[column] for row in rows]
        per_1000 = 1000 * slope([row[0] for row in rows], values)
        most = MOST_MB_PER_1000_STEPS if column == 1 else MOST_DESCRIPTORS_OR_THREADS
        print(f"{name}: {min(values):.1f} to {max(values):.1f}, {per_1000:+.3f} per 1,000 steps")
        grows |= per_1000 > most
    return grows


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("anyroll")
    parser.add_argument("--hours", type=float, default=2.0)
    parser.add_argument("--every-s", type=float, default=10.0)
    args = parser.parse_args()
    root = pathlib.Path(__file__).resolve().parent.parent
    with tempfile.TemporaryDirectory() as scratch:
        folder = pathlib.Path(scratch)
        run = folder / "run"
        command = [os.path.abspath(args.anyroll), "run", "configs/rlvr_sort_cpu_2ranks.yaml", "--output", str(run)]
        for change in config_sets(folder):
            command += ["--set", change]
        with (folder / "log").open("w") as log:
            process = subprocess.Popen(command, cwd=root, stdout=log, stderr=log)
        rows, end = [], time.monotonic() + args.hours * 3600
        while time.monotonic() < end and process.poll() is None:
            time.sleep(args.every_s)
            metrics = run / "metrics.jsonl"
            if metrics.exists():
                with metrics.open("rb") as lines:
                    steps = sum(1 for _ in lines)
                rows.append([steps, *sample(process.pid)])
        ended = process.poll()
        process.terminate()
        process.wait(timeout=60)
        grows = rows and growth(rows[len(rows) // 4 :])
        if ended is not None:
            sys.exit(f"the run ended by itself with {ended}: {(folder / 'log').read_text()[-2000:]}")
        sys.exit("it grows" if grows else 0)


if __name__ == "__main__":
    main()
