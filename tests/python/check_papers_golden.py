"""Holds tests/golden/papers.json to other systems' own functions, run at its inputs, and says of each value by whose. Needs torch,
and checkouts of verl, TRL and ROLL; of each only the files below are read, and of these only the functions named here run.

    python check_papers_golden.py VERL TRL ROLL
"""

import ast
import json
import logging
import math
import pathlib
import sys
from collections import defaultdict
from types import SimpleNamespace
from unittest.mock import MagicMock

import torch

VERL, TRL, ROLL = map(pathlib.Path, sys.argv[1:])
folder = pathlib.Path(__file__).parent.parent / "golden"
losses, papers = (json.loads((folder / f"{name}.json").read_text()) for name in ("losses", "papers"))
lengths = losses["lengths"]


class Config(SimpleNamespace):
    """An actor's config, as far as it is asked."""


class Sums:
    """Of verl's helpers those that the functions call."""

    masked_sum = staticmethod(lambda values, mask, axis=None: (values * mask).sum(axis))
    masked_mean = staticmethod(lambda values, mask, axis=None: (values * mask).sum(axis) / (mask.sum(axis) + 1e-8))


def source(root, file):
    return ast.parse((root / file).read_text())


def run(nodes, scope):
    """Runs parts of a file; what they import is not there, and hints of types are not looked at."""
    future = ast.ImportFrom("__future__", [ast.alias("annotations")], 0)
    module = ast.fix_missing_locations(ast.Module([future, *nodes], []))
    exec(compile(module, "another system's", "exec"), scope)
    return scope


def functions(tree, names, **scope):
    found = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name in names]
    assert {node.name for node in found} == set(names), names
    for node in found:
        node.decorator_list = []
    return SimpleNamespace(**run(found, {"torch": torch, "defaultdict": defaultdict, **scope}))


def branch(tree, begins):
    """The `if` of a method whose condition begins so, and that sets what it is for."""
    (name, target) = begins
    found = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test).startswith(name) and f"{target} = " in ast.unparse(node)
    ]
    return min(found, key=lambda node: len(ast.unparse(node)))


def tensor(values):
    return torch.tensor(values, dtype=torch.float64)


def padded(values):
    rows = torch.split(tensor(values), lengths)
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)


def flat(matrix):
    return torch.cat([row[:length] for row, length in zip(matrix, lengths)])


mask = padded([1.0] * sum(lengths))
old, rollout, advantages = (padded(losses[name]) for name in ("old_logp", "rollout_logp", "adv"))


def at_logprobs(loss):
    """A loss and its gradient at the log-probs."""
    logprobs = padded(losses["logp"]).requires_grad_(True)
    value = loss(logprobs)
    (gradient,) = torch.autograd.grad(value, logprobs)
    return {"loss": value.item(), "gradient": flat(gradient).tolist()}


def check(name, by, found, expected=None):
    expected = papers[name] if expected is None else expected
    both = [[each["loss"], *each["gradient"]] if isinstance(each, dict) else each for each in (found, expected)]
    apart = (tensor(both[0]) - tensor(both[1])).abs().max().item()
    assert apart < 1e-7, f"{name} by {by}: {apart}"  # verl divides by counts + 1e-8
    print(f"{name:20} {by:5} {apart:.0e}")


# verl: losses and advantages in core_algos, weights in rollout_corr_helper.
algos = functions(
    source(VERL, "verl/trainer/ppo/core_algos.py"),
    {
        "agg_loss", "compute_policy_loss_sapo", "compute_policy_loss_cispo", "compute_policy_loss_geo_mean",
        "compute_opo_outcome_advantage", "compute_gpg_outcome_advantage", "compute_remax_outcome_advantage",
    },
    verl_F=Sums, ActorConfig=Config, AlgoConfig=dict, Optional=None,
)  # fmt: skip


def of_verl(loss, mode, **config):
    config = Config(global_batch_info={}, **config)
    return at_logprobs(lambda logprobs: loss(old, logprobs, advantages, mask, mode, config)[0])


sequences, tokens = "seq-mean-token-mean", "token-mean"
for name, taus in [("sapo", (1.0, 1.05)), ("sapo_2_0.5", (2.0, 0.5))]:
    check(name, "verl", of_verl(algos.compute_policy_loss_sapo, sequences, tau_pos=taus[0], tau_neg=taus[1]))
for name, bounds in [("cispo_0_5", (1.0, 4.0)), ("cispo_0.8_1.28", (0.2, 0.28))]:
    bounds = {"clip_ratio_low": bounds[0], "clip_ratio_high": bounds[1]}
    check(name, "verl", of_verl(algos.compute_policy_loss_cispo, tokens, **bounds))
for name, bounds in [("gmpo", (0.4, 0.4)), ("gmpo_0.05_0.1", (0.05, 0.1))]:
    bounds = {"clip_ratio": None, "clip_ratio_low": bounds[0], "clip_ratio_high": bounds[1]}
    check(name, "verl", of_verl(algos.compute_policy_loss_geo_mean, tokens, **bounds))

