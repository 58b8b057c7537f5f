"""Digits, the model that paints them, and two networks that read them. Each is made once."""

import json
import os
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "common"))
import files

FOLDER = files.DATA / "digits"
MODEL = Path(".recipes/models/digits_sd3")
PROMPTS = FOLDER / "prompts.safetensors"
NAMES = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]


def ensure():
    made = [MODEL / "scheduler", PROMPTS, FOLDER / "reward.pt", FOLDER / "judge.pt", FOLDER / "prompts.jsonl"]
    if all(path.exists() for path in made):
        return
    # torch and diffusers are needed only here, and not where the folders were copied to.
    import networks
    import painter
    import torch

    device = torch.device("cuda" if os.environ.get("ANYROLL_BACKEND") == "cuda" and torch.cuda.is_available() else "cpu")
    FOLDER.mkdir(parents=True, exist_ok=True)
    files.write(FOLDER / "prompts.jsonl", [{"prompt": f"the digit {name}"} for name in NAMES])
    networks.ensure(FOLDER, device)
    painter.ensure(MODEL, PROMPTS, device)


if __name__ == "__main__":
    ensure()
    assert json.loads((MODEL / "transformer/config.json").read_text())["_class_name"] == "SD3Transformer2DModel"
