"""Writes tests/golden/decoder/*.safetensors: tiny decoders in plain PyTorch, what they return and every gradient.

    python tests/python/make_decoder_golden.py

The model is written here from the architecture's definition, one sequence at a time with autograd, and
shares nothing with the Rust code. Tensors of a file: the weights by their Hugging Face names, `grad.<name>`
of each, `tokens`, `lengths`, `prompt_lens`, `logprobs`, `entropy`, and the coefficients `d_logprobs` and
`d_entropy` of the scalar loss sum(d_logprobs * logprobs) + sum(d_entropy * entropy). Sums run in fp64, files
hold fp32. `configs.json` has each file's configuration and the temperature.
"""

import json
import pathlib
import struct

import torch

CONFIGS = {
    "mha_untied": dict(num_attention_heads=2, num_key_value_heads=2, head_dim=8),
    "gqa_tied": dict(num_attention_heads=4, num_key_value_heads=2, head_dim=6, tie_word_embeddings=True),
    "gqa_bias": dict(num_attention_heads=4, num_key_value_heads=1, head_dim=4, qkv_bias=True),
    "gqa_qk_norm_tied": dict(
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, qk_norm=True, tie_word_embeddings=True
    ),
    "bias_qk_norm": dict(num_attention_heads=3, num_key_value_heads=3, head_dim=4, qkv_bias=True, qk_norm=True),
}
COMMON = dict(
    vocab_size=11,
    hidden_size=12,
    num_hidden_layers=2,
    intermediate_size=20,
    rms_norm_eps=1e-5,
    rope_theta=100.0,
    max_position_embeddings=32,
    qkv_bias=False,
    qk_norm=False,
    tie_word_embeddings=False,
    initializer_range=0.02,
)
LENGTHS, PROMPT_LENS, TEMPERATURE = [7, 2, 21, 5, 3], [3, 1, 17, 5, 1], 0.7


def parameters(c, random):
    """Large enough weights that every term of a gradient counts."""
    hidden, dim, heads, kv_heads = c["hidden_size"], c["head_dim"], c["num_attention_heads"], c["num_key_value_heads"]
    shapes = {"model.embed_tokens.weight": [c["vocab_size"], hidden], "model.norm.weight": [hidden]}
    if not c["tie_word_embeddings"]:
        shapes["lm_head.weight"] = [c["vocab_size"], hidden]
    for i in range(c["num_hidden_layers"]):
        layer = f"model.layers.{i}."
        shapes[layer + "input_layernorm.weight"] = [hidden]
        shapes[layer + "post_attention_layernorm.weight"] = [hidden]
        for which, count in ("q", heads), ("k", kv_heads), ("v", kv_heads):
            shapes[layer + f"self_attn.{which}_proj.weight"] = [count * dim, hidden]
            if c["qkv_bias"]:
                shapes[layer + f"self_attn.{which}_proj.bias"] = [count * dim]
        shapes[layer + "self_attn.o_proj.weight"] = [hidden, heads * dim]
        if c["qk_norm"]:
            shapes[layer + "self_attn.q_norm.weight"] = [dim]
            shapes[layer + "self_attn.k_norm.weight"] = [dim]
        for which in "gate", "up":
            shapes[layer + f"mlp.{which}_proj.weight"] = [c["intermediate_size"], hidden]
        shapes[layer + "mlp.down_proj.weight"] = [hidden, c["intermediate_size"]]
    made = {}
    for name, shape in shapes.items():
        value = torch.randn(shape, generator=random, dtype=torch.float64)
        value = 1 + 0.3 * value if name.endswith("norm.weight") else 0.4 * value
        made[name] = value.float().double().requires_grad_()  # a value that fp32 holds
    return made


def norm(x, weight, eps):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def rotate(x, theta):
    """x: [heads, T, D]; pairs are (i, i + D / 2)."""
    half = x.shape[-1] // 2
    frequencies = theta ** (-torch.arange(half, dtype=x.dtype) / half)
    angles = torch.arange(x.shape[1], dtype=x.dtype)[:, None] * frequencies
    first, second = x[..., :half], x[..., half:]
    return torch.cat([first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()], -1)


