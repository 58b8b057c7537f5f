"""What transformers makes of the same shapes: `peer.py SIZE BATCH... [--prompt 256] [--tokens 512]`, JSON lines.

Random weights in bf16. Each figure is one generation, after a shorter one for warm-up; `static` compiles the forward
pass with a static cache, as transformers' documentation has it.
"""

import argparse
import json
import time

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

SHAPES = {
    "0.5b": (896, 24, 14, 2, 4864, True),
    "1.5b": (1536, 28, 12, 2, 8960, True),
    "7b": (3584, 28, 28, 4, 18944, False),
}


def model(size):
    hidden, layers, heads, kv_heads, intermediate, tied = SHAPES[size]
    config = Qwen2Config(
        vocab_size=151936, hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=kv_heads, intermediate_size=intermediate, tie_word_embeddings=tied,
        max_position_embeddings=4096,
    )
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        made = Qwen2ForCausalLM(config).eval()
    made.generation_config.eos_token_id = None
    made.generation_config.pad_token_id = 0
    return made


def generate(made, batch, prompt, tokens, **how):
    ids = torch.randint(0, 151936, (batch, prompt), device="cuda")
    torch.cuda.synchronize()
    started = time.perf_counter()
    out = made.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=True, top_k=0, max_new_tokens=tokens,
        min_new_tokens=tokens, **how,
    )
    torch.cuda.synchronize()
    assert out.shape[1] == prompt + tokens, out.shape
    return batch * tokens / (time.perf_counter() - started)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("size", choices=SHAPES)
    parser.add_argument("batches", type=int, nargs="+")
    parser.add_argument("--prompt", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--ways", nargs="+", default=["dynamic"], choices=["dynamic", "static"])
    args = parser.parse_args()
    made = model(args.size)
    for batch in args.batches:
        for way in args.ways:
            how = {"cache_implementation": "static"} if way == "static" else {}
            with torch.inference_mode():
                generate(made, batch, args.prompt, min(args.tokens, 64), **how)
                best = max(generate(made, batch, args.prompt, args.tokens, **how) for _ in range(2))
            line = {"peer": "transformers", "way": way, "size": args.size, "batch": batch, "tokens_per_s": round(best)}
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
