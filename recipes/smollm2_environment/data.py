"""Games, which differ by a name that tells nothing of the number; and the model."""

import itertools
import random
import string
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "common"))
import files
import smollm2

GAMES, HELD_OUT, LARGEST = 2256, 256, 20


def make():
    draw = random.Random(9)
    names = draw.sample(["".join(letters) for letters in itertools.product(string.ascii_uppercase, repeat=3)], GAMES)
    asked = "Game {}: I think of a whole number from 1 to {}. Which number is it? Answer with one number."
    rows = [{"question": asked.format(name, LARGEST), "answer": str(draw.randint(1, LARGEST))} for name in names]
    return {"test": rows[:HELD_OUT], "train": rows[HELD_OUT:]}


files.ensure("guesses", make)
smollm2.ensure()
