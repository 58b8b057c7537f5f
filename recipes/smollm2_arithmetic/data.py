"""Sums, differences and products of small numbers, as questions; and the model."""

import random
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "common"))
import files
import smollm2

HELD_OUT = 256


def questions():
    """Returns every question once, in an order that is the same everywhere."""
    asked = [(f"What is {a} + {b}?", a + b, "sums") for a in range(1, 31) for b in range(1, 31)]
    asked += [(f"What is {a} - {b}?", a - b, "differences") for a in range(1, 31) for b in range(1, a + 1)]
    factors = {pair for a in range(1, 13) for b in range(1, 21) for pair in ((a, b), (b, a))}
    asked += [(f"What is {a} * {b}?", a * b, "products") for a, b in sorted(factors)]
    random.Random(21).shuffle(asked)
    return [{"question": question, "answer": str(answer), "kind": kind} for question, answer, kind in asked]


def make():
    rows = questions()
    return {"test": rows[:HELD_OUT], "train": rows[HELD_OUT:]}


files.ensure("arithmetic", make)
smollm2.ensure()
