"""GRPO on sort-6 in plain PyTorch: what a good engineer writes in a page, as a yardstick for anyroll's speed.

The task and the settings are those of configs/rlvr_sort_cpu.yaml. `--model llama` is that config's architecture
(RMSNorm, rotary positions, SwiGLU), `--model gpt` the older and cheaper one (LayerNorm, learned positions, GELU).
It does what makes PyTorch fast here: a prompt is run once for its group, keys and values are cached in place,
attention is SDPA, AdamW is fused, and nothing waits for a Python loop over tokens.

The last line on stdout is one JSON object: the seconds of the RL steps without evaluation, and the accuracies.
"""

import argparse
import json
import random
import time
import zlib

import torch
import torch.nn.functional as F
from torch import nn

DIGITS, HIDDEN, LAYERS, HEADS, INTERMEDIATE = 6, 64, 2, 4, 176
PROMPT_LEN, MAX_NEW = DIGITS + 1, DIGITS + 2
CHARACTERS = "0123456789>"
END = len(CHARACTERS)
VOCAB = END + 1
PROMPTS, GROUP, MINI_BATCHES = 32, 16, 2
WARMUP_STEPS, WARMUP_BATCH, WARMUP_RATE = 90, 32, 1e-3
RL_RATE, RL_RATE_STEPS, FINAL_RATIO = 5e-4, 10, 0.05
CLIP_LOW, CLIP_HIGH = 0.2, 0.28
EVAL_PROMPTS, EVAL_SAMPLES, EVAL_EVERY = 500, 4, 25


def rotate(x, table):
    """Rotary positions on x [B, H, T, D], by the cosines and sines [T, D] of its T positions."""
    low, high = x.chunk(2, -1)
    return x * table[0] + torch.cat((-high, low), -1) * table[1]


class Block(nn.Module):
    def __init__(self, llama):
        super().__init__()
        norm = (lambda: nn.RMSNorm(HIDDEN, 1e-6)) if llama else (lambda: nn.LayerNorm(HIDDEN))
        self.llama = llama
        self.norm1, self.norm2 = norm(), norm()
        self.qkv = nn.Linear(HIDDEN, 3 * HIDDEN, bias=not llama)
        self.out = nn.Linear(HIDDEN, HIDDEN, bias=not llama)
        self.up = nn.Linear(HIDDEN, 2 * INTERMEDIATE if llama else 4 * HIDDEN, bias=not llama)
        self.down = nn.Linear(INTERMEDIATE if llama else 4 * HIDDEN, HIDDEN, bias=not llama)

    def forward(self, x, table, cache, start):
        b, t, _ = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        if self.llama:
            q, k = rotate(q, table), rotate(k, table)
        if cache is not None:
            cache[0][:, :, start : start + t], cache[1][:, :, start : start + t] = k, v
            k, v = cache[0][:, :, : start + t], cache[1][:, :, : start + t]
        y = F.scaled_dot_product_attention(q, k, v, is_causal=t > 1)
        x = x + self.out(y.transpose(1, 2).reshape(b, t, HIDDEN))
        h = self.up(self.norm2(x))
        if self.llama:
            gate, up = h.chunk(2, -1)
            return x + self.down(F.silu(gate) * up)
        return x + self.down(F.gelu(h))


class Policy(nn.Module):
    def __init__(self, llama):
        super().__init__()
        length, dim = PROMPT_LEN + MAX_NEW, HIDDEN // HEADS
        self.llama = llama
        self.embedding = nn.Embedding(VOCAB, HIDDEN)
        self.position = None if llama else nn.Embedding(length, HIDDEN)
        self.blocks = nn.ModuleList(Block(llama) for _ in range(LAYERS))
        self.norm = nn.RMSNorm(HIDDEN, 1e-6) if llama else nn.LayerNorm(HIDDEN)
        self.head = nn.Linear(HIDDEN, VOCAB, bias=not llama)
        angles = torch.arange(length)[:, None] * 30.0 ** (-torch.arange(0, dim, 2) / dim)
        self.table = torch.stack((angles.cos(), angles.sin())).repeat(1, 1, 2)
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                std = 0.05 if isinstance(module, nn.Embedding) and not llama else 0.02
                nn.init.normal_(module.weight, std=std)

    def forward(self, tokens, cache=None, start=0):
        end = start + tokens.shape[1]
        x = self.embedding(tokens)
        if not self.llama:
            x = x + self.position.weight[start:end]
        table = self.table[:, start:end]
        for index, block in enumerate(self.blocks):
            x = block(x, table, None if cache is None else cache[index], start)
        return self.head(self.norm(x))


