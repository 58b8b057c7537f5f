"""Writes tests/golden/wan_vae/: tiny decoders of AutoencoderKLWan, what they make of latents, and the latents' gradients,
by diffusers.

    python tests/python/make_wan_vae_golden.py

Needs torch, diffusers and safetensors. Weights are random, all of them, so that no part is silent.
Some pixels are beyond -1 and 1, where they are cut off and have no gradient.
"""

import torch
from diffusers import AutoencoderKLWan
from golden import of_decoder, write

STD = 0.12
SHAPE = dict(z_dim=2, num_res_blocks=1, latents_mean=[0.25, -0.5], latents_std=[1.5, 0.75])
CONFIGS = {
    "doubled_once": dict(SHAPE, base_dim=4, dim_mult=[1, 2, 1], temperal_downsample=[False, True]),
    "doubled_twice": dict(
        SHAPE, base_dim=2, decoder_base_dim=6, dim_mult=[1, 1, 2], temperal_downsample=[True, True], num_res_blocks=0
    ),
    # As Wan 2.2's 5B has it.
    "residual": dict(
        z_dim=4, num_res_blocks=1, latents_mean=[0.25, -0.5, 0.0, 0.1], latents_std=[1.5, 0.75, 1.0, 1.2], base_dim=4,
        dim_mult=[1, 2, 1], temperal_downsample=[False, True], is_residual=True, patch_size=2, in_channels=12,
        out_channels=12, scale_factor_temporal=2, scale_factor_spatial=8,
    ),
}


def golden(config):
    torch.manual_seed(0)
    model = AutoencoderKLWan(**config)
    for name, parameter in model.named_parameters():
        # Biases keep the few channels away from 0, where a norm multiplies what rounding makes of them.
        torch.nn.init.normal_(parameter, mean=float(name.endswith("gamma")), std=0.5 if name.endswith("bias") else STD)
    latents = torch.randn(2, config["z_dim"], 4, 2, 3, requires_grad=True)
    # As diffusers' pipeline undoes what the encoder's latents went through.
    mean, std = (torch.tensor(config[f"latents_{name}"]).view(1, -1, 1, 1, 1) for name in ("mean", "std"))
    output = model.decode(latents * std + mean).sample
    within = (output.abs() < 1).float().mean().item()
    assert 0.3 < within < 0.99, within
    return of_decoder(model, latents, output)


if __name__ == "__main__":
    write("wan_vae", CONFIGS, golden)
