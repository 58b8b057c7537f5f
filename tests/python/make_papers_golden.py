"""Losses, their gradients, weights and advantages, each as its paper has the formula, a token or a sample at a time and with
nothing but Python's `math`: tests/golden/papers.json. python make_papers_golden.py > ../golden/papers.json

The losses are at the log-probs of tests/golden/losses.json. A gradient is written down by hand: it has what a
stop-gradient leaves. `check_papers_golden.py` holds them to other systems' own functions.
"""

import json
import math
import pathlib

golden = json.loads((pathlib.Path(__file__).parent.parent / "golden" / "losses.json").read_text())
lengths, advantages = golden["lengths"], golden["adv"]
logp, old, rollout = golden["logp"], golden["old_logp"], golden["rollout_logp"]
tokens = len(logp)
sequence_of = [sequence for sequence, length in enumerate(lengths) for _ in range(length)]


def sigmoid(x):
    return 1 / (1 + math.exp(-x))


def sapo(ratio, advantage, positive=1.0, negative=1.05):
    """Gao et al., 2511.20347: f(r) = sigmoid(tau (r - 1)) 4 / tau, to be maximized times A."""
    tau = positive if advantage > 0 else negative
    gate = sigmoid(tau * (ratio - 1))
    return -advantage * gate * 4 / tau, -advantage * 4 * gate * (1 - gate) * ratio


def cispo(low, high):
    """MiniMax, 2506.13585: the clipped ratio is a weight of A log pi."""

    def loss(ratio, advantage, logp):
        weight = min(max(ratio, low), high)
        return -weight * advantage * logp, -weight * advantage

    return loss


def topr(positive, negative):
    """Le Roux et al., 2503.14286: good samples by themselves, bad ones by their ratio up to 1, a weight, too. The ratio is the
    token's, as in ROLL; the paper's is the sequence's."""

    def loss(ratio, advantage, logp):
        weight = positive if advantage >= 0 else negative * min(max(ratio, 0.0), 1.0)
        return -weight * advantage * logp, -weight * advantage

    return loss


def by_token(loss):
    """The mean over all tokens, and its gradient."""
    both = [loss(math.exp(a - b), advantage, a) for a, b, advantage in zip(logp, old, advantages)]
    return {"loss": sum(value for value, _ in both) / tokens, "gradient": [grad / tokens for _, grad in both]}


def by_sequence(loss):
    """The mean over sequences of the means over their tokens, and its gradient."""
    each = [1 / len(lengths) / lengths[sequence] for sequence in sequence_of]
    both = [loss(math.exp(a - b), advantage) for a, b, advantage in zip(logp, old, advantages)]
    value = sum(value * share for (value, _), share in zip(both, each))
    return {"loss": value, "gradient": [grad * share for (_, grad), share in zip(both, each)]}


def weights(level, keep):
    """exp(log pi_old - log pi_rollout) of a token or of a sequence's product, truncated or masked by `keep`."""
    differences = [a - b for a, b in zip(old, rollout)]
    if level == "sequence":
        sums = [sum(d for d, s in zip(differences, sequence_of) if s == sequence) for sequence in range(len(lengths))]
        differences = [sums[sequence] for sequence in sequence_of]
    return [keep(math.exp(difference)) for difference in differences]


def truncated(most):  # TIS, Yao et al., 2025
    return lambda weight: min(weight, most)


def masked(least, most):  # MIS
    return lambda weight: weight if least <= weight <= most else 0.0


def groups(values, size):
    return [values[at : at + size] for at in range(0, len(values), size)]


def opo(rewards, sizes, group):
    """Hao et al., 2505.23585: the baseline is the mean of rewards, weighed by length."""
    baselines = [
        sum(r * l for r, l in zip(mine, its)) / sum(its) for mine, its in zip(groups(rewards, group), groups(sizes, group))
    ]
    return [reward - baselines[at // group] for at, reward in enumerate(rewards)]


def gpg(rewards, group):
    """Chu et al., 2504.02546: r - mean, times the samples over those of groups that teach."""
    teaching = sum(len(mine) for mine in groups(rewards, group) if len(set(mine)) > 1)
    means = [sum(mine) / group for mine in groups(rewards, group)]
    return [(reward - means[at // group]) * len(rewards) / teaching for at, reward in enumerate(rewards)]


def remax(rewards, greedy, group):
    """Li et al., 2310.10505: r less the greedy completion's reward."""
    return [reward - greedy[at // group] for at, reward in enumerate(rewards)]


rewards = [0.2, 1.0, -0.4, 0.9, 0.5, 0.5, 0.5, 0.5, 0.0, 0.7, 1.3, 0.1]
sizes, greedy = [7, 3, 12, 5, 4, 9, 2, 6, 11, 8, 1, 10], [0.6, 0.5, -0.2]
print(json.dumps({
    "comment": "By make_papers_golden.py, from the papers' formulas, at the log-probs of losses.json; check_papers_golden.py says by "
    "whose own functions too.",
    "checked": {
        "verl b178a3c": ["sapo", "cispo", "opo", "remax", "gpg but for its factor", "tis"],
        "TRL f2cd577": ["sapo", "cispo without a lower bound", "tis", "mis"],
        "ROLL 8eb27cc": ["topr by the advantage's sign", "cispo"],
    },
    "sapo": by_sequence(sapo),
    "sapo_2_0.5": by_sequence(lambda ratio, advantage: sapo(ratio, advantage, 2.0, 0.5)),
    "cispo_0_5": by_token(cispo(0.0, 5.0)),
    "cispo_0.8_1.28": by_token(cispo(0.8, 1.28)),
    "topr": by_token(topr(1.0, 1.0)),
    "topr_2_0.5": by_token(topr(2.0, 0.5)),
    "tis_token_1.1": weights("token", truncated(1.1)),
    "tis_sequence_1.3": weights("sequence", truncated(1.3)),
    "mis_token_0.8_1.2": weights("token", masked(0.8, 1.2)),
    "mis_sequence_0.6_1.3": weights("sequence", masked(0.6, 1.3)),
    "rewards": rewards,
    "lengths": sizes,
    "greedy": greedy,
    "opo": opo(rewards, sizes, 4),
    "gpg": gpg(rewards, 4),
    "remax": remax(rewards, greedy, 4),
}, indent=1))
