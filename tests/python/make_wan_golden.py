"""Writes tests/golden/wan/: tiny Wan transformers, what they say and all gradients, by diffusers.

    python tests/python/make_wan_golden.py

Needs torch, diffusers and safetensors. Weights are random, all of them, so that no part is silent.
"""

import math

import torch
from diffusers import WanTransformer3DModel
from golden import write

SHAPE = dict(
    patch_size=(1, 2, 2), num_attention_heads=2, attention_head_dim=12, in_channels=4, out_channels=4, text_dim=6,
    freq_dim=16, ffn_dim=20, num_layers=2, cross_attn_norm=True, qk_norm="rms_norm_across_heads", eps=1e-6,
    rope_max_seq_len=8,
)
CONFIGS = {
    "wan": SHAPE,
    "plain": {**SHAPE, "patch_size": (2, 1, 2), "cross_attn_norm": False, "num_layers": 1, "eps": 1e-3},
    # As the pipeline of Wan 2.2's 14B, but for each point by itself.
    "pair": {**SHAPE, "num_layers": 1, "boundary_ratio": 0.5},
}


def golden(config):
    torch.manual_seed(0)
    shape = {name: value for name, value in config.items() if name != "boundary_ratio"}
    names = ["transformer.", "transformer_2."] if "boundary_ratio" in config else [""]
    models = {name: WanTransformer3DModel(**shape) for name in names}
    for model in models.values():
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.3)
    latents = torch.randn(2, 4, 4, 6, 4, requires_grad=True)
    sigmas, context = torch.tensor([0.3, 0.85]), torch.randn(2, 3, 6)
    answers = [model(latents, sigmas * 1000, context).sample for model in models.values()]
    of_second = sigmas < config.get("boundary_ratio", 0.0)
    output = torch.where(of_second.view(2, 1, 1, 1, 1), answers[-1], answers[0])
    check_timesteps_of_patches(models[names[0]], latents, sigmas, context, answers[0])
    wanted = torch.randn_like(output)
    (output * wanted).sum().backward()
    tensors = dict(latents=latents, sigmas=sigmas, context=context, output=output, d_output=wanted)
    tensors["grad.latents"] = latents.grad
    for prefix, model in models.items():
        for name, parameter in model.named_parameters():
            tensors[prefix + name] = parameter
            tensors[f"grad.{prefix}{name}"] = parameter.grad
    return tensors


def check_timesteps_of_patches(model, latents, sigmas, context, expected):
    """Wan 2.2's 5B is told the timestep of each patch; without a first frame they are all the same, and so is what it says."""
    patches = latents[0, 0].numel() // math.prod(model.config.patch_size)
    told = (sigmas * 1000).view(2, 1).expand(2, patches)
    assert (model(latents, told, context).sample - expected).abs().max() < 1e-4


if __name__ == "__main__":
    write("wan", CONFIGS, golden)
