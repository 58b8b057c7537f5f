"""A recipe by anyroll and by TRL: the same model, questions, reward and settings, several seeds each.

    python3 bench/recipes/run.py FOLDER [--python PYTHON] [--seeds 0 1 2] [--gpus 0] [--only anyroll|trl] [--small]

Writes each run's rows into FOLDER, then `table.md` and `curves.svg` from all runs that FOLDER has. A finished run is not
made again, so that runs may be made in several calls. Each of `--gpus` has one run at a time. PYTHON has torch,
transformers, TRL and datasets. `--small` tries both programs for two steps on the CPU.
"""

import argparse
import json
import os
import queue
import subprocess
import sys
import threading
import time
from pathlib import Path

import report

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
RECIPE = "recipes/smollm2_arithmetic"
SETTINGS = {
    "model": ".recipes/models/SmolLM2-135M-Instruct",
    "train": ".recipes/data/arithmetic/train.jsonl",
    "test": ".recipes/data/arithmetic/test.jsonl",
    "reward": "math",
    "steps": 80,
    "prompts": 32,
    "group": 8,
    "micro_batch": 64,
    "max_new_tokens": 128,
    "learning_rate": 1e-5,
    "eval_every": 10,
    "eval_prompts": 256,
    "eval_samples": 4,
}
SMALL = {"steps": 2, "prompts": 2, "group": 2, "micro_batch": 2, "max_new_tokens": 8, "eval_every": 1, "eval_prompts": 4}


def ours(settings, seed, given, run):
    """Returns the command of an anyroll run into the folder `run`."""
    rlvr = "pipeline.rlvr"
    fields = {
        "backend": "cpu" if given.small else "cuda",
        "seed": seed,
        "strategy.precision": "fp32" if given.small else "bf16",
        "strategy.micro_batch_size": settings["micro_batch"],
        "strategy.micro_batch_tokens": "null",  # the recipe's
        f"{rlvr}.steps": settings["steps"],
        f"{rlvr}.prompts_per_step": settings["prompts"],
        f"{rlvr}.group_size": settings["group"],
        f"{rlvr}.rollout.max_new_tokens": settings["max_new_tokens"],
        f"{rlvr}.rollout.batch_size": settings["prompts"] * settings["group"],
        f"{rlvr}.optimizer.adamw.learning_rate": settings["learning_rate"],
        f"{rlvr}.optimizer.schedule": "{constant: {warmup_steps: 0}}",
        f"{rlvr}.evaluation.every": settings["eval_every"],
        f"{rlvr}.evaluation.prompts": settings["eval_prompts"],
        f"{rlvr}.evaluation.samples": settings["eval_samples"],
    }
    sets = [part for name, value in fields.items() for part in ("--set", f"{name}={value}")]
    return [given.anyroll, "run", f"{RECIPE}/config.yaml", "--output", run, *sets]


def theirs(seed, given, rows):
    """Returns the command of a TRL run whose rows go into the file `rows`."""
    cpu = ["--cpu"] if given.small else []
    path = given.folder / "settings.json"
    return [given.python, HERE / "peer.py", path, rows, "--seed", seed, "--anyroll", given.anyroll, *cpu]


def one(program, seed, gpu, settings, given):
    """Makes a run, and keeps its rows, its wall time and what it printed."""
    name = f"{program}_seed{seed}"
    kept = given.folder / f"{name}.jsonl"
    if kept.exists():
        return
    work = given.folder / "work" / name
    subprocess.run(["rm", "-rf", work], check=True)
    work.mkdir(parents=True)
    rows = work / "run/metrics.jsonl" if program == "anyroll" else work / "rows.jsonl"
    command = ours(settings, seed, given, work / "run") if program == "anyroll" else theirs(seed, given, rows)
    variables = {**os.environ, "CUDA_VISIBLE_DEVICES": gpu, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    began = time.monotonic()
    with open(given.folder / f"{name}.log", "w", encoding="utf-8") as log:
        code = subprocess.run(list(map(str, command)), stdout=log, stderr=subprocess.STDOUT, cwd=ROOT, env=variables).returncode
    wall = round(time.monotonic() - began, 1)
    print(f"{name}: exit code {code}, {wall} s", flush=True)
    found = rows.read_text(encoding="utf-8") if rows.exists() else ""
    end = {"program": program, "seed": seed, "exit_code": code, "all_s": wall}
    write(kept, found + json.dumps(end) + "\n")


def write(path, content):
    """Writes a file aside and renames it: another call may read it."""
    aside = path.with_name(f"{path.name}.{os.getpid()}.new")
    aside.write_text(content, encoding="utf-8")
    aside.rename(path)


def all_runs(runs, settings, given):
    """Makes the runs in order, one at a time on each GPU."""
    waiting = queue.Queue()
    for run in runs:
        waiting.put(run)

    def work(gpu):
        while True:
            try:
                program, seed = waiting.get_nowait()
            except queue.Empty:
                return
            one(program, seed, gpu, settings, given)

    workers = [threading.Thread(target=work, args=(gpu,)) for gpu in given.gpus]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()


def main():
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("folder", type=Path)
    arguments.add_argument("--python", default=sys.executable)
    arguments.add_argument("--anyroll", default=str(ROOT / "target/release/anyroll"))
    arguments.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    arguments.add_argument("--gpus", nargs="+", default=["0"])
    arguments.add_argument("--only", choices=["anyroll", "trl"])
    arguments.add_argument("--small", action="store_true")
    given = arguments.parse_args()
    given.folder, given.anyroll = given.folder.resolve(), str(Path(given.anyroll).resolve())
    given.folder.mkdir(parents=True, exist_ok=True)
    settings = SETTINGS | (SMALL if given.small else {})
    write(given.folder / "settings.json", json.dumps(settings, indent=2) + "\n")
    subprocess.run([given.python, f"{RECIPE}/data.py"], cwd=ROOT, check=True)
    programs = [given.only] if given.only else ["anyroll", "trl"]
    # TRL's runs are the long ones: where several GPUs share them, these go first.
    order = programs if len(given.gpus) == 1 else programs[::-1]
    all_runs([(program, seed) for program in order for seed in given.seeds], settings, given)
    print(report.write(given.folder))


if __name__ == "__main__":
    main()
