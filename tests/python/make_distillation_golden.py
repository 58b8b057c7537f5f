"""How far two distributions are apart, and the gradient, by TRL's own function: tests/golden/distillation.json. Needs torch, and of
TRL a file: its GKDTrainer's, `trl/experimental/gkd/gkd_trainer.py`, formerly `trl/trainer/gkd_trainer.py`.

    python make_distillation_golden.py FILE > ../golden/distillation.json"""

import ast
import json
import pathlib
import sys

import torch
import torch.nn.functional as F


def function_of(file, name):
    """A function of a file, without what the file imports besides."""
    tree = ast.parse(pathlib.Path(file).read_text())
    (found,) = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name == name]
    found.decorator_list = []
    scope = {"torch": torch, "F": F}
    exec(compile(ast.Module([found], []), file, "exec"), scope)
    return scope[name]


generalized_jsd_loss = function_of(sys.argv[1], "generalized_jsd_loss")
torch.manual_seed(0)
TOKENS, VOCAB = 5, 9
student = (2 * torch.randn(1, TOKENS, VOCAB, dtype=torch.float64)).requires_grad_(True)
teacher = 2 * torch.randn(1, TOKENS, VOCAB, dtype=torch.float64)
labels = torch.zeros(1, TOKENS, dtype=torch.long)


def case(beta, temperature):
    loss = generalized_jsd_loss(student, teacher, labels, beta=beta, temperature=temperature)
    (gradient,) = torch.autograd.grad(loss, student)
    return {"beta": beta, "temperature": temperature, "loss": loss.item(), "gradient": gradient.reshape(-1).tolist()}


print(
    json.dumps(
        {
            "tokens": TOKENS,
            "student": student.detach().reshape(-1).tolist(),
            "teacher": teacher.reshape(-1).tolist(),
            "cases": [case(beta, temperature) for beta in (0.0, 0.1, 0.5, 0.9, 1.0) for temperature in (1.0, 0.7)],
        },
        indent=1,
    )
)
