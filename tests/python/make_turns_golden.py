"""Writes tests/golden/turns.json: the loss of samples of several turns, by a mask over all that is behind the prompt.

    python tests/python/make_turns_golden.py

Needs Python alone. Everything is as systems with padded tensors have it: a mask is 1 where the policy wrote and 0 where the
environment did; GAE as verl's compute_gae_advantage_return goes through masked tokens, PPO's clipped loss with k3, and
gradients by central differences in fp64. What turns have with a discount between them are sums over all that comes later, as
the definitions have them, and no recursions; with --roll DIR, a checkout of ROLL, its compute_agentic_reinforce_return has to
say the same of the returns (this one needs torch).
"""

import json
import math
import pathlib
import random
import sys

MASKS = ["11001", "1101110011", "111", "100010001"]
GROUP, LOW, HIGH, KL_COEF, GAMMA, LAMBDA = 2, 0.2, 0.28, 0.1, 0.97, 0.9
TURN_GAMMA = 0.6
TURN_REWARDS = [[0.5, -0.25], [0.0, 1.0, 2.0], [0.75], [-1.0, 0.5, 1.25]]


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


def turns_of(mask):
    """The number of the turn of each sampled token."""
    turns = [sum(not kept and mask[i + 1] for i, kept in enumerate(mask[:t])) for t in range(len(mask))]
    return [turn for turn, kept in zip(turns, mask) if kept]


def discounted(rewards, of_turns, gamma):
    """What each sampled token of these turns earns: the rewards of its turn and those after it, at the turns' last tokens."""
    last = {turn: place for place, turn in enumerate(of_turns)}
    weight = lambda place, turn: gamma ** (last[turn] - place) * TURN_GAMMA ** (turn - of_turns[place])
    later = lambda place: range(of_turns[place], len(rewards))
    return [sum(rewards[k] * weight(place, k) for k in later(place)) for place in range(len(of_turns))]


def discounted_gae(rewards, of_turns, values):
    """GAE, equation 16 of 1506.02438: sums of (gamma lambda)^l delta, where gamma is another from a turn to the next."""
    last = {turn: place for place, turn in enumerate(of_turns)}
    earned = [rewards[turn] if last[turn] == place else 0.0 for place, turn in enumerate(of_turns)]
    gammas = [GAMMA * (TURN_GAMMA if last[turn] == place else 1.0) for place, turn in enumerate(of_turns)]
    values = [*values, 0.0]
    deltas = [earned[t] + gammas[t] * values[t + 1] - values[t] for t in range(len(of_turns))]
    weight = lambda t, k: math.prod(gammas[i] * LAMBDA for i in range(t, k))
    return [sum(weight(t, k) * deltas[k] for k in range(t, len(deltas))) for t in range(len(deltas))]


def leave_one_out(returns):
    """RLOO of each turn; an episode that has ended counts as 0."""
    found = []
    for i, own in enumerate(returns):
        others = [returns[j] for j in range(i - i % GROUP, i - i % GROUP + GROUP) if j != i]
        of_turn = lambda turn: sum(other[turn] if turn < len(other) else 0.0 for other in others) / len(others)
        found.append([value - of_turn(turn) for turn, value in enumerate(own)])
    return found


def of_turns(case):
    """What samples have whose turns earn by themselves, with a discount between them."""
    turns = [turns_of(mask) for mask in case["mask"]]
    kept = lambda row, mask: [value for value, bit in zip(row, mask) if bit]
    values = [kept(row, mask) for row, mask in zip(case["values"], case["mask"])]
    returns = [discounted(rewards, list(range(len(rewards))), 1.0) for rewards in TURN_REWARDS]
    return {
        "gamma": TURN_GAMMA,
        "rewards": TURN_REWARDS,
        "rloo": leave_one_out(returns),
        "reinforce": [discounted(*of_sample, 1.0) for of_sample in zip(TURN_REWARDS, turns)],
        "reinforce_of_tokens": [discounted(*of_sample, GAMMA) for of_sample in zip(TURN_REWARDS, turns)],
        "gae": [discounted_gae(*of_sample) for of_sample in zip(TURN_REWARDS, turns, values)],
    }


def check_roll(path, case):
    import ast
    import typing

    import torch

    source = (pathlib.Path(path) / "roll/pipeline/agentic/utils.py").read_text()
    name = "compute_agentic_reinforce_return"
    found = next(node for node in ast.parse(source).body if getattr(node, "name", None) == name)
    scope = {"torch": torch, "Optional": typing.Optional}
    exec(compile(ast.Module([found], []), source, "exec"), scope)
    for mask, rewards, expected in zip(case["mask"], TURN_REWARDS, case["turns"]["reinforce"]):
        mask = torch.tensor([mask])
        of_tokens = torch.zeros(mask.shape, dtype=torch.float64)
        ends = [t for t in range(mask.numel()) if mask[0, t] and (t + 1 == mask.numel() or not mask[0, t + 1])]
        of_tokens[0, ends] = torch.tensor(rewards, dtype=torch.float64)
        returns, _ = scope[name](of_tokens, TURN_GAMMA, 1.0, mask)
        torch.testing.assert_close(returns[mask == 1], torch.tensor(expected), rtol=1e-6, atol=1e-6)
    print("ROLL's returns are the same")


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
    case["turns"] = of_turns(case)
    case.update(clip_low=LOW, clip_high=HIGH, kl_coef=KL_COEF, gamma=GAMMA, **{"lambda": LAMBDA})
    path = pathlib.Path(__file__).parent.parent / "golden" / "turns.json"
    path.write_text(json.dumps(case, indent=1) + "\n")
    if sys.argv[1:2] == ["--roll"]:
        check_roll(sys.argv[2], case)


if __name__ == "__main__":
    main()
