"""A step of GRPO by anyroll and by TRL, on the same GPUs in turn: `run.py MODEL_FOLDER --gpus 1 2 [--skip-peer]`.

`setup.py` writes the folder. Prints the median step of each after the first two, where anyroll's goes, and the most memory
that the driver said of a GPU while it ran, beyond what was in use before.
"""

import argparse
import json
import pathlib
import statistics
import subprocess
import sys
import tempfile

HERE = pathlib.Path(__file__).resolve().parent
ANYROLL = HERE.parent.parent / "target/release/anyroll"
WARM_UP = 2
PHASES = ["gather", "generate", "reward", "reference", "train", "load", "offload"]


class MostMemory:
    """What the driver says of the fullest of the GPUs, every 50 ms within the block; `gib` is the most beyond the first."""

    def __enter__(self):
        query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
        used = subprocess.run(query, stdout=subprocess.PIPE, text=True, check=True).stdout
        self.before = max(map(int, used.split()))
        self.log = tempfile.TemporaryFile("w+")
        self.sampler = subprocess.Popen([*query, "-lms", "50"], stdout=self.log)
        return self

    def __exit__(self, *_):
        self.sampler.terminate()
        self.sampler.wait()
        self.log.seek(0)
        # The last line may be half written.
        self.gib = (max(map(int, self.log.read().split("\n")[:-1])) - self.before) / 1024


def ours(arguments, gpus):
    with tempfile.TemporaryDirectory() as folder:
        run = pathlib.Path(folder) / "run"
        sets = [
            f"model.path={arguments.folder}",
            f"pipeline.rlvr.data.file.path={arguments.folder / 'prompts.jsonl'}",
            f"devices={gpus}",
            *arguments.set,
        ]
        command = [arguments.anyroll, "run", HERE / "rlvr.yaml", "--output", run]
        command += [part for one in sets for part in ("--set", one)]
        with MostMemory() as memory:
            done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if done.returncode != 0:
            sys.exit(done.stdout)
        lines = (run / "metrics.jsonl").read_text().splitlines()
    steps = [step for step in map(json.loads, lines) if "time/step_s" in step][WARM_UP:]
    median = lambda key: statistics.median(step.get(key, 0.0) for step in steps)
    phases = ", ".join(f"{phase} {median(f'time/{phase}_s'):.3f}" for phase in PHASES)
    print(f"anyroll, {gpus} GPUs: {median('time/step_s'):.3f} s a step ({phases};", end=" ")
    print(f"{median('response_length/mean'):.0f} tokens a completion), {memory.gib:.1f} GiB", flush=True)
    return median("time/step_s")


def peer(arguments, gpus):
    launcher = [arguments.python]
    if gpus > 1:
        launcher += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={gpus}"]
    command = [*launcher, HERE / "peer.py", arguments.folder, *arguments.peer.split()]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if done.returncode != 0:
        sys.exit(done.stdout)
    found = next(json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"seconds"'))
    seconds = statistics.median(found["seconds"][WARM_UP:])
    print(f"TRL, {gpus} GPUs: {seconds:.3f} s a step, {found['peak_gib']:.1f} GiB;", end=" ")
    print(f"{found['prompt_tokens']:.0f} tokens a prompt, {found['mean_length']:.0f} a completion", flush=True)
    return seconds


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--gpus", type=int, nargs="+", default=[1])
    parser.add_argument("--anyroll", default=ANYROLL)
    parser.add_argument("--python", default=sys.executable, help="one with torch, transformers, TRL and datasets")
    parser.add_argument("--set", nargs="+", default=[], help="of anyroll's config")
    parser.add_argument("--peer", default="", help="options of peer.py, such as '--deepspeed 2'")
    parser.add_argument("--skip-peer", action="store_true")
    arguments = parser.parse_args()
    for gpus in arguments.gpus:
        mine = ours(arguments, gpus)
        if not arguments.skip_peer:
            print(f"{gpus} GPUs: {peer(arguments, gpus) / mine:.2f} times as fast", flush=True)


if __name__ == "__main__":
    main()
