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


def gmpo(low, high):
    """Zhao et al., 2507.20673: A times the geometric mean of the sequence's ratios, each clipped on the side that A pushes to."""

    def loss(sequence):
        mine = [at for at, its in enumerate(sequence_of) if its == sequence]
        advantage, differences = advantages[mine[0]], [logp[at] - old[at] for at in mine]
        clip = (lambda d: min(d, high)) if advantage > 0 else (lambda d: max(d, -low))
        ratio = math.exp(sum(map(clip, differences)) / len(mine))
        return -advantage * ratio, [-advantage * ratio / len(mine) * (clip(d) == d) for d in differences]

    both = [loss(sequence) for sequence in range(len(lengths))]
    gradient = [grad / len(lengths) for _, grads in both for grad in grads]
    return {"loss": sum(value for value, _ in both) / len(lengths), "gradient": gradient}


def vespo(k_positive, lambda_positive, k_negative, lambda_negative):
    """Shen et al., 2602.10693: A log pi, weighed by exp(lambda) W^k exp(-lambda W) of the product W of the sequence's ratios."""

    def loss(sequence, advantage, own):
        ratio = math.exp(sum_over(sequence, [a - b for a, b in zip(logp, old)]))
        k, decay = (k_positive, lambda_positive) if advantage >= 0 else (k_negative, lambda_negative)
        weight = math.exp(decay) * ratio**k * math.exp(-decay * ratio)
        return -weight * advantage * own, -weight * advantage

    both = [loss(*each) for each in zip(sequence_of, advantages, logp)]
    return {"loss": sum(value for value, _ in both) / tokens, "gradient": [grad / tokens for _, grad in both]}


def sum_over(sequence, values):
    return sum(value for value, its in zip(values, sequence_of) if its == sequence)


def off_policy(most):
    """DeepSeek-AI, 2512.02556, section 3.1: 0 for a negative advantage where the sequence's mean of log pi_rollout - log pi is
    above `most`, else 1."""
    moved = [sum_over(s, [a - b for a, b in zip(rollout, logp)]) / length for s, length in enumerate(lengths)]
    return [float(advantage >= 0 or moved[s] <= most) for advantage, s in zip(advantages, sequence_of)]


def weighted_k3():
    """The same paper's estimator of KL(pi || pi_ref): k3 times the ratio, through which the gradient flows too. A token's, and its
    derivative by the token's log-prob."""
    both = []
    for a, b, ref in zip(logp, old, golden["ref_logp"]):
        ratio, d = math.exp(a - b), a - ref
        k3 = math.exp(-d) + d - 1
        both.append((ratio * k3, ratio * k3 + ratio * (1 - math.exp(-d))))
    return {"loss": sum(value for value, _ in both) / tokens, "gradient": [grad / tokens for _, grad in both]}


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
        sums = [sum_over(sequence, differences) for sequence in range(len(lengths))]
        differences = [sums[sequence] for sequence in sequence_of]
    return [keep(math.exp(difference)) for difference in differences]


def truncated(most):  # TIS, Yao et al., 2025
    return lambda weight: min(weight, most)


def masked(least, most):  # MIS
    return lambda weight: weight if least <= weight <= most else 0.0


def quantile(values, share):
    """Between the two values that are nearest, in proportion."""
    values = sorted(values)
    place = share * (len(values) - 1)
    below, above = values[math.floor(place)], values[math.ceil(place)]
    return below + (above - below) * (place - math.floor(place))


def top_entropy(share):
    """Wang et al., 2506.01939: 1 for the `share` of tokens whose entropy is the largest."""
    return [float(entropy >= quantile(entropies, 1 - share)) for entropy in entropies]


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


def std(values):
    mean = sum(values) / len(values)
    return math.sqrt(sum((value - mean) ** 2 for value in values) / (len(values) - 1))


def gdpo(terms, weights, group, eps=1e-4):
    """Liu et al., 2601.05242: each term's rewards normalized in their group, weighed and summed, then normalized over the step."""
    sums = [0.0] * len(terms[0])
    for rewards, weight in zip(terms, weights):
        for at, reward in enumerate(rewards):
            mine = groups(rewards, group)[at // group]
            sums[at] += weight * (reward - sum(mine) / group) / (std(mine) + eps)
    mean = sum(sums) / len(sums)
    return [(value - mean) / (std(sums) + eps) for value in sums]


def remax(rewards, greedy, group):
    """Li et al., 2310.10505: r less the greedy completion's reward."""
    return [reward - greedy[at // group] for at, reward in enumerate(rewards)]


entropies = [(7 * at % tokens) ** 1.5 / 40 for at in range(tokens)]
rewards = [0.2, 1.0, -0.4, 0.9, 0.5, 0.5, 0.5, 0.5, 0.0, 0.7, 1.3, 0.1]
terms = [rewards, [1.0, 1.0, 0.0, 1.0, 0.0, 0.0, 0.0, 1.0, 1.0, 1.0, 1.0, 1.0], [r * (i % 5 - 1.5) for i, r in enumerate(rewards)]]
sizes, greedy = [7, 3, 12, 5, 4, 9, 2, 6, 11, 8, 1, 10], [0.6, 0.5, -0.2]
print(json.dumps({
    "comment": "By make_papers_golden.py, from the papers' formulas, at the log-probs of losses.json; check_papers_golden.py says by "
    "whose own functions too.",
    "checked": {
        "verl b178a3c": ["sapo", "cispo", "gmpo", "opo", "remax", "gpg but for its factor", "tis"],
        "TRL f2cd577": [
            "sapo", "cispo without a lower bound", "gmpo", "vespo", "off_policy", "weighted_k3", "top_entropy", "gdpo", "tis", "mis"
        ],
        "ROLL 8eb27cc": ["topr by the advantage's sign", "cispo"],
    },
    "sapo": by_sequence(sapo),
    "sapo_2_0.5": by_sequence(lambda ratio, advantage: sapo(ratio, advantage, 2.0, 0.5)),
    "cispo_0_5": by_token(cispo(0.0, 5.0)),
    "cispo_0.8_1.28": by_token(cispo(0.8, 1.28)),
    "topr": by_token(topr(1.0, 1.0)),
    "topr_2_0.5": by_token(topr(2.0, 0.5)),
    "gmpo": gmpo(0.4, 0.4),
    "gmpo_0.05_0.1": gmpo(0.05, 0.1),
    "vespo": vespo(2.0, 3.0, 3.0, 2.0),
    "vespo_1_2_0_0.5": vespo(1.0, 2.0, 0.0, 0.5),
    "off_policy_0.05": off_policy(0.05),
    "weighted_k3": weighted_k3(),
    "entropies": entropies,
    "top_entropy_0.2": top_entropy(0.2),
    "top_entropy_0.55": top_entropy(0.55),
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
    "gdpo_terms": terms,
    "gdpo_weights": [1.0, 0.5, 2.0],
    "gdpo": gdpo(terms, [1.0, 0.5, 2.0], 4),
}, indent=1))