rewards, sizes, greedy = (papers[name] for name in ("rewards", "lengths", "greedy"))
size = len(rewards) // len(greedy)
groups = [at // size for at in range(len(rewards))]
answers = torch.arange(max(sizes)) < torch.tensor(sizes).unsqueeze(1)
earned = torch.zeros_like(answers, dtype=torch.float64)
earned[torch.arange(len(sizes)), torch.tensor(sizes) - 1] = tensor(rewards)  # at the last token
first = lambda found: found[0][:, 0].tolist()
check("opo", "verl", first(algos.compute_opo_outcome_advantage(earned.clone(), answers, groups)))
baselines = tensor([greedy[group] for group in groups])
check("remax", "verl", first(algos.compute_remax_outcome_advantage(earned.clone(), baselines, answers)))
# verl counts rewards that are not 0, the paper samples that have a gradient.
counted = sum(reward != 0 for reward in rewards)
teaching = sum(len(set(rewards[at : at + size])) > 1 for at in range(0, len(rewards), size)) * size
gpg = first(algos.compute_gpg_outcome_advantage(earned.clone(), answers, groups))
check("gpg", "verl", [value * counted / teaching for value in gpg])

corrections = functions(
    source(VERL, "verl/trainer/ppo/rollout_corr_helper.py"),
    {"compute_rollout_correction_weights"},
    verl_F=Sums, SAFETY_BOUND=20.0, compute_is_metrics=lambda **_: {}, Optional=None,
)  # fmt: skip
for name, level, most in [("tis_token_1.1", "token", 1.1), ("tis_sequence_1.3", "sequence", 1.3)]:
    check(name, "verl", flat(corrections.compute_rollout_correction_weights(old - rollout, mask, level, most)[0]).tolist())

# TRL: branches of two methods.
trainer = source(TRL, "trl/trainer/grpo_trainer.py")


def weights_of_trl(mode, least, most):
    own = SimpleNamespace(
        use_vllm=True, vllm_importance_sampling_correction=True, vllm_importance_sampling_mode=mode,
        vllm_importance_sampling_clip_min=least, vllm_importance_sampling_clip_max=most,
    )  # fmt: skip
    part = branch(trainer, ("self.use_vllm and self.vllm_importance_sampling_correction", "per_token_logps_diff"))
    scope = {
        "torch": torch, "math": math, "self": own, "completion_mask": mask, "tool_mask": None,
        "old_per_token_logps": old, "sampling_per_token_logps": rollout,
    }  # fmt: skip
    return flat(run([part], scope)["vllm_importance_sampling_ratio"].expand_as(mask)).tolist()


for name, mode, bounds in [
    ("tis_token_1.1", "token_truncate", (None, 1.1)),
    ("tis_sequence_1.3", "sequence_truncate", (None, 1.3)),
    ("mis_token_0.8_1.2", "token_mask", (0.8, 1.2)),
    ("mis_sequence_0.6_1.3", "sequence_mask", (0.6, 1.3)),
]:
    check(name, "TRL", weights_of_trl(mode, *bounds))


steps = functions(trainer, {"get_gamma_weights", "get_off_policy_mask", "get_high_entropy_mask"}, math=math)


def of_trl(loss_type, aggregate, args=None, epsilon_high=None):
    own = SimpleNamespace(loss_type=loss_type, epsilon_high=epsilon_high, args=args)
    own.get_gamma_weights = torch.no_grad()(steps.get_gamma_weights)
    part = branch(trainer, ("self.loss_type == 'cispo'", "clamped_ratios"))

    def loss(logprobs):
        log_ratio = logprobs - old
        scope = {
            "torch": torch, "self": own, "inputs": {}, "mask": mask, "advantages": advantages, "per_token_logps": logprobs,
            "log_ratio": log_ratio, "coef_1": torch.exp(log_ratio),
        }  # fmt: skip
        return aggregate(run([part], scope)["per_token_loss"])

    return at_logprobs(loss)


by_sequence = lambda values: ((values * mask).sum(-1) / mask.sum(-1)).mean()
by_token = lambda values: (values * mask).sum() / mask.sum()
for name, taus in [("sapo", (1.0, 1.05)), ("sapo_2_0.5", (2.0, 0.5))]:
    args = SimpleNamespace(sapo_temperature_pos=taus[0], sapo_temperature_neg=taus[1])
    check(name, "TRL", of_trl("sapo", by_sequence, args))
check("cispo_0_5", "TRL", of_trl("cispo", by_token, epsilon_high=5.0))
for name, constants in [("vespo", (2.0, 3.0, 3.0, 2.0)), ("vespo_1_2_0_0.5", (1.0, 2.0, 0.0, 0.5))]:
    names = ["vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg", "vespo_lambda_neg"]
    check(name, "TRL", of_trl("vespo", by_token, SimpleNamespace(**dict(zip(names, constants)))))


def gmpo_of_trl(low, high):
    """The statements of its method that make the loss of each sequence, without the KL term."""
    method = next(
        node for node in ast.walk(source(TRL, "trl/experimental/gmpo/gmpo_trainer.py"))
        if isinstance(node, ast.FunctionDef) and node.name == "_compute_loss"
    )  # fmt: skip
    parts = [
        "log_ratio", "clamped_log_ratio", "advantages_col", "clipped_log_ratio", "seq_mask", "log_importance_weights", "coef",
        "per_sequence_loss",
    ]  # fmt: skip
    nodes = [node for node in method.body if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) in parts]
    assert [ast.unparse(node.targets[0]) for node in nodes] == parts

    def loss(logprobs):
        scope = {
            "torch": torch, "self": SimpleNamespace(epsilon_low=low, epsilon_high=high), "mask": mask, "entropy_mask": None,
            "advantages": advantages[:, 0], "per_token_logps": logprobs, "old_per_token_logps": old,
        }  # fmt: skip
        return run(nodes, scope)["per_sequence_loss"].mean()

    return at_logprobs(loss)


