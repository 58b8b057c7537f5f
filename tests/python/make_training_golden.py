"""Writes tests/golden/training/*.safetensors: what a plain PyTorch loop makes of a tiny decoder in ten steps.

    python tests/python/make_training_golden.py

Autograd, clip_grad_norm_ and torch.optim.AdamW in fp64, one process, whole batches: nothing of a strategy. A file
holds the weights before (`before.<name>`) and after (`after.<name>`), the loss and the norm of the gradient a step.
strategy/tests/strategy/plain_loop.rs has the same numbers and the same data.
"""

import pathlib

import torch

from make_decoder_golden import logits_of, parameters, write_safetensors

CONFIG = dict(
    vocab_size=11,
    hidden_size=12,
    num_hidden_layers=3,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=6,
    intermediate_size=20,
    rms_norm_eps=1e-6,
    rope_theta=10_000.0,
    qkv_bias=True,
    qk_norm=True,
)
STEPS, SEQUENCES, LEARNING_RATE, WEIGHT_DECAY, MAX_GRAD_NORM = 10, 12, 1e-4, 0.1, 0.5
# So large that rounding does not decide the sign of a step.
EPS = 1e-3
CASES = {"all": (False, ()), "frozen": (True, ("model.embed_tokens.", "model.layers.0."))}


def sequence(step, index):
    return torch.tensor([(step * 7 + index * 5 + t * t * 3 + t) % 11 for t in range(4 + index % 7)])


def train(tied, frozen):
    p = parameters({**CONFIG, "tie_word_embeddings": tied}, torch.Generator().manual_seed(0))
    before = {f"before.{name}": value.detach().clone() for name, value in p.items()}
    for name, value in p.items():
        value.requires_grad_(not name.startswith(frozen))
    trained = [value for value in p.values() if value.requires_grad]
    groups = [
        dict(params=[value for value in trained if value.dim() == 2], weight_decay=WEIGHT_DECAY),
        dict(params=[value for value in trained if value.dim() == 1], weight_decay=0.0),
    ]
    optimizer = torch.optim.AdamW(groups, lr=LEARNING_RATE, betas=(0.9, 0.98), eps=EPS)
    losses, norms = [], []
    for step in range(STEPS):
        logprobs = []
        for index in range(SEQUENCES):
            tokens = sequence(step, index)
            log_p = logits_of(tokens, p, {**CONFIG, "tie_word_embeddings": tied})[1:-1].log_softmax(-1)
            logprobs.append(log_p.gather(1, tokens[2:, None])[:, 0])
        loss = -torch.cat(logprobs).mean()
        optimizer.zero_grad()
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(trained, MAX_GRAD_NORM))
        optimizer.step()
        losses.append(loss.detach())
    after = {f"after.{name}": value.detach() for name, value in p.items()}
    return {**before, **after, "losses": torch.stack(losses), "norms": torch.stack(norms)}


folder = pathlib.Path(__file__).parent.parent / "golden" / "training"
folder.mkdir(parents=True, exist_ok=True)
for name, (tied, frozen) in CASES.items():
    golden = train(tied, frozen)
    print(name, [round(float(loss), 3) for loss in golden["losses"]], [round(float(n), 3) for n in golden["norms"]])
    write_safetensors(folder / f"{name}.safetensors", golden)
