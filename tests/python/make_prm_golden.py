"""Writes tests/golden/prm/*: a tiny random token classifier with two labels, beside the tokenizer and chat template of
tests/golden/tiny_model, and `steps.json`: the tokens and labels that TRL's PRMTrainer reads in records, and the
probability that `transformers` gives each step, with the loss and its gradient.

    python tests/python/make_prm_golden.py

Needs torch, transformers 4.57 and trl 0.19 (python -m pip install trl==0.19.1 transformers==4.57.1 datasets accelerate).
"""

import json
import pathlib
import shutil

import torch
from transformers import AutoTokenizer, Qwen2Config, Qwen2ForTokenClassification
from trl import PRMTrainer

RECORDS = [
    ("What is 12 + 34?", ["12 + 34 is 40 + 6.", "It is 46."], [True, True]),
    ("sort 314", ["1", "3", "5", "all"], [True, True, False, False]),
    ("3*3", ["9"], [False]),
    ("Grüße, 你好", ["one two", " three \U0001f600", "4"], [True, False, True]),
]
SEPARATORS = ["\n", " ## "]
root = pathlib.Path(__file__).parent.parent / "golden"
folder = root / "prm"
shutil.rmtree(folder, ignore_errors=True)
folder.mkdir()
for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
    shutil.copy(root / "tiny_model" / name, folder / name)
tokenizer = AutoTokenizer.from_pretrained(folder)
random = torch.Generator().manual_seed(0)
config = Qwen2Config(
    vocab_size=328,
    hidden_size=16,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    intermediate_size=24,
    max_position_embeddings=128,
    tie_word_embeddings=True,  # as published ones of small models say, though there is no head to tie
    num_labels=2,
    attn_implementation="eager",
)
model = Qwen2ForTokenClassification(config).eval()
for name, weight in model.named_parameters():
    noise = torch.randn(weight.shape, generator=random)
    weight.data = 1 + 0.3 * noise if name.endswith("norm.weight") else 0.3 * noise
model.save_pretrained(folder)


def tokenize(prompt, steps, labels, separator="\n", last_only=False, longest=None):
    record = {"prompt": prompt, "completions": steps, "labels": labels}
    limits = {"max_length": longest, "max_prompt_length": None, "max_completion_length": None}
    return PRMTrainer.tokenize_row(
        record, tokenizer, separator, train_on_last_step_only=last_only, is_eval=False, **limits
    )


def probabilities(ids, labels):
    with torch.no_grad():
        found = model(torch.tensor([ids])).logits[0].softmax(-1)[:, 1]
    return [p for p, label in zip(found.tolist(), labels) if label != -100]


records, logits, targets = [], [], []
for prompt, steps, labels in RECORDS:
    read = tokenize(prompt, steps, labels)
    chat = tokenizer.apply_chat_template([{"role": "user", "content": prompt}], add_generation_prompt=True)
    start = len(tokenizer(prompt, add_special_tokens=False).input_ids)
    behind = (read["input_ids"][start:], read["labels"][start:])
    records.append(
        {
            "prompt": prompt,
            "completions": steps,
            "labels": labels,
            "read": {separator: tokenize(prompt, steps, labels, separator) for separator in SEPARATORS},
            "last_only": tokenize(prompt, steps, labels, last_only=True),
            "cut": tokenize(prompt, steps, labels, longest=len(read["input_ids"]) - 1),
            "probabilities": probabilities(read["input_ids"], read["labels"]),
            "chat": probabilities(chat + behind[0], [-100] * len(chat) + behind[1]),
        }
    )
    with torch.no_grad():
        logits.append(model(torch.tensor([read["input_ids"]])).logits[0].double())
    targets.append(torch.tensor(read["labels"]))

logits, targets = torch.cat(logits), torch.cat(targets)
logits, targets = logits[targets != -100].requires_grad_(True), targets[targets != -100]
soft = torch.linspace(0, 1, len(targets), dtype=torch.float64)


def losses(target, labels):
    """Cross-entropy of the two classes, as transformers' token classifiers take it."""
    loss = torch.nn.functional.cross_entropy(logits, target)
    (gradient,) = torch.autograd.grad(loss, logits)
    assert torch.allclose(gradient[:, 0], -gradient[:, 1])
    right = ((logits[:, 1] > logits[:, 0]) == (labels > 0.5)).sum().item()
    return {"labels": labels.tolist(), "loss": loss.item(), "right": right, "gradient": gradient[:, 1].tolist()}


cases = [losses(targets, targets.double()), losses(torch.stack([1 - soft, soft], 1), soft)]
log_odds = (logits[:, 1] - logits[:, 0]).tolist()
golden = {"records": records, "log_odds": log_odds, "losses": cases}
(folder / "steps.json").write_text(json.dumps(golden, indent=1, ensure_ascii=False) + "\n")
