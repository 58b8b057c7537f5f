"""Losses of pairs, and of answers that are judged each by itself, and their gradients by TRL's own functions: tests/golden/offline.json. Needs torch and trl 0.19
(python -m pip install trl==0.19.1 transformers==4.52.4 datasets accelerate); python make_offline_golden.py > ../golden/offline.json"""

import json
from types import SimpleNamespace

import torch
from trl import CPOTrainer, DPOTrainer, KTOTrainer, ORPOTrainer, RewardTrainer

torch.manual_seed(0)
PAIRS = 6
lengths = torch.randint(1, 40, (2, PAIRS)).double()
logprobs = -lengths * torch.empty(2, PAIRS, dtype=torch.float64).uniform_(0.02, 2.5)
reference = logprobs + torch.empty(2, PAIRS, dtype=torch.float64).uniform_(-6, 6)
logprobs = logprobs.requires_grad_(True)

CPU = SimpleNamespace(device="cpu")
NO_DEVICES = dict(accelerator=CPU, f_divergence_type="reverse_kl", f_divergence_params=None, reference_free=False)


def dpo(loss_type, beta, smoothing, divided):
    """`divided`: DPOTrainer hands its loss means over tokens where loss_type is ipo."""
    trainer = SimpleNamespace(**NO_DEVICES, beta=beta, label_smoothing=smoothing, loss_type=loss_type)
    by = lengths if divided else torch.ones_like(lengths)
    chosen, rejected, of_chosen, of_rejected = *(logprobs / by), *(reference / by)
    args = (chosen, rejected, of_chosen, of_rejected)
    losses, better, worse = DPOTrainer.dpo_loss(trainer, *args)
    return losses, better, worse


def simpo(beta, gamma):
    trainer = SimpleNamespace(accelerator=CPU, beta=beta, simpo_gamma=gamma, loss_type="simpo", label_smoothing=0.0)
    return CPOTrainer.cpo_loss(trainer, *(logprobs / lengths))


def orpo(beta):
    trainer = SimpleNamespace(accelerator=CPU, beta=beta)
    losses, better, worse, _, _ = ORPOTrainer.odds_ratio_loss(trainer, *(logprobs / lengths))
    return -losses, better, worse  # the trainer subtracts them


def reward_model(center):
    """The numbers of the answers are the log-probs of the other objectives."""
    args = SimpleNamespace(center_rewards_coefficient=center)
    trainer = SimpleNamespace(args=args, use_reward_data_collator=True)
    numbers = {"chosen": logprobs[0].unsqueeze(1), "rejected": logprobs[1].unsqueeze(1)}
    model = lambda input_ids, **_: {"logits": numbers[input_ids]}
    inputs = {f"input_ids_{side}": side for side in numbers} | {f"attention_mask_{side}": None for side in numbers}
    loss = RewardTrainer.compute_loss(trainer, model, inputs)
    return loss, *logprobs


desirable = torch.tensor([1, 0, 1, 1, 0, 0, 0, 1, 0, 1, 0, 0], dtype=torch.bool)


def judged(name, answers, drift, beta=0.1, weights=(1.0, 1.0)):
    """Of the first so many answers; `drift` is how far the log-probs of mismatched ones are from the reference's."""
    gather = SimpleNamespace(device="cpu", gather_for_metrics=lambda values: values)
    trainer = SimpleNamespace(
        accelerator=gather, loss_type=name, calculate_KL=name == "kto", beta=beta,
        desirable_weight=weights[0], undesirable_weight=weights[1],
    )
    flat, of_reference, chosen = logprobs.t().reshape(-1)[:answers], reference.t().reshape(-1)[:answers], desirable[:answers]
    apart = torch.randn(answers, dtype=torch.float64)
    losses, better, worse, kl = KTOTrainer.kto_loss(
        trainer, flat[chosen], flat[~chosen], apart + drift, of_reference[chosen], of_reference[~chosen], apart
    )
    loss = losses.nanmean()  # as the trainer takes it
    (gradient,) = torch.autograd.grad(loss, logprobs)
    return {
        "objective": {name: {"beta": beta, "desirable_weight": weights[0], "undesirable_weight": weights[1]}},
        "answers": answers,
        "kl": kl.item(),
        "loss": loss.item(),
        "chosen": better.sum().item(),
        "rejected": worse.sum().item(),
        "gradient": gradient.t().reshape(-1)[:answers].tolist(),
    }


def case(objective, found):
    losses, better, worse = found
    (gradient,) = torch.autograd.grad(losses.mean(), logprobs)
    return {
        "objective": objective,
        "loss": losses.mean().item(),
        "chosen": better.mean().item(),
        "rejected": worse.mean().item(),
        "gradient": gradient.t().reshape(-1).tolist(),
    }


def side_by_side(values):
    return values.detach().t().reshape(-1).tolist()


print(
    json.dumps(
        {
            "lengths": side_by_side(lengths),
            "logprobs": side_by_side(logprobs),
            "reference": side_by_side(reference),
            "desirable": desirable.double().tolist(),
            "judged": [
                judged("kto", 12, torch.linspace(-1, 4, 12, dtype=torch.float64)),
                judged("kto", 12, torch.full((12,), -2.0, dtype=torch.float64)),
                judged("kto", 11, torch.full((11,), 1.5, dtype=torch.float64), 0.5, (1.25, 0.75)),
                judged("kto", 1, torch.full((1,), 0.5, dtype=torch.float64), 0.3),
                judged("apo_zero_unpaired", 12, torch.zeros(12, dtype=torch.float64)),
                judged("apo_zero_unpaired", 5, torch.zeros(5, dtype=torch.float64), 0.2, (1.0, 2.0)),
            ],
            "cases": [
                case({"dpo": {"beta": 0.1}}, dpo("sigmoid", 0.1, 0.0, False)),
                case({"dpo": {"beta": 0.5, "label_smoothing": 0.2}}, dpo("sigmoid", 0.5, 0.2, False)),
                case({"ipo": {"beta": 0.2}}, dpo("ipo", 0.2, 0.0, True)),
                case({"hinge": {"beta": 0.3}}, dpo("hinge", 0.3, 0.0, False)),
                case({"simpo": {"beta": 2.0, "gamma": 1.0}}, simpo(2.0, 1.0)),
                case({"orpo": {"beta": 0.1}}, orpo(0.1)),
                case({"reward_model": {"center": 0.01}}, reward_model(0.01)),
            ],
        },
        indent=1,
    )
)
