"""Losses of ILQL and their gradients by the formulas of trlx 0.7 (`ILQLConfig.loss`, `make_experience`), transcribed to
padded batches of PyTorch: tests/golden/ilql.json. Needs torch; python make_ilql_golden.py > ../golden/ilql.json"""

import json

import torch
import torch.nn.functional as F

torch.manual_seed(0)
VOCAB = 5
# Messages of each dialogue, as numbers of tokens: prompt, answer, prompt, answer, ...
DIALOGUES = [[2, 4], [1, 1], [3, 2, 2, 3], [2, 6]]
RETURNS = [1.0, -0.5, 0.25, 3.0]


def normalized(returns):
    """The rewards of a data set: mean 0 and standard deviation 1."""
    returns = torch.tensor(returns, dtype=torch.float64)
    returns = returns - returns.mean()
    deviation = returns.std()
    return returns if torch.isnan(deviation) else returns / (deviation + torch.finfo(torch.float64).eps)


def padded(rows):
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)


def of_dialogues():
    """Indices of the states, of the actions that follow them, and a mask of the states that are not terminal."""
    states, actions, alive = [], [], []
    for messages in DIALOGUES:
        start, indices = 0, []
        for number, length in enumerate(messages):
            if number % 2 == 1:
                indices += range(start - 1, start + length - 1)
            start += length
        actions.append(torch.tensor(indices))
        states.append(torch.tensor(indices + [start - 1]))
        alive.append(torch.tensor([1] * len(indices) + [0]))
    return padded(states), padded(actions), padded(alive)


LONGEST = max(map(sum, DIALOGUES))
STATES, ACTIONS, ALIVE = of_dialogues()
TOKENS = torch.randint(0, VOCAB, (len(DIALOGUES), LONGEST))
REWARDS = torch.zeros(ACTIONS.shape, dtype=torch.float64)
for row, reward in enumerate(normalized(RETURNS)):
    REWARDS[row, ALIVE[row].sum() - 1] = reward


def leaf(*shape):
    return torch.randn(shape, dtype=torch.float64, requires_grad=True)


LOGITS = leaf(len(DIALOGUES), LONGEST, VOCAB)
QS, TARGET_QS = ([leaf(*ACTIONS.shape, VOCAB) for _ in range(2)] for _ in range(2))
VS = leaf(*STATES.shape, 1)


def losses(tau, gamma, cql_scale, awac_scale, beta, two_qs):
    heads = slice(2 if two_qs else 1)
    mask = ALIVE[:, :-1]
    count = max(1, mask.sum())
    taken = TOKENS[:, 1:].gather(1, ACTIONS).unsqueeze(-1)

    def of_taken(q):
        return q.gather(-1, taken).squeeze(-1)

    def mean(values):
        return (values * mask).sum() / count

    def entropy_to_taken(scores):
        return F.cross_entropy(scores.reshape(-1, VOCAB), taken.reshape(-1), reduction="none").reshape(mask.shape)

    q = [of_taken(each) for each in QS[heads]]
    target_q = torch.stack([of_taken(each).detach() for each in TARGET_QS[heads]]).amin(0)
    v, v_next = VS[:, :-1, 0], VS[:, 1:, 0] * ALIVE[:, 1:]
    aim = (REWARDS + gamma * v_next).detach()
    loss_q = sum(mean((each - aim) ** 2) for each in q)
    error = target_q - v
    loss_v = mean(((error >= 0).double() * tau + (error < 0).double() * (1 - tau)) * error**2)
    loss_cql = sum(mean(entropy_to_taken(each)) for each in QS[heads])
    weights = torch.exp(beta * error).detach()
    logits = LOGITS.gather(1, ACTIONS.unsqueeze(-1).expand(-1, -1, VOCAB))
    loss_awac = mean(entropy_to_taken(logits) * weights)
    loss = loss_q + loss_v + cql_scale * loss_cql + awac_scale * loss_awac
    parts = {"q": loss_q, "v": loss_v, "cql": loss_cql, "awac": loss_awac}
    return loss, parts, {"weight": mean(weights), "q": mean(q[0]), "v": mean(v)}


def packed(values):
    """Those of the actions, dialogue by dialogue, without padding."""
    return values[ALIVE[:, :-1] == 1].tolist()


def case(tau=0.7, gamma=0.99, cql_scale=0.1, awac_scale=1.0, beta=0.0, two_qs=True):
    config = dict(
        tau=tau, gamma=gamma, cql_scale=cql_scale, awac_scale=awac_scale, beta=beta, two_qs=two_qs
    )
    loss, parts, means = losses(**config)
    count = 2 if two_qs else 1
    inputs = [LOGITS, VS, *QS[:count]]
    of_logits, of_v, *of_q = torch.autograd.grad(loss, inputs)
    behind = ALIVE[:, 1:].sum(1)
    assert all(of_v[row, length + 1 :].abs().max() == 0 for row, length in enumerate(behind) if length + 1 < of_v.shape[1])
    return {
        "config": config,
        "loss": loss.item(),
        "losses": {name: part.item() for name, part in parts.items()},
        "means": {name: value.item() for name, value in means.items()},
        "of_logits": packed(of_logits.gather(1, ACTIONS.unsqueeze(-1).expand(-1, -1, VOCAB))),
        "of_qs": [packed(each) for each in of_q],
        "of_values": packed(of_v[:, :-1, 0]),
    }


print(
    json.dumps(
        {
            "returns": RETURNS,
            "normalized": normalized(RETURNS).tolist(),
            "one": normalized([2.0]).tolist(),
            "lengths": ALIVE.sum(1).tolist(),
            "actions": packed(TOKENS[:, 1:].gather(1, ACTIONS)),
            "logits": packed(LOGITS.gather(1, ACTIONS.unsqueeze(-1).expand(-1, -1, VOCAB))),
            "qs": [packed(each) for each in QS],
            "target_qs": [packed(each) for each in TARGET_QS],
            "values": packed(VS[:, :-1, 0]),
            "cases": [
                case(),
                case(two_qs=False),
                case(tau=0.5, gamma=1.0),
                case(tau=0.9, cql_scale=0.0, awac_scale=0.5, beta=1.5),
                case(gamma=0.0, cql_scale=2.0, beta=-1.0, two_qs=False),
                case(awac_scale=0.0, cql_scale=1.0),
            ],
        },
        indent=1,
    )
)
