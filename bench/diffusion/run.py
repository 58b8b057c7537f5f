"""Flow-GRPO on the shape of Stable Diffusion 3.5 medium beside diffusers and PyTorch, on the same GPUs in turn.

    run.py [--python PYTHON] [--folder FOLDER] [--tiny] [key=value ...]

Prints a table. Build first: `cargo build --release`. PYTHON has torch and diffusers; FOLDER is made if it is not there.
"""

import argparse
import contextlib
import json
import os
import pathlib
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parent.parent
SETTINGS = dict(
    devices=1, zero_stage=0, steps=4, pixels=512, prompts=4, group_size=8, denoising_steps=10, trained_steps=5, guidance=4.5, rank=32, alpha=64.0,
    micro_batch_size=4, sample_batch_size=16, decode_batch_size=4, checkpointing=False,
)


@contextlib.contextmanager
def most_in_use():
    """Yields a dictionary that gets `memory_bytes`: the most that the driver says is in use on one GPU meanwhile, caches and all; nothing where there is no nvidia-smi."""
    found, done = {}, threading.Event()
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]

    def watch():
        while not done.wait(0.2):
            used = [int(line) * 2**20 for line in subprocess.run(query, capture_output=True, text=True, check=True).stdout.split()]
            found["memory_bytes"] = max(found.get("memory_bytes", 0), *used)

    watcher = threading.Thread(target=watch) if shutil.which("nvidia-smi") else None
    if watcher:
        watcher.start()
    try:
        yield found
    finally:
        done.set()
        if watcher:
            watcher.join()


def ours(folder, settings, backend):
    """The metrics of the median step, without the first."""
    prompts = f"{{embeddings: {folder}/prompts.safetensors, height: {settings['pixels']}, width: {settings['pixels']}}}"
    fields = {
        "backend": backend,
        "devices": settings["devices"],
        "model.diffusers": folder,
        "model.lora.rank": settings["rank"],
        "model.lora.alpha": settings["alpha"],
        "strategy.zero_stage": settings["zero_stage"],
        "strategy.offload.optimizer": "none",
        "strategy.deterministic": "false",
        "strategy.recompute": "full" if settings["checkpointing"] else "none",
        "strategy.micro_batch_size": settings["micro_batch_size"],
        "pipeline.diffusion.data.prompts": prompts,
        "pipeline.diffusion.reward": f"{{torchscript: {{path: {folder}/scorer.pt}}}}",
        "pipeline.diffusion.steps": settings["steps"],
        "pipeline.diffusion.prompts_per_step": settings["prompts"],
        "pipeline.diffusion.group_size": settings["group_size"],
        "pipeline.diffusion.mini_batches": 1,
        "pipeline.diffusion.sampler.steps": settings["denoising_steps"],
        "pipeline.diffusion.sampler.guidance": settings["guidance"],
        "pipeline.diffusion.sampler.batch_size": settings["sample_batch_size"],
        "pipeline.diffusion.sampler.decode_batch_size": settings["decode_batch_size"],
        "pipeline.diffusion.method.flow_grpo.timestep_fraction": settings["trained_steps"] / settings["denoising_steps"],
        "pipeline.diffusion.evaluation": "{every: 1000, images: 4}",
    }
    with tempfile.TemporaryDirectory() as scratch:
        run = pathlib.Path(scratch) / "run"
        command = [ROOT / "target/release/anyroll", "run", "configs/diffusion_flow_grpo_sd35_cuda.yaml", "--output", run]
        for name, value in fields.items():
            command += ["--set", f"{name}={value}"]
        with most_in_use() as memory:
            done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        if done.returncode != 0:
            sys.exit(done.stderr[-4000:])
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "time/train_s" in line][1:]
    return memory | {name: statistics.median(line[f"time/{name}"] for line in steps) for name in ["generate_s", "reward_s", "train_s"]}


def peer(python, folder, settings):
    launcher = [python]
    if settings["devices"] > 1:
        launcher += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={settings['devices']}"]
    command = [*launcher, HERE / "peer.py", folder, json.dumps(settings)]
    with most_in_use() as memory:
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return memory | json.loads(done.stdout.splitlines()[-1])


def row(name, settings, times):
    images = settings["prompts"] * settings["group_size"]
    trained = images * settings["trained_steps"]
    whole = times["generate_s"] + times["reward_s"] + times["train_s"]
    figures = [images / times["generate_s"], trained / times["train_s"], images / times["reward_s"], whole]
    memory = f"{times['memory_bytes'] / 2**30:.1f}" if "memory_bytes" in times else "-"
    return f"| {name} | " + " | ".join(f"{figure:.2f}" for figure in figures) + f" | {memory} |"


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--python", default=sys.executable, help="one with torch and diffusers")
    parser.add_argument("--folder", type=pathlib.Path, default=ROOT / "runs/bench_diffusion_model")
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--skip-peer", action="store_true")
    parser.add_argument("--tiny", action="store_true", help="a model that a CPU runs in seconds, to try the scripts")
    parser.add_argument("settings", nargs="*", help="such as devices=4 zero_stage=2 prompts=16")
    args = parser.parse_args()
    settings = SETTINGS | (dict(pixels=64, denoising_steps=4, trained_steps=2) if args.tiny else {})
    settings |= {name: json.loads(value) for name, value in (entry.split("=", 1) for entry in args.settings)}
    folder = args.folder.resolve()
    if not (folder / "model_index.json").exists():
        tiny = ["--tiny"] if args.tiny else []
        subprocess.run([args.python, HERE / "make_model.py", folder, *tiny], check=True)
    print(json.dumps(settings))
    print("| | images/s, sampling | images x timesteps/s, training | images/s, decoding and scoring | s a step | GiB in use on a GPU |")
    print("|---|---|---|---|---|---|", flush=True)
    print(row("anyroll", settings, ours(folder, settings, args.backend)), flush=True)
    if not args.skip_peer:
        print(row("diffusers", settings, peer(args.python, folder, settings)), flush=True)


if __name__ == "__main__":
    os.environ.setdefault("PYTHONDONTWRITEBYTECODE", "1")
    main()
