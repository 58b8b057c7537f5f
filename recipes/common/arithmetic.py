"""Sums, differences and products of small numbers, as questions."""

import random

import files

TRAIN, TEST = files.DATA / "arithmetic/train.jsonl", files.DATA / "arithmetic/test.jsonl"

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


def ensure():
    files.ensure("arithmetic", make)
