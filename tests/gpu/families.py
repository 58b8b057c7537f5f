#!/usr/bin/env python3
"""Families whose heads, widths or rotations are others than those that most tests have, beside transformers on the same GPU: log-probs
of texts by `anyroll score` in fp32 and bf16, greedy completions by `anyroll generate`, and a few steps of GRPO, in which sampling and
training must see the same.

    tests/gpu/families.py [--anyroll target/release/anyroll] [NAME...]

Random weights, a few layers, widths as published. Needs one GPU with NVIDIA's driver, a libtorch for it where `ANYROLL_TORCH_LIB`
says, torch and transformers, 4.57 or 5.
"""

import argparse
import json
import pathlib
import random
import subprocess
import sys
import tempfile

import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers

ROOT = pathlib.Path(__file__).resolve().parents[2]
COMMON = dict(vocab_size=2048, max_position_embeddings=4096, bos_token_id=None, eos_token_id=0, pad_token_id=None)
FACTORS = dict(short_factor=[1.0 + i / 24 for i in range(24)], long_factor=[2.0 + i for i in range(24)])
SHAPES = {
    # Gemma 3 1B's, with windows that the texts are longer than.
    "gemma3": ("Gemma3Text", "Gemma3", dict(
        hidden_size=1152, intermediate_size=6912, num_hidden_layers=7, num_attention_heads=4, num_key_value_heads=1, head_dim=256,
        query_pre_attn_scalar=256, sliding_window=64,
    )),
    # Phi-4-mini's: three quarters of a head are turned.
    "phi3": ("Phi3", "Phi3", dict(
        hidden_size=1024, intermediate_size=2816, num_hidden_layers=4, num_attention_heads=16, num_key_value_heads=4,
        partial_rotary_factor=0.75, original_max_position_embeddings=4096, max_position_embeddings=131072,
        rope_scaling=dict(type="longrope", **FACTORS),
    )),
    "qwen3": ("Qwen3", "Qwen3", dict(
        hidden_size=1024, intermediate_size=3072, num_hidden_layers=4, num_attention_heads=16, num_key_value_heads=8, head_dim=128,
    )),
}  # fmt: skip
TEXTS, PROMPT = 24, 32


def make(name, folder):
    """The model, as transformers saves it, with a tokenizer of a word a token."""
    config, model, shape = SHAPES[name]
    config = getattr(transformers, f"{config}Config")(**{**COMMON, **shape})
    torch.manual_seed(0)
    model = getattr(transformers, f"{model}ForCausalLM")(config).eval()
    for parameter_name, weight in model.named_parameters():
        if parameter_name.endswith("norm.weight"):
            weight.data += 0.2 * torch.randn_like(weight)
    model.save_pretrained(folder)
    words = ["<end>", "<pad>", *(f"w{i}" for i in range(2, COMMON["vocab_size"]))]
    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<pad>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    transformers.PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<end>", pad_token="<pad>").save_pretrained(folder)
    return model.to("cuda")


def texts(count=TEXTS):
    draw = random.Random(1)
    return [[draw.randrange(2, COMMON["vocab_size"]) for _ in range(draw.randrange(40, 400))] for _ in range(count)]


@torch.no_grad()
def scores(model, tokens):
    found = []
    for text in tokens:
        text = torch.tensor(text, device="cuda")
        log_p = model(text[None]).logits[0, :-1].float().log_softmax(-1)
        found += log_p.gather(1, text[1:, None])[:, 0].tolist()
    return torch.tensor(found)


