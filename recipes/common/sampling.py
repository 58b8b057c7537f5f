"""Samples and scores of a model, by the program of the environment variable ANYROLL."""

import json
import os
import subprocess

PROGRAM = "ANYROLL"


def sample(model, questions, samples, temperature, max_new_tokens):
    """Returns `samples` completions of each question: a text, and true if it ended by itself."""
    lines = "".join(json.dumps({"prompt": question}) + "\n" for question in questions)
    # The cache is sized by what is in flight, on a host too.
    options = {"--samples": samples, "--temperature": temperature, "--max-new-tokens": max_new_tokens}
    options |= {"--backend": os.environ.get("ANYROLL_BACKEND", "cuda"), "--sequences": 256, "--memory": 0.2}
    flat = [str(part) for option in options.items() for part in option]
    found = call(["generate", str(model), "--chat", "--file", "-", *flat], lines)
    completions = [[None] * samples for _ in questions]
    for row in found:
        completions[row["line"] - 1][row["sample"]] = (row["completion"], row["ending"] == "stop")
    return completions


def scores(reward, rows, completions):
    """Returns the reward of each row's completions."""
    pairs = [(row, text, finished) for row, many in zip(rows, completions) for text, finished in many]
    lines = "".join(
        json.dumps({"prompt": row["question"], "answer": row["answer"], "completion": text, "finished": finished}) + "\n"
        for row, text, finished in pairs
    )
    found = iter([row["score"] for row in call(["reward", reward, "--file", "-"], lines)])
    return [[next(found) for _ in many] for many in completions]


def pass_at_1(model, reward, rows, samples=4, temperature=1.0, max_new_tokens=128):
    """Returns the mean score of the samples, and that of the likeliest completion."""
    questions = [row["question"] for row in rows]
    sampled = scores(reward, rows, sample(model, questions, samples, temperature, max_new_tokens))
    greedy = scores(reward, rows, sample(model, questions, 1, 0, max_new_tokens))
    mean = lambda lists: sum(map(sum, lists)) / sum(map(len, lists))
    return {"greedy": mean(greedy), "pass@1": mean(sampled)}


def call(arguments, lines):
    """Runs the program on lines, and returns the objects that it prints."""
    done = subprocess.run([os.environ[PROGRAM], *arguments], input=lines, stdout=subprocess.PIPE, text=True)
    if done.returncode != 0:
        raise SystemExit(f"anyroll {arguments[0]} ended with exit code {done.returncode}")
    return [json.loads(line) for line in done.stdout.splitlines()]
