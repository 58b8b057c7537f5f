"""Writes tests/golden/vae/: a tiny AutoencoderKL's decoder, what it makes of latents and all gradients, by diffusers.

    python tests/python/make_vae_golden.py

Needs torch, diffusers and safetensors. Weights are random, all of them, so that no part is silent.
"""

import torch
from diffusers import AutoencoderKL
from golden import of_decoder, write

SHAPE = dict(
    block_out_channels=(4, 8), down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2,
    layers_per_block=1, latent_channels=2, norm_num_groups=2, out_channels=3, sample_size=16,
)
CONFIGS = {
    "plain": dict(SHAPE, scaling_factor=0.18215, use_post_quant_conv=True),
    "sd3": dict(SHAPE, scaling_factor=1.5305, shift_factor=0.0609, use_post_quant_conv=False, use_quant_conv=False),
}


def golden(config):
    torch.manual_seed(0)
    model = AutoencoderKL(**config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    latents = torch.randn(2, 2, 4, 3, requires_grad=True)
    output = model.decode(latents / config["scaling_factor"] + config.get("shift_factor", 0.0)).sample
    return of_decoder(model, latents, output, gradients=True)


if __name__ == "__main__":
    write("vae", CONFIGS, golden)
