"""Digits that the model paints before and after the run, as a network reads them that training has never asked."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import data
import digits
import painter
import torch

COUNT, STEPS = 100, 10


def spread(pictures, asked):
    """Returns the mean distance of two pictures of the same digit."""
    of_digit = [pictures[asked == digit].mean(1).flatten(1) for digit in range(10)]
    return torch.stack([torch.pdist(it).mean() for it in of_digit]).mean().item()


def measures(folder, device):
    pictures, asked = painter.paint(folder, data.PROMPTS, COUNT, STEPS, device)
    real = spread(*digits.part("judge"))
    found = {"spread": spread(pictures, asked) / real}
    for name in ("reward", "judge"):
        network = torch.jit.load(str(data.FOLDER / f"{name}.pt"))
        with torch.no_grad():
            found[name] = network(pictures, asked).mean().item()
            found[f"{name} reads"] = (network.network(pictures.mean(1, keepdim=True)).argmax(1) == asked).float().mean().item()
    return found


def main():
    device = torch.device("cuda" if os.environ.get("ANYROLL_BACKEND") == "cuda" and torch.cuda.is_available() else "cpu")
    with tempfile.TemporaryDirectory() as folder:
        after = Path(folder) / "model"
        subprocess.run([os.environ["ANYROLL"], "export", sys.argv[1], "--to", after], check=True, stdout=sys.stderr)
        found = {when: measures(model, device) for when, model in {"before": data.MODEL, "after": after}.items()}
    print(json.dumps({f"{name} {when}": value for name in found["before"] for when, value in ((it, found[it][name]) for it in found)}))


if __name__ == "__main__":
    main()
