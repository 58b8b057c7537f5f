"""Writes tests/golden/turns.json: the loss of samples of several turns, by a mask over all that is behind the prompt.

    python tests/python/make_turns_golden.py

Needs Python alone. Everything is as systems with padded tensors have it: a mask is 1 where the policy wrote and 0 where the
environment did; GAE as verl's compute_gae_advantage_return goes through masked tokens, PPO's clipped loss with k3, and
gradients by central differences in fp64.
"""

import json
import math
import pathlib
import random

MASKS = ["11001", "1101110011", "111", "100010001"]
GROUP, LOW, HIGH, KL_COEF, GAMMA, LAMBDA = 2, 0.2, 0.28, 0.1, 0.97, 0.9


def gae(rewards, values, mask):
    next_value = last = 0.0
    advantages = []
    for reward, value, kept in reversed(list(zip(rewards, values, mask))):
        delta = reward + GAMMA * next_value - value
        gone_on = delta + GAMMA * LAMBDA * last
        next_value = value * kept + (1 - kept) * next_value
        last = gone_on * kept + (1 - kept) * last
        advantages.append(last)
    return advantages[::-1]


def centered(rewards):
    """GRPO without a deviation: each sample's reward less its group's mean."""
    means = [sum(rewards[i - i % GROUP : i - i % GROUP + GROUP]) / GROUP for i in range(len(rewards))]
    return [reward - mean for reward, mean in zip(rewards, means)]


def token_loss(logp, old, ref, advantage):
    ratio = math.exp(logp - old)
    clipped = min(max(ratio, 1 - LOW), 1 + HIGH)
    kl = math.exp(ref - logp) - (ref - logp) - 1
    return max(-advantage * ratio, -advantage * clipped) + KL_COEF * kl


def loss(aggregation, case, logp):
    of_samples = []
    for i, mask in enumerate(case["mask"]):
        tokens = [
            kept * token_loss(logp[i][t], case["old_logp"][i][t], case["ref_logp"][i][t], case["advantages"][i])
            for t, kept in enumerate(mask)
        ]
        of_samples.append(sum(tokens) / (sum(mask) if aggregation == "seq_mean_token_mean" else 1))
    samples, tokens = len(of_samples), sum(map(sum, case["mask"]))
    return sum(of_samples) / (tokens if aggregation == "token_mean" else samples)


def gradient(aggregation, case, step=1e-5):
    found = []
    for i, of_sample in enumerate(case["logp"]):
        found.append([])
        for t in range(len(of_sample)):
            ends = []
            for change in (step, -step):
                logp = [list(row) for row in case["logp"]]
                logp[i][t] += change
                ends.append(loss(aggregation, case, logp))
            found[-1].append((ends[0] - ends[1]) / (2 * step))
    return found


def main():
    rng = random.Random(0)
    mask = [[int(kept) for kept in of_sample] for of_sample in MASKS]
    draw = lambda low, high: [[rng.uniform(low, high) for _ in row] for row in mask]
    case = {"mask": mask, "old_logp": draw(-3, -0.5), "values": draw(-1, 1), "rewards": [1.0, 0.25, 0.0, 1.5]}
    case["logp"] = [[old + rng.uniform(-0.5, 0.5) for old in row] for row in case["old_logp"]]
    case["ref_logp"] = [[old + rng.uniform(-0.3, 0.3) for old in row] for row in case["old_logp"]]
    case["advantages"] = centered(case["rewards"])
    # A reward is that of its sample's last token, which is sampled.
    of_tokens = [[0.0] * (len(row) - 1) + [reward] for row, reward in zip(mask, case["rewards"])]
    case["gae"] = [gae(*of_sample) for of_sample in zip(of_tokens, case["values"], mask)]
    for aggregation in ("token_mean", "seq_mean_token_mean", "seq_mean_token_sum"):
        case[aggregation] = {
            "loss": loss(aggregation, case, case["logp"]),
            "gradient": gradient(aggregation, case),
        }
    case.update(clip_low=LOW, clip_high=HIGH, kl_coef=KL_COEF, gamma=GAMMA, **{"lambda": LAMBDA})
    path = pathlib.Path(__file__).parent.parent / "golden" / "turns.json"
    path.write_text(json.dumps(case, indent=1) + "\n")


if __name__ == "__main__":
    main()
