"""Writes tests/golden/sd3/: tiny SD3 and SD3.5 transformers, what they say and all gradients, by diffusers.

    python tests/python/make_sd3_golden.py

Needs torch, diffusers and safetensors. Weights are random, all of them, so that no part is silent.
"""

import json
from pathlib import Path

import torch
from diffusers import FlowMatchEulerDiscreteScheduler, SD3Transformer2DModel
from safetensors.torch import save_file

OUT = Path(__file__).parent.parent / "golden" / "sd3"
SHAPE = dict(
    sample_size=8, patch_size=2, in_channels=2, out_channels=2, num_layers=2, attention_head_dim=4,
    num_attention_heads=2, joint_attention_dim=6, caption_projection_dim=8, pooled_projection_dim=5,
    pos_embed_max_size=6,
)
CONFIGS = {
    "sd3": SHAPE,
    "sd35": {**SHAPE, "dual_attention_layers": (0,), "qk_norm": "rms_norm"},
}


def golden(config):
    torch.manual_seed(0)
    model = SD3Transformer2DModel(**config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    latents = torch.randn(2, 2, 8, 4, requires_grad=True)
    sigmas = torch.tensor([0.3, 0.85])
    context, pooled = torch.randn(2, 3, 6), torch.randn(2, 5)
    output = model(latents, context, pooled, sigmas * 1000).sample
    wanted = torch.randn_like(output)
    (output * wanted).sum().backward()
    tensors = dict(latents=latents, sigmas=sigmas, context=context, pooled=pooled, output=output, d_output=wanted)
    tensors["grad.latents"] = latents.grad
    for name, parameter in model.named_parameters():
        tensors[name] = parameter
        tensors[f"grad.{name}"] = parameter.grad
    tensors["pos_embed.pos_embed"] = model.pos_embed.pos_embed
    return {name: tensor.detach().contiguous() for name, tensor in tensors.items()}


def sigmas():
    rows = []
    for steps, shift in [(4, 1.0), (10, 3.0), (28, 3.0)]:
        scheduler = FlowMatchEulerDiscreteScheduler(shift=shift)
        scheduler.set_timesteps(steps)
        rows.append(dict(steps=steps, shift=shift, sigmas=scheduler.sigmas.tolist()))
    return rows


def main():
    OUT.mkdir(parents=True, exist_ok=True)
    for name, config in CONFIGS.items():
        save_file(golden(config), OUT / f"{name}.safetensors")
    named = {name: {**config, "qk_norm": config.get("qk_norm")} for name, config in CONFIGS.items()}
    text = json.dumps(dict(configs=named, schedules=sigmas()), indent=1)
    (OUT / "configs.json").write_text(text + "\n")


if __name__ == "__main__":
    main()
