"""Prompts for `bench_speculation`, to standard output: whose answers repeat their prompt, repeat themselves, or do neither.

    python bench/generate/prompts.py > prompts.jsonl
    cargo run --release -p anyroll-pipelines --example bench_speculation MODEL prompts.jsonl 1 8 32
"""

import json

PARAGRAPHS = [
    "The river begins in the hills north of the town and runs through three valleys before it meets the sea.",
    "A library keeps its books in order so that a reader can find each of them by its author and its subject.",
    "In winter the harbour freezes, and the ships wait outside until the ice is thin enough for the first of them.",
    "The engine has four cylinders, a pump for water, a pump for oil and a belt that drives both of them.",
    "Each morning the baker mixes flour, water, salt and yeast, and leaves the dough to rise for an hour.",
    "The telescope stands on a mountain far from any city, where the air is dry and the nights are dark.",
    "Bees dance to tell the others of the hive in which direction the flowers are, and how far away.",
    "The bridge was built of stone by two villages, each of which began on its own side of the water.",
]
TOPICS = [
    "a lighthouse keeper", "the first day at a new school", "a lost dog", "a train in the desert",
    "two rival cooks", "a storm at sea", "an old clock", "a letter without a sender",
]


def prompts():
    for text in PARAGRAPHS:
        yield "copy", f"Copy this text word for word, twice: {text} {text}"
    for number in range(2, 10):
        yield "table", f"Write the multiplication table of {number} from {number} x 1 to {number} x 20, one line each."
    for topic in TOPICS:
        yield "story", f"Write a short story about {topic}."


for kind, prompt in prompts():
    print(json.dumps({"kind": kind, "prompt": prompt}))
