"""A step of DPO by anyroll and by TRL, on the same GPU in turn: `run.py MODEL_FOLDER [--skip-peer]`.

`../rlvr_gpu/setup.py` writes the folder; the pairs are written here. Prints the median step of each after the first two.
"""

import argparse
import json
import pathlib
import random
import statistics
import subprocess
import sys
import tempfile

HERE = pathlib.Path(__file__).resolve().parent
ANYROLL = HERE.parent.parent / "target/release/anyroll"
WARM_UP = 2
PAIRS, PROMPT_TOKENS, ANSWER_TOKENS = 512, 512, 256


def write_pairs(folder):
    vocabulary = json.loads((folder / "config.json").read_text())["vocab_size"]
    draw = random.Random(0)
    words = lambda count: " ".join(f"w{draw.randrange(2, vocabulary)}" for _ in range(count))
    with open(folder / "pairs.jsonl", "w") as file:
        for _ in range(PAIRS):
            # With their end tokens.
            chosen, rejected = (" " + words(ANSWER_TOKENS - 1) for _ in range(2))
            pair = {"prompt": words(PROMPT_TOKENS), "chosen": chosen, "rejected": rejected}
            file.write(json.dumps(pair) + "\n")
    return folder / "pairs.jsonl"


def ours(arguments, pairs):
    with tempfile.TemporaryDirectory() as folder:
        run = pathlib.Path(folder) / "run"
        sets = [
            f"model.path={arguments.folder}",
            f"pipeline.offline.data.file.path={pairs}",
            "devices=1",
            *arguments.set,
        ]
        command = [arguments.anyroll, "run", HERE / "offline.yaml", "--output", run]
        command += [part for one in sets for part in ("--set", one)]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if done.returncode != 0:
            sys.exit(done.stdout)
        lines = (run / "metrics.jsonl").read_text().splitlines()
    steps = [step for step in map(json.loads, lines) if "time/step_s" in step]
    median = lambda key: statistics.median(step.get(key, 0.0) for step in steps[WARM_UP:])
    print(f"anyroll: {median('time/step_s'):.3f} s a step, {median('perf/shared_rows'):.2f} of the rows shared;", end=" ")
    print("losses", *(f"{step['loss']:.4f}" for step in steps), flush=True)
    return median("time/step_s")


def peer(arguments, pairs):
    command = [arguments.python, HERE / "peer.py", arguments.folder, pairs, *arguments.peer.split()]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if done.returncode != 0:
        sys.exit(done.stdout)
    found = next(json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"seconds"'))
    seconds = statistics.median(found["seconds"][WARM_UP:])
    print(f"TRL {arguments.peer}: {seconds:.3f} s a step, {found['peak_gib']:.1f} GiB;", end=" ")
    print(f"{found['prompt_tokens']:.0f} tokens a prompt; losses", *found["losses"])
    return seconds


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--anyroll", default=ANYROLL)
    parser.add_argument("--python", default=sys.executable, help="one with torch, transformers, TRL and datasets")
    parser.add_argument("--set", nargs="+", default=[], help="of anyroll's config")
    parser.add_argument("--peer", default="", help="options of peer.py, such as '--dtype bfloat16'")
    parser.add_argument("--skip-peer", action="store_true")
    arguments = parser.parse_args()
    pairs = write_pairs(arguments.folder)
    mine = ours(arguments, pairs)
    if not arguments.skip_peer:
        print(f"{peer(arguments, pairs) / mine:.2f} times as fast", flush=True)


if __name__ == "__main__":
    main()
