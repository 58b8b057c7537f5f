"""The same training step with transformers' Qwen2 under PyTorch's FSDP2 or DeepSpeed: started by run.py, one process a GPU.

Weights are fp32 shards, run in bf16: the precision that anyroll has; FSDP2 reduces gradients in fp32, DeepSpeed in
bf16. Attention (SDPA) and checkpointing are transformers' own; the logits of 4,096 tokens exist at a time, in forward and
again in backward, since all of them at once do not fit beside 7B.
"""

import argparse
import json
import os
import statistics
import time

import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint
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
ADAMW = dict(lr=1e-5, betas=(0.9, 0.95), weight_decay=0.1)
LOGITS_TOKENS = 4096


class WithLoss(torch.nn.Module):
    """Qwen2 with the mean loss of all tokens but the first of each sequence."""

    def __init__(self, config):
        super().__init__()
        self.qwen = Qwen2ForCausalLM(config)

    def forward(self, tokens):
        hidden = self.qwen.model(input_ids=tokens).last_hidden_state[:, :-1].flatten(0, 1)
        wanted = tokens[:, 1:].flatten()
        loss = 0
        for part, targets in zip(hidden.split(LOGITS_TOKENS), wanted.split(LOGITS_TOKENS)):
            loss = loss + checkpoint(self.loss_of, part, targets, use_reentrant=False)
        return loss / wanted.numel()

    def loss_of(self, hidden, wanted):
        return torch.nn.functional.cross_entropy(self.qwen.lm_head(hidden).float(), wanted, reduction="sum")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", choices=SHAPES, default="0.5b")
    parser.add_argument("--mode", choices=["train", "score"], default="train")
    parser.add_argument("--recompute", choices=["none", "full"], default="none")
    parser.add_argument("--seq", type=int, default=4096)
    parser.add_argument("--micro-batch", type=int, default=4)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--keep-whole", action="store_true", help="keep weights gathered between forward and backward")
    parser.add_argument("--deepspeed", type=int, metavar="STAGE", help="train under DeepSpeed's ZeRO")
    parser.add_argument("--offload", action="store_true", help="time DeepSpeed's offload_states too, at stage 3")
    options = parser.parse_args()
    rank = int(os.environ["RANK"])
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", device_id=torch.device("cuda", rank))
    tokens = torch.randint(SHAPES[options.model]["vocab_size"], (options.micro_batch, options.seq), device="cuda")
    offload_s = None
    if options.deepspeed is not None:
        engine = build_deepspeed(options)
        median_ms = train_deepspeed(engine, tokens, options)
        offload_s = offload(engine) if options.offload else None
    else:
        run = train if options.mode == "train" else score
        median_ms = run(build(options), tokens, options)
    free, total = torch.cuda.mem_get_info()
    if rank == 0:
        print(json.dumps({
            "peer": "FSDP2" if options.deepspeed is None else f"DeepSpeed ZeRO-{options.deepspeed}", "model": options.model, "mode": options.mode, "recompute": options.recompute,
            "keep_whole": options.keep_whole, "world_size": dist.get_world_size(), "step_ms": median_ms,
            "tokens_per_s_per_device": tokens.numel() / median_ms * 1e3,
            "allocated_gib": torch.cuda.max_memory_allocated() / 2**30, "used_gib": (total - free) / 2**30,
            "offload_s": offload_s,
        }), flush=True)
    dist.destroy_process_group()


def config_of(options):
    config = Qwen2Config(max_position_embeddings=options.seq, use_cache=False, **SHAPES[options.model])
    config._attn_implementation = "sdpa"
    return config


def recompute_if_asked(model, options):
    if options.recompute == "full":
        model.qwen.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.train()


def build(options):
    config, trains = config_of(options), options.mode == "train"
    with torch.device("meta"):
        model = WithLoss(config).to(torch.float32 if trains else torch.bfloat16)
    recompute_if_asked(model, options)
    if trains:
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for block in model.qwen.model.layers:
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
    optimizer = torch.optim.AdamW(model.parameters(), fused=True, **ADAMW)
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(WARM_UP + options.steps + 1)]
    marks[0].record()
    for mark in marks[1:]:
        model(tokens).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        mark.record()
    return median_of(marks)


def build_deepspeed(options):
    import deepspeed

    settings = dict(
        train_micro_batch_size_per_gpu=options.micro_batch,
        bf16=dict(enabled=True),
        gradient_clipping=1.0,
        optimizer=dict(type="AdamW", params=dict(ADAMW)),
        zero_optimization=dict(stage=options.deepspeed, overlap_comm=True, contiguous_gradients=True),
    )
    with deepspeed.zero.Init(config_dict_or_path=settings, enabled=options.deepspeed == 3):
        with torch.device("cuda"):
            model = WithLoss(config_of(options))
    recompute_if_asked(model, options)
    return deepspeed.initialize(model=model, model_parameters=model.parameters(), config=settings)[0]


def train_deepspeed(engine, tokens, options):
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(WARM_UP + options.steps + 1)]
    marks[0].record()
    for mark in marks[1:]:
        engine.backward(engine(tokens))
        engine.step()
        mark.record()
    return median_of(marks)


def offload(engine):
    """Seconds out and back of the optimizer's states and fp32 weights, a pair a round."""
    from deepspeed.runtime.zero.offload_config import OffloadDeviceEnum, OffloadStateTypeEnum

    states = [OffloadStateTypeEnum.optim_states, OffloadStateTypeEnum.hp_params]

    def seconds(call):
        torch.cuda.synchronize()
        dist.barrier()
        begin = time.perf_counter()
        call()
        torch.cuda.synchronize()
        return time.perf_counter() - begin

    away = lambda: engine.offload_states(include=states, device=OffloadDeviceEnum.cpu, pin_memory=True)
    return [(seconds(away), seconds(engine.reload_states)) for _ in range(3)]


def score(model, tokens, options):
    """Log-probabilities of all tokens, the logits a sequence at a time."""
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(WARM_UP + options.steps + 1)]
    marks[0].record()
    with torch.no_grad():
        for mark in marks[1:]:
            hidden = model.qwen.model(input_ids=tokens).last_hidden_state
            for row, target in zip(hidden, tokens):
                for part, wanted in zip(row[:-1].split(1024), target[1:].split(1024)):
                    logits = model.qwen.lm_head(part).float()
                    logits.gather(1, wanted[:, None]).squeeze(1) - logits.logsumexp(1)
            mark.record()
    return median_of(marks)


def median_of(marks):
    torch.cuda.synchronize()
    times = [a.elapsed_time(b) for a, b in zip(marks, marks[1:])]
    return statistics.median(times[WARM_UP:])


if __name__ == "__main__":
    main()