def logits_of(tokens, p, c):
    x = p["model.embed_tokens.weight"][tokens]
    length, dim, eps = len(tokens), c["head_dim"], c["rms_norm_eps"]
    for i in range(c["num_hidden_layers"]):
        layer = f"model.layers.{i}."
        h = norm(x, p[layer + "input_layernorm.weight"], eps)
        heads = {}
        for which in "qkv":
            y = h @ p[layer + f"self_attn.{which}_proj.weight"].T
            if c["qkv_bias"]:
                y = y + p[layer + f"self_attn.{which}_proj.bias"]
            y = y.view(length, -1, dim).transpose(0, 1)
            if which != "v":
                if c["qk_norm"]:
                    y = norm(y, p[layer + f"self_attn.{which}_norm.weight"], eps)
                y = rotate(y, c["rope_theta"])
            heads[which] = y
        group = c["num_attention_heads"] // c["num_key_value_heads"]
        k, v = (heads[which].repeat_interleave(group, 0) for which in "kv")
        scores = heads["q"] @ k.transpose(1, 2) / dim**0.5
        future = torch.ones(length, length, dtype=torch.bool).triu(1)
        attended = scores.masked_fill(future, float("-inf")).softmax(-1) @ v
        x = x + attended.transpose(0, 1).reshape(length, -1) @ p[layer + "self_attn.o_proj.weight"].T
        h = norm(x, p[layer + "post_attention_layernorm.weight"], eps)
        gate, up = (h @ p[layer + f"mlp.{which}_proj.weight"].T for which in ("gate", "up"))
        x = x + (torch.nn.functional.silu(gate) * up) @ p[layer + "mlp.down_proj.weight"].T
    head = "model.embed_tokens.weight" if c["tie_word_embeddings"] else "lm_head.weight"
    return norm(x, p["model.norm.weight"], eps) @ p[head].T


def golden(c):
    random = torch.Generator().manual_seed(0)
    p = parameters(c, random)
    tokens = torch.randint(c["vocab_size"], (sum(LENGTHS),), generator=random)
    logprobs, entropies = [], []
    for sequence, prompt_len in zip(tokens.split(LENGTHS), PROMPT_LENS):
        log_p = (logits_of(sequence, p, c)[prompt_len - 1 : -1] / TEMPERATURE).log_softmax(-1)
        logprobs.append(log_p.gather(1, sequence[prompt_len:, None])[:, 0])
        entropies.append(-(log_p.exp() * log_p).sum(-1))
    logprobs, entropy = torch.cat(logprobs), torch.cat(entropies)
    d_logprobs, d_entropy = (torch.randn(len(logprobs), generator=random, dtype=torch.float64) for _ in range(2))
    (d_logprobs * logprobs + d_entropy * entropy).sum().backward()
    return {
        **{name: value.detach() for name, value in p.items()},
        **{f"grad.{name}": value.grad for name, value in p.items()},
        "tokens": tokens,
        "lengths": torch.tensor(LENGTHS),
        "prompt_lens": torch.tensor(PROMPT_LENS),
        "logprobs": logprobs.detach(),
        "entropy": entropy.detach(),
        "d_logprobs": d_logprobs,
        "d_entropy": d_entropy,
    }


def write_safetensors(path, tensors):
    header, data = {}, b""
    for name, tensor in sorted(tensors.items()):
        dtype, tensor = ("I64", tensor) if tensor.dtype == torch.int64 else ("F32", tensor.float())
        raw = bytes(tensor.contiguous().view(-1).view(torch.uint8).tolist())
        header[name] = dict(dtype=dtype, shape=list(tensor.shape), data_offsets=[len(data), len(data) + len(raw)])
        data += raw
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


if __name__ == "__main__":
    folder = pathlib.Path(__file__).parent.parent / "golden" / "decoder"
    folder.mkdir(parents=True, exist_ok=True)
    configs = {name: {**COMMON, **special} for name, special in CONFIGS.items()}
    for name, config in configs.items():
        write_safetensors(folder / f"{name}.safetensors", golden(config))
    text = json.dumps({"temperature": TEMPERATURE, "configs": configs}, indent=1)
    (folder / "configs.json").write_text(text + "\n")
