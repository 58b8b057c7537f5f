"""A tiny pair of Wan's transformers, trained on a GPU and on the CPU, in fp32: the same videos, rewards and gradients.

    python3 tests/gpu/wan_pair.py [--anyroll target/release/anyroll] [--backend cuda] [--devices 1]

Needs torch and safetensors, and nothing of the model: it is that of tests/golden/tiny_wan, and a second with twice its weights,
as Wan 2.2's 14B is a pair. Prints what each run had at its evaluations and in its gradients' norms, and ends with 1 where the
two differ by more than 1e-3 of a value: a run's own randomness is made on the host, so that only rounding is left.
"""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from safetensors.torch import load_file, save_file

ROOT = Path(__file__).resolve().parents[2]
GOLDEN = "tests/golden/tiny_wan"
SETS = [
    "threads=1",
    "strategy.precision=fp32",
    "strategy.micro_batch_size=2",
    "model.lora.targets=['.*[.]attn1[.]to_q', '.*[.]ffn.net.2']",
    f"pipeline.diffusion.data.prompts={{embeddings: {GOLDEN}/prompts.safetensors, height: 16, width: 32, frames: 5}}",
    f"pipeline.diffusion.reward={{torchscript: {{path: {GOLDEN}/scorer.pt, input: latents}}}}",
    "pipeline.diffusion.sampler.guidance_2=1.0",
    "pipeline.diffusion.method={diffusion_nft: {timesteps: 4}}",
    "pipeline.diffusion.group_size=2",
    "pipeline.diffusion.prompts_per_step=4",
    "pipeline.diffusion.steps=4",
    "pipeline.diffusion.optimizer.adamw.learning_rate=0.01",
    "pipeline.diffusion.optimizer.schedule={constant: {warmup_steps: 0}}",
    "pipeline.diffusion.evaluation.every=2",
]
NAMES = ["eval/reward", "grad_norm"]


def pair(folder):
    shutil.copytree(ROOT / GOLDEN / "model", folder)
    first, second = folder / "transformer", folder / "transformer_2"
    second.mkdir()
    shutil.copy(first / "config.json", second)
    name = "diffusion_pytorch_model.safetensors"
    save_file({name: tensor * 2 for name, tensor in load_file(first / name).items()}, second / name)
    (folder / "model_index.json").write_text('{"boundary_ratio": 0.875}')


def run(args, folder, name, sets):
    command = [args.anyroll, "run", "configs/diffusion_refl_wan_zero2_cuda.yaml", "--output", folder / name]
    for item in SETS + [f"model.diffusers={folder / 'model'}"] + sets:
        command += ["--set", item]
    subprocess.run(command, check=True, timeout=300, cwd=ROOT, stdout=subprocess.DEVNULL)
    steps = [json.loads(line) for line in open(folder / name / "metrics.jsonl")]
    found = {name: [step[name] for step in steps if name in step] for name in NAMES}
    print(name, found, flush=True)
    return found


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--anyroll", type=Path, default=ROOT / "target/release/anyroll")
    parser.add_argument("--backend", default="cuda")
    parser.add_argument("--devices", type=int, default=1)
    args = parser.parse_args()
    args.anyroll = args.anyroll.resolve()
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        pair(folder / "model")
        there = run(args, folder, "device", [f"backend={args.backend}", f"devices={args.devices}"])
        sets = ["strategy.zero_stage=3", "strategy.offload.optimizer=none"]
        here = run(args, folder, "cpu", ["backend=cpu", f"devices={args.devices}", *sets])
    pairs = [(a, b) for name in NAMES for a, b in zip(there[name], here[name], strict=True)]
    is_right = all(abs(a - b) <= 1e-3 * abs(b) for a, b in pairs) and len(pairs) >= 6
    sys.exit(not is_right)


if __name__ == "__main__":
    main()