def sample_prompts(count, train, rng):
    """Digit strings; a tenth of them, by hash, is held out."""
    prompts = []
    while len(prompts) < count:
        text = f"{rng.randrange(10**DIGITS):0{DIGITS}d}"
        if (zlib.crc32(text.encode()) % 10 == 0) != train:
            prompts.append(text)
    return prompts


def encode(prompts):
    return torch.tensor([[CHARACTERS.index(c) for c in prompt + ">"] for prompt in prompts])


def rewards(prompts, responses):
    """1 for a finished response that equals the answer."""
    scores = []
    for prompt, row in zip(prompts, responses.tolist()):
        text = "".join(CHARACTERS[token] for token in row[: row.index(END)]) if END in row else None
        scores.append(float(text == "".join(sorted(prompt))))
    return torch.tensor(scores)


@torch.inference_mode()
def generate(policy, prompts, samples, temperature=1.0):
    """`samples` responses to each prompt [B, R], filled up with END, and their log-probs [B, R]."""
    tokens, batch = encode(prompts), len(prompts) * samples
    room = (LAYERS, 2, len(prompts), HEADS, PROMPT_LEN + MAX_NEW, HIDDEN // HEADS)
    cache = torch.empty(room)
    logits = policy(tokens, cache)[:, -1].repeat_interleave(samples, 0)
    cache = cache.repeat_interleave(samples, 2)
    responses, logprobs = torch.full((batch, MAX_NEW), END), torch.zeros(batch, MAX_NEW)
    done = torch.zeros(batch, dtype=torch.bool)
    for step in range(MAX_NEW):
        log_softmax = F.log_softmax(logits, -1)
        if temperature == 0.0:
            chosen = logits.argmax(-1)
        else:
            chosen = torch.multinomial(log_softmax.exp(), 1).squeeze(1)
        logprobs[:, step] = log_softmax.gather(1, chosen[:, None]).squeeze(1)
        chosen = torch.where(done, END, chosen)
        responses[:, step] = chosen
        done |= chosen == END
        if step + 1 == MAX_NEW or done.all():
            break
        logits = policy(chosen[:, None], cache, PROMPT_LEN + step)[:, -1]
    return responses[:, : step + 1], logprobs[:, : step + 1]


def evaluate(policy):
    """Greedy accuracy, pass@1 and pass@4 on held-out prompts."""
    prompts = sample_prompts(EVAL_PROMPTS, False, random.Random(123))
    greedy = rewards(prompts, generate(policy, prompts, 1, 0.0)[0]).mean().item()
    repeated = [prompt for prompt in prompts for _ in range(EVAL_SAMPLES)]
    scores = rewards(repeated, generate(policy, prompts, EVAL_SAMPLES)[0]).view(-1, EVAL_SAMPLES)
    return {"greedy": greedy, "pass@1": scores.mean().item(), "pass@4": scores.amax(1).mean().item()}


def update(policy, optimizer, loss):
    optimizer.zero_grad()
    loss.backward()
    grad_norm = torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
    optimizer.step()
    return grad_norm


def adamw(policy, weight_decay):
    return torch.optim.AdamW(
        policy.parameters(), betas=(0.9, 0.98), eps=1e-8, weight_decay=weight_decay, fused=True
    )


def warm_up(policy, rng):
    optimizer = adamw(policy, 0.01)
    for step in range(WARMUP_STEPS):
        optimizer.param_groups[0]["lr"] = WARMUP_RATE * min(1.0, (step + 1) / 30)
        prompts = sample_prompts(WARMUP_BATCH, True, rng)
        answers = encode(["".join(sorted(prompt)) for prompt in prompts])[:, :-1]
        tokens = torch.cat((encode(prompts), answers, torch.full((WARMUP_BATCH, 1), END)), 1)
        logits = policy(tokens[:, :-1])[:, PROMPT_LEN - 1 :]
        update(policy, optimizer, F.cross_entropy(logits.flatten(0, 1), tokens[:, PROMPT_LEN:].flatten()))


def grpo_step(policy, optimizer, rng):
    """One step; returns its metrics."""
    prompts = sample_prompts(PROMPTS, True, rng)
    # Copies, since autograd refuses tensors of inference mode.
    responses, old = (made.clone() for made in generate(policy, prompts, GROUP))
    scores = rewards([prompt for prompt in prompts for _ in range(GROUP)], responses)
    groups = scores.view(PROMPTS, GROUP)
    advantages = (groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-6)
    advantages = advantages.view(-1, 1)
    mask = ((responses == END).cumsum(1) <= 1).float()  # up to the first END
    tokens = torch.cat((encode(prompts).repeat_interleave(GROUP, 0), responses), 1)
    stats = []
    for part in torch.arange(PROMPTS * GROUP).chunk(MINI_BATCHES):
        rows = slice(part[0], part[-1] + 1)
        advantage, m = advantages[rows], mask[rows]
        log_softmax = F.log_softmax(policy(tokens[rows, :-1])[:, PROMPT_LEN - 1 :], -1)
        logprobs = log_softmax.gather(2, responses[rows, :, None]).squeeze(2)
        ratio = (logprobs - old[rows]).exp()
        clipped = ratio.clamp(1 - CLIP_LOW, 1 + CLIP_HIGH)
        losses = torch.maximum(-advantage * ratio, -advantage * clipped)
        loss = (losses * m).sum() / m.sum()
        grad_norm = update(policy, optimizer, loss)
        with torch.no_grad():
            entropy = -(log_softmax.exp() * log_softmax).sum(-1)
            low, high = (ratio < 1 - CLIP_LOW) & (advantage < 0), (ratio > 1 + CLIP_HIGH) & (advantage > 0)
            means = [(x * m).sum() / m.sum() for x in (entropy, old[rows] - logprobs, low, high)]
            stats.append(torch.stack([loss, grad_norm, *means]))
    return [scores.mean().item(), *torch.stack(stats).mean(0).tolist()]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=["llama", "gpt"], default="llama")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    cpu_started = time.process_time()
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    rng = random.Random(args.seed + 1)

    policy = Policy(args.model == "llama")
    warm_up(policy, rng)
    result = {"parameters": sum(p.numel() for p in policy.parameters()), "before": evaluate(policy)}
    optimizer = adamw(policy, 0.0)
    rl_s = 0.0
    for step in range(args.steps):
        progress = max(0.0, (step - RL_RATE_STEPS) / max(1, args.steps - RL_RATE_STEPS - 1))
        factor = min((step + 1) / RL_RATE_STEPS, 1 - (1 - FINAL_RATIO) * progress)
        optimizer.param_groups[0]["lr"] = RL_RATE * factor
        started = time.perf_counter()
        reward = grpo_step(policy, optimizer, rng)[0]
        rl_s += time.perf_counter() - started
        if (step + 1) % EVAL_EVERY == 0:
            accuracy = " ".join(f"{name} {value:.3f}" for name, value in evaluate(policy).items())
            print(f"step {step + 1}: reward {reward:.3f} {accuracy} {rl_s:.1f} s", flush=True)
    result |= {"after": evaluate(policy), "rl_s": rl_s, "cpu_s": time.process_time() - cpu_started}
    print(json.dumps(result))


if __name__ == "__main__":
    main()
