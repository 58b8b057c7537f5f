"""Products of two-digit numbers with worked answers, and the model."""

import random
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "common"))
import files
import smollm2

HELD_OUT = 256


def question(a, b):
    tens, ones = b // 10 * 10, b % 10
    parts = f"{a} * {tens} + {a} * {ones} = {a * tens} + {a * ones}" if ones else f"{a} * {tens // 10} * 10"
    worked = f"{a} * {b} = {parts} = {a * b}. The answer is {a * b}."
    return {"question": f"What is {a} * {b}?", "worked": worked, "answer": str(a * b)}


def make():
    rows = [question(a, b) for a in range(11, 100) for b in range(11, 100)]
    random.Random(3).shuffle(rows)
    return {"test": rows[:HELD_OUT], "train": rows[HELD_OUT:]}


files.ensure("products", make)
smollm2.ensure()
