"""JSONL files of recipes: each is made once, written aside and renamed."""

import json
import os
from pathlib import Path

DATA = Path(".recipes/data")


def read(path):
    with open(path, encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def write(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(path.name + ".new")
    with open(aside, "w", encoding="utf-8") as file:
        for row in rows:
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
        file.flush()
        os.fsync(file.fileno())
    aside.rename(path)
    print(f"{path}: {len(rows)} records")


def ensure(folder, make):
    """Writes `make()`, rows by a file's stem, into a folder of the data, unless an earlier call did so."""
    folder = DATA / folder
    mark = folder / "complete"
    if mark.exists():
        return
    parts = make()
    train, test = ({row["question"] for row in parts.get(stem, [])} for stem in ("train", "test"))
    assert not train & test, f"{folder}: a question is in both files"
    for stem, rows in parts.items():
        write(folder / f"{stem}.jsonl", rows)
    mark.touch()
