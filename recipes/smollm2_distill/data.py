"""A teacher, a student with half of its layers, and the teacher's own answers to the training questions."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "common"))
import arithmetic
import files
import sampling
import shorter
import smollm2

TEACHER = Path(".recipes/models/SmolLM2-135M-arithmetic")
STUDENT = Path(".recipes/models/SmolLM2-half")
# Of the 30 layers: every second one, and the last.
LAYERS = [*range(0, 28, 2), 29]
SAMPLES, TEMPERATURE, MAX_NEW_TOKENS = 4, 1.0, 64


def ensure_teacher():
    """Trains the teacher as smollm2_arithmetic does, unless its folder is there."""
    if TEACHER.is_dir():
        return
    program, backend = os.environ[sampling.PROGRAM], os.environ.get("ANYROLL_BACKEND", "cuda")
    config = "cpu" if backend == "cpu" else "config"
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        precision = ["--set", "strategy.precision=fp32"] if backend == "cpu" else []
        subprocess.run([program, "run", f"recipes/smollm2_arithmetic/{config}.yaml", "--output", run, "--set", f"backend={backend}", *precision], check=True)
        subprocess.run([program, "export", run, "--to", TEACHER], check=True)


def answers(rows):
    """Returns the teacher's finished answers, right or wrong, each once."""
    completions = sampling.sample(TEACHER, [row["question"] for row in rows], SAMPLES, TEMPERATURE, MAX_NEW_TOKENS)
    found = []
    for row, many in zip(rows, completions):
        texts = sorted({text for text, finished in many if finished and text})
        found += [{"question": row["question"], "answer": text} for text in texts]
    return found


def make():
    return {name: answers(files.read(path)) for name, path in (("train", arithmetic.TRAIN), ("test", arithmetic.TEST))}


arithmetic.ensure()
smollm2.ensure()
ensure_teacher()
shorter.ensure(TEACHER, STUDENT, LAYERS)
files.ensure("distill", make)