for name, bounds in [("gmpo", (0.4, 0.4)), ("gmpo_0.05_0.1", (0.05, 0.1))]:
    check(name, "TRL", gmpo_of_trl(*bounds))

kept = steps.get_off_policy_mask(advantages, padded(losses["logp"]), rollout, mask, 0.05)
check("off_policy_0.05", "TRL", flat(kept).tolist())


def kl_of_trl(logprobs):
    own = SimpleNamespace(beta=1.0, args=SimpleNamespace(use_bias_correction_kl=True))
    part = branch(trainer, ("self.beta != 0.0", "per_token_kl"))
    scope = {
        "torch": torch, "self": own, "inputs": {"ref_per_token_logps": padded(losses["ref_logp"])},
        "per_token_logps": logprobs, "coef_1": torch.exp(logprobs - old),
    }  # fmt: skip
    return by_token(run([part], scope)["per_token_kl"])


check("weighted_k3", "TRL", at_logprobs(kl_of_trl))

nanstd = functions(source(TRL, "trl/trainer/utils.py"), {"nanstd"}).nanstd
terms = tensor(papers["gdpo_terms"]).T
own = SimpleNamespace(
    multi_objective_aggregation="normalize_then_sum", reward_funcs=terms[0], reward_weights=tensor(papers["gdpo_weights"])
)
part = branch(trainer, ("self.multi_objective_aggregation == 'normalize_then_sum'", "advantages"))
scope = {
    "torch": torch, "nanstd": nanstd, "self": own, "rewards_per_func": terms, "num_generations": size, "device": "cpu",
    "unscorable_mask": torch.zeros(len(terms), dtype=torch.bool),
}  # fmt: skip
check("gdpo", "TRL", run([part], scope)["advantages"].tolist())

alone = SimpleNamespace(accelerator=SimpleNamespace(
    pad_across_processes=lambda values, **_: values, gather=lambda values: values
))  # fmt: skip
for share in (0.2, 0.55):
    chosen = steps.get_high_entropy_mask(alone, padded(papers["entropies"]), mask, 1 - share)
    check(f"top_entropy_{share}", "TRL", flat(chosen.double()).tolist())

# ROLL: methods of its worker. TOPR's sign is the reward's there; here rewards have that of the token's advantage.
worker = functions(
    source(ROLL, "roll/pipeline/rlvr/actor_pg_worker.py"),
    {"_compute_topr_loss", "_compute_tis_loss", "_compute_cispo_loss"},
)


def of_roll(method, settings, *more):
    own = SimpleNamespace(
        _get_or_cache_config=lambda key, default: settings.get(key, default), _cached_metrics={}, logger=logging,
        _topr_sample_logged=True, _cispo_config_logged=True,
    )  # fmt: skip
    column = lambda matrix: flat(matrix).unsqueeze(1)

    def loss(logprobs):
        ratio, rest = torch.exp(column(logprobs) - column(old)), (column(advantages), *more)
        before = () if method is worker._compute_cispo_loss else (column(old),)
        return method(own, ratio, column(logprobs), *before, *rest).mean()

    return at_logprobs(loss)


data = MagicMock(batch={"scores": flat(advantages)})
for name, weights in [("topr", (1.0, 1.0)), ("topr_2_0.5", (2.0, 0.5))]:
    settings = {"topr_positive_weight": weights[0], "topr_negative_weight": weights[1]}
    check(name, "ROLL", of_roll(worker._compute_topr_loss, settings, data))
check("cispo_0_5", "ROLL", of_roll(worker._compute_tis_loss, {"tis_upper_bound": 5.0}, data))
settings = {"cispo_epsilon_low": 0.2, "cispo_epsilon_high": 0.28}
check("cispo_0.8_1.28", "ROLL", of_roll(worker._compute_cispo_loss, settings))
