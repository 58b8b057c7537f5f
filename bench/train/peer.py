"""The same training step with PyTorch's FSDP2 and transformers' Qwen2: started by run.py, one process a GPU.

Weights are fp32 shards, run in bf16, with gradients reduced in fp32: the precision that anyroll has. Loss, attention
(SDPA) and checkpointing are transformers' own.
"""

import argparse
import json
import os
import statistics

import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import Qwen2Config, Qwen2ForCausalLM

SHAPES = {
    "7b": dict(vocab_size=152064, hidden_size=3584, num_hidden_layers=28, num_attention_heads=28,
               num_key_value_heads=4, intermediate_size=18944, tie_word_embeddings=False),
    "1.5b": dict(vocab_size=151936, hidden_size=1536, num_hidden_layers=28, num_attention_heads=12,
                 num_key_value_heads=2, intermediate_size=8960, tie_word_embeddings=True),
    "0.5b": dict(vocab_size=151936, hidden_size=896, num_hidden_layers=24, num_attention_heads=14,
                 num_key_value_heads=2, intermediate_size=4864, tie_word_embeddings=True),
}
WARM_UP = 2


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", choices=SHAPES, default="0.5b")
    parser.add_argument("--mode", choices=["train", "score"], default="train")
    parser.add_argument("--recompute", choices=["none", "full"], default="none")
    parser.add_argument("--seq", type=int, default=4096)
    parser.add_argument("--micro-batch", type=int, default=4)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--keep-whole", action="store_true", help="keep weights gathered between forward and backward")
    options = parser.parse_args()
    rank = int(os.environ["RANK"])
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", device_id=torch.device("cuda", rank))
    tokens = torch.randint(SHAPES[options.model]["vocab_size"], (options.micro_batch, options.seq), device="cuda")
    run = train if options.mode == "train" else score
    model = build(options)
    median_ms = run(model, tokens, options)
    free, total = torch.cuda.mem_get_info()
    if rank == 0:
        print(json.dumps({
            "peer": "FSDP2", "model": options.model, "mode": options.mode, "recompute": options.recompute,
            "keep_whole": options.keep_whole, "world_size": dist.get_world_size(), "step_ms": median_ms,
            "tokens_per_s_per_device": tokens.numel() / median_ms * 1e3,
            "allocated_gib": torch.cuda.max_memory_allocated() / 2**30, "used_gib": (total - free) / 2**30,
        }), flush=True)
    dist.destroy_process_group()


def build(options):
    config = Qwen2Config(max_position_embeddings=options.seq, use_cache=False, **SHAPES[options.model])
    config._attn_implementation = "sdpa"
    train = options.mode == "train"
    with torch.device("meta"):
        model = Qwen2ForCausalLM(config).to(torch.float32 if train else torch.bfloat16)
    if options.recompute == "full":
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if train:
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for block in model.model.layers:
            fully_shard(block, mp_policy=policy, reshard_after_forward=not options.keep_whole)
        fully_shard(model, mp_policy=policy)
    model.to_empty(device="cuda")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.02) if parameter.dim() > 1 else parameter.fill_(1.0)
        for module in model.modules():  # what is no parameter was on the meta device, too
            if hasattr(module, "inv_freq"):
                half = torch.arange(0, config.hidden_size // config.num_attention_heads, 2, device="cuda").float()
                module.inv_freq.copy_(1e6 ** (-half / (2 * half.numel())))
    return model


def train(model, tokens, options):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(WARM_UP + options.steps + 1)]
    marks[0].record()
    for mark in marks[1:]:
        model(input_ids=tokens, labels=tokens).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        mark.record()
    return median_of(marks)


def score(model, tokens, options):
    """Log-probabilities of all tokens, the logits a sequence at a time."""
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(WARM_UP + options.steps + 1)]
    marks[0].record()
    with torch.no_grad():
        for mark in marks[1:]:
            hidden = model.model(input_ids=tokens).last_hidden_state
            for row, target in zip(hidden, tokens):
                for part, wanted in zip(row[:-1].split(1024), target[1:].split(1024)):
                    logits = model.lm_head(part).float()
                    logits.gather(1, wanted[:, None]).squeeze(1) - logits.logsumexp(1)
            mark.record()
    return median_of(marks)


def median_of(marks):
    torch.cuda.synchronize()
    times = [a.elapsed_time(b) for a, b in zip(marks, marks[1:])]
    return statistics.median(times[WARM_UP:])


if __name__ == "__main__":
    main()
