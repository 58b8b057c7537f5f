"""Runs configs/rlvr_sort_cpu.yaml and its PyTorch counterpart in turn and prints how long the RL steps take.

    python3 bench/rlvr_cpu/run.py --python PATH [--repeats 5] [--threads 1 2] [--models llama gpt] [--json FILE]

PATH is a Python that can `import torch`, of anyroll's version (bench/README.md). Every repeat runs each program once,
so that what else the machine does falls on all of them; the table has medians, of the wall time of the 200 steps
without evaluation and of the CPU time of a whole process (ours from its start, PyTorch's from after its imports).
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CONFIG = ROOT / "configs/rlvr_sort_cpu.yaml"


def children_cpu_s():
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def run(command, threads):
    """Runs to the end; returns the last line of stdout, and the CPU seconds that it took."""
    environment = os.environ | {"OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "passive"}
    before = children_cpu_s()
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"{' '.join(map(str, command))} ended with {done.returncode}:\n{done.stderr}")
    return done.stdout.strip().rpartition("\n")[2], children_cpu_s() - before


def run_ours(threads, seed, steps):
    with tempfile.TemporaryDirectory() as folder:
        sets = [f"threads={threads}", f"seed={seed}", f"pipeline.rlvr.steps={steps}"]
        command = [ROOT / "target/release/anyroll", "run", CONFIG, "--output", f"{folder}/run"]
        _, cpu_s = run(command + [word for value in sets for word in ("--set", value)], threads)
        rows = [json.loads(line) for line in Path(folder, "run/metrics.jsonl").read_text().splitlines()]
    times = [row["time/step_s"] for row in rows if "time/step_s" in row]
    if len(times) != steps:
        sys.exit(f"metrics.jsonl has {len(times)} steps, not {steps}")
    pass_at_1 = [row["eval/pass@1"] for row in rows if "eval/pass@1" in row]
    return {"rl_s": sum(times), "cpu_s": cpu_s, "before": pass_at_1[0], "after": pass_at_1[-1]}


def run_torch(python, model, threads, seed, steps):
    script = ROOT / "bench/rlvr_cpu/prototype.py"
    flags = ["--model", model, "--threads", threads, "--seed", seed, "--steps", steps]
    last, _ = run([python, script, *map(str, flags)], threads)
    result = json.loads(last)
    accuracy = {when: result[when]["pass@1"] for when in ("before", "after")}
    return {"rl_s": result["rl_s"], "cpu_s": result["cpu_s"], **accuracy}


def measure(args):
    """All runs: {(program, threads): [result, ...]}."""
    results = {}
    for repeat in range(args.repeats):
        for threads in args.threads:
            runs = {"anyroll": lambda: run_ours(threads, repeat, args.steps)}
            for model in args.models:
                runs[f"PyTorch {model}"] = (
                    lambda model=model: run_torch(args.python, model, threads, repeat, args.steps)
                )
            for program, start in runs.items():
                result = start()
                results.setdefault((program, threads), []).append(result)
                print(f"{program:14}  threads {threads}  {result['rl_s']:6.1f} s", file=sys.stderr, flush=True)
    return results


def table(results):
    def median(key, name):
        return statistics.median(result[name] for result in results[key])

    lines = [
        "| program | threads | RL steps, s | lowest, s | CPU of the process, s | wall ratio | CPU ratio | pass@1 |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for program, threads in sorted(results, key=lambda key: (key[1], key[0])):
        key, ours = (program, threads), ("anyroll", threads)
        wall, cpu = median(key, "rl_s"), median(key, "cpu_s")
        lowest = min(result["rl_s"] for result in results[key])
        ratios = f"{median(ours, 'rl_s') / wall:.2f} | {median(ours, 'cpu_s') / cpu:.2f}"
        accuracy = f"{median(key, 'before'):.2f} to {median(key, 'after'):.2f}"
        lines.append(
            f"| {program} | {threads} | {wall:.1f} | {lowest:.1f} | {cpu:.1f} | {ratios} | {accuracy} |"
        )
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", default=sys.executable, help="a Python that can import torch")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--models", nargs="+", default=["llama", "gpt"], choices=["llama", "gpt"])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--json", type=Path, help="also write every single result here")
    args = parser.parse_args()
    version = subprocess.run([args.python, "-c", "import torch; print(torch.__version__)"], capture_output=True)
    if version.returncode != 0:
        sys.exit(f"{args.python} cannot import torch (bench/README.md says how to get one that can)")
    results = measure(args)
    print(f"\nPyTorch {version.stdout.decode().strip()}, {args.repeats} runs each, ratios are anyroll / program\n")
    print(table(results))
    if args.json:
        rows = [{"program": p, "threads": t, "runs": runs} for (p, t), runs in results.items()]
        args.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
