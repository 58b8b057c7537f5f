"""Pairs of a right and a wrong answer to arithmetic, both sampled from SmolLM2 itself."""

import random

import arithmetic
import files
import sampling
import smollm2

SAMPLES, PAIRS = 8, 4
# A little below 1, where more of the samples are right.
TEMPERATURE, MAX_NEW_TOKENS = 0.8, 96


def of_questions(rows, draw):
    """Returns up to PAIRS pairs for each question with right and wrong samples, without two of the same answers."""
    completions = sampling.sample(smollm2.FOLDER, [row["question"] for row in rows], SAMPLES, TEMPERATURE, MAX_NEW_TOKENS)
    found = []
    for row, many, scores in zip(rows, completions, sampling.scores("math", rows, completions)):
        # A text that was cut has no end to learn.
        judged = sorted({(text, score >= 1) for (text, finished), score in zip(many, scores) if finished and text})
        right = [text for text, is_right in judged if is_right]
        wrong = [text for text, is_right in judged if not is_right]
        pairs = [(chosen, rejected) for chosen in right for rejected in wrong]
        for chosen, rejected in draw.sample(pairs, min(PAIRS, len(pairs))):
            found.append({"question": row["question"], "chosen": chosen, "rejected": rejected})
    return found


def make():
    draw = random.Random(5)
    train, test = files.read(arithmetic.TRAIN), files.read(arithmetic.TEST)
    return {"train": of_questions(train, draw), "test": of_questions(test, draw)}


def ensure():
    arithmetic.ensure()
    smollm2.ensure()
    files.ensure("pairs", make)
