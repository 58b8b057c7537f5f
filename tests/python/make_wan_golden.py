"""Writes tests/golden/wan/: tiny Wan transformers, what they say and all gradients, by diffusers.

    python tests/python/make_wan_golden.py

Needs torch, diffusers and safetensors. Weights are random, all of them, so that no part is silent.
"""

import json
from pathlib import Path

import torch
from diffusers import WanTransformer3DModel
from safetensors.torch import save_file

OUT = Path(__file__).parent.parent / "golden" / "wan"
SHAPE = dict(
    patch_size=(1, 2, 2), num_attention_heads=2, attention_head_dim=12, in_channels=4, out_channels=4, text_dim=6,
    freq_dim=16, ffn_dim=20, num_layers=2, cross_attn_norm=True, qk_norm="rms_norm_across_heads", eps=1e-6,
    rope_max_seq_len=8,
)
CONFIGS = {
    "wan": SHAPE,
    "plain": {**SHAPE, "patch_size": (2, 1, 2), "cross_attn_norm": False, "num_layers": 1, "eps": 1e-3},
}


def golden(config):
    torch.manual_seed(0)
    model = WanTransformer3DModel(**config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    latents = torch.randn(2, 4, 4, 6, 4, requires_grad=True)
    sigmas, context = torch.tensor([0.3, 0.85]), torch.randn(2, 3, 6)
    output = model(latents, sigmas * 1000, context).sample
    wanted = torch.randn_like(output)
    (output * wanted).sum().backward()
    tensors = dict(latents=latents, sigmas=sigmas, context=context, output=output, d_output=wanted)
    tensors["grad.latents"] = latents.grad
    for name, parameter in model.named_parameters():
        tensors[name] = parameter
        tensors[f"grad.{name}"] = parameter.grad
    return {name: tensor.detach().contiguous() for name, tensor in tensors.items()}


def main():
    OUT.mkdir(parents=True, exist_ok=True)
    for name, config in CONFIGS.items():
        save_file(golden(config), OUT / f"{name}.safetensors")
    (OUT / "configs.json").write_text(json.dumps(CONFIGS, indent=1) + "\n")


if __name__ == "__main__":
    main()
