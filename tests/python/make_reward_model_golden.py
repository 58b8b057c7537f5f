"""Writes tests/golden/reward_model/*: a tiny random sequence classifier with one label, beside the tokenizer and chat
template of tests/golden/tiny_model, and `scores.json`: what `transformers` scores texts at.

    python tests/python/make_reward_model_golden.py

Needs torch and transformers 4.57.
"""

import json
import pathlib
import shutil

import torch
from transformers import AutoTokenizer, Qwen2Config, Qwen2ForSequenceClassification

CASES = [
    ("What is 12 + 34?", " It is 46."),
    ("sort 314159", "113459"),
    ("3*3", ""),
    ("Grüße, 你好", "one\n\ntwo \U0001f600"),
]
root = pathlib.Path(__file__).parent.parent / "golden"
folder = root / "reward_model"
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
    num_labels=1,
    pad_token_id=None,  # else a text that ends with it is scored before its end
    attn_implementation="eager",
)
model = Qwen2ForSequenceClassification(config).eval()
for name, weight in model.named_parameters():
    noise = torch.randn(weight.shape, generator=random)
    weight.data = 1 + 0.3 * noise if name.endswith("norm.weight") else 0.3 * noise
model.save_pretrained(folder)


def score(ids):
    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0, 0].item()


cases = []
for prompt, completion in CASES:
    messages = [{"role": "user", "content": prompt}, {"role": "assistant", "content": completion}]
    chat = tokenizer.apply_chat_template(messages)
    text = tokenizer(prompt + completion).input_ids
    ended = text + [tokenizer.eos_token_id]
    found = {"chat": score(chat), "ended": score(ended), "cut": score(text)}
    cases.append({"prompt": prompt, "completion": completion, **found})
(folder / "scores.json").write_text(json.dumps(cases, indent=1) + "\n")
