"""Writes the records of configs/offline_prm_sort_cpu.yaml: digits that are sorted one step at a time, some of them with
a wrong step, after which all steps are wrong.

    python tests/python/make_prm_records.py > configs/steps/sort.jsonl
"""

import json
import random

random.seed(0)
for _ in range(1200):
    number = random.randrange(1000)
    prompt = f"{number:03}"
    steps, labels = sorted(prompt), [True] * 3
    if random.random() < 0.7:
        at = random.randrange(3)
        steps[at] = random.choice([digit for digit in "0123456789" + prompt * 3 if digit != steps[at]])
        labels[at:] = [False] * (3 - at)
    print(json.dumps({"prompt": f"{prompt}>", "completions": steps, "labels": labels}))
