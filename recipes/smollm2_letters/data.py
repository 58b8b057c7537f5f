"""Letter counting of reasoning-gym, with as many answers of 1 as of 2 and of 3; and the model."""

import random
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "common"))
import files
import smollm2

ANSWERS = ("1", "2", "3")
# Of each answer. The task itself has mostly the answer 1.
COUNT, HELD_OUT = 780, 80


def make():
    import reasoning_gym

    by_answer = {answer: {} for answer in ANSWERS}
    for item in reasoning_gym.create_dataset("letter_counting", seed=7, size=80_000, min_words=1, max_words=3):
        found = by_answer.get(item["answer"], {})
        if len(found) < COUNT:
            found[item["question"]] = item["answer"]
        if all(len(it) == COUNT for it in by_answer.values()):
            break
    assert all(len(it) == COUNT for it in by_answer.values()), {it: len(found) for it, found in by_answer.items()}
    parts = {"test": [], "train": []}
    for found in by_answer.values():
        rows = [{"question": question, "answer": answer} for question, answer in found.items()]
        random.Random(7).shuffle(rows)
        parts["test"] += rows[:HELD_OUT]
        parts["train"] += rows[HELD_OUT:]
    for rows in parts.values():
        random.Random(8).shuffle(rows)
    return parts


files.ensure("letters", make)
smollm2.ensure()