def run(args, *words):
    done = subprocess.run([args.anyroll, *map(str, words)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def scored(args, folder, precision):
    lines = run(args, "score", folder, "--file", folder / "texts.jsonl", "--backend", "cuda", "--precision", precision)
    return torch.tensor([value for line in map(json.loads, lines.splitlines()) for value in line["logprobs"]])


def generated(args, folder, tokens):
    """How far each greedy completion goes as transformers', in fp32."""
    prompts = "".join(json.dumps({"prompt": " ".join(f"w{i}" for i in text[:PROMPT])}) + "\n" for text in tokens)
    (folder / "asked.jsonl").write_text(prompts)
    greedy = ("--temperature", 0, "--max-new-tokens", 48, "--backend", "cuda", "--precision", "fp32")
    lines = run(args, "generate", folder, "--file", folder / "asked.jsonl", *greedy).splitlines()
    completions = {line["line"]: line["completion"].split() for line in map(json.loads, lines)}
    return [completions[number + 1] for number in range(len(tokens))]


@torch.no_grad()
def same_tokens(model, tokens, completions):
    same, all_ = 0, 0
    for text, found in zip(tokens, completions):
        prompt = torch.tensor([text[:PROMPT]], device="cuda")
        made = model.generate(prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=48, pad_token_id=1)
        expected = [f"w{i}" for i in made[0, PROMPT:].tolist() if i > 1]
        pairs = list(zip(expected, found))
        same += next((at for at, (a, b) in enumerate(pairs) if a != b), len(pairs))
        all_ += len(expected)
    return same / all_


def trained(args, folder, precision):
    """The largest difference between sampling and training in any of a few steps, and whether all is a number."""
    prompts = "".join(json.dumps({"prompt": " ".join(f"w{i}" for i in text[:PROMPT]), "answer": ""}) + "\n" for text in texts(1000))
    (folder / "prompts.jsonl").write_text(prompts)
    to = folder / f"run_{precision}"
    sets = {
        "model.path": folder, "pipeline.rlvr.data.file.path": folder / "prompts.jsonl", "pipeline.rlvr.steps": 3,
        "pipeline.rlvr.rollout.max_new_tokens": 96, "devices": 1, "strategy.precision": precision,
        # No completion is right, and all the same there is a gradient.
        "pipeline.rlvr.algorithm.entropy_coef": 0.01,
    }  # fmt: skip
    words = [word for field, value in sets.items() for word in ("--set", f"{field}={value}")]
    run(args, "run", ROOT / "bench/rlvr_gpu/rlvr.yaml", "--output", to, *words)
    lines = [json.loads(line) for line in (to / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "rollout/logprob_diff_mean" in line]
    assert len(steps) == 3 and all(line["grad_norm"] > 0 for line in steps), lines
    return [max(line[f"rollout/logprob_diff_{what}"] for line in steps) for what in ("mean", "max")]


def check(args, name):
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        model, tokens = make(name, folder), texts()
        (folder / "texts.jsonl").write_text("".join(json.dumps({"tokens": t, "prompt_len": 1}) + "\n" for t in tokens))
        exact = scores(model.double(), tokens)
        apart = (scored(args, folder, "fp32") - exact).abs()
        own = (scored(args, folder, "bf16") - exact).abs().mean().item()
        same = same_tokens(model.float(), tokens, generated(args, folder, tokens))
        theirs = (scores(model.bfloat16(), tokens) - exact).abs().mean().item()
        print(f"{name}: fp32 within {apart.max():.1e} of float64, greedy {same:.3f} the same tokens", flush=True)
        print(f"{name}: bf16 off by {own:.4f}, transformers' by {theirs:.4f}", flush=True)
        ok = apart.max() < 1e-3 and own < 1.5 * theirs and same > 0.97
        for precision, bound in (("bf16", 0.05), ("fp32", 1e-3)):
            mean, most = trained(args, folder, precision)
            print(f"{name}: GRPO in {precision}, sampling and training apart by {mean:.1e}, at most {most:.1e}", flush=True)
            ok &= mean < bound
        return bool(ok)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=SHAPES)
    parser.add_argument("--anyroll", default=str(ROOT / "target/release/anyroll"))
    args = parser.parse_args()
    results = [check(args, name) for name in args.names or SHAPES]
    sys.exit(0 if all(results) else "a family is off")


if __name__ == "__main__":
    main()
