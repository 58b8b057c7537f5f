"""Writes tests/golden/tiles/: tiny decoders of AutoencoderKL and AutoencoderKLWan, what they make of latents in tiles, and the
latents' gradients, by diffusers' `enable_tiling`.

    python tests/python/make_tiles_golden.py

Needs torch, diffusers and safetensors. Weights are random, all of them, so that no part is silent. Of the videos some pixels
are beyond -1 and 1 before tiles are blended, and after it.
"""

import torch
from diffusers import AutoencoderKL, AutoencoderKLWan
from golden import of_decoder, write
from make_vae_golden import CONFIGS as IMAGES
from make_wan_vae_golden import CONFIGS as VIDEOS, STD

# Latents of a tile's side, and from one to the next.
SIZE, STRIDE = 4, 3
CONFIGS = {
    "images": IMAGES["sd3"],
    "videos": dict(VIDEOS["doubled_once"], scale_factor_temporal=2, scale_factor_spatial=4),
    "residual": VIDEOS["residual"],
}


def of_images(config):
    model = AutoencoderKL(**config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    zoom = 2 ** (len(config["block_out_channels"]) - 1)
    model.enable_tiling()
    model.tile_latent_min_size, model.tile_sample_min_size = SIZE, SIZE * zoom
    model.tile_overlap_factor = 1 - STRIDE / SIZE
    latents = torch.randn(2, 2, 8, 5, requires_grad=True)
    return model, latents, latents / config["scaling_factor"] + config["shift_factor"]


def of_videos(config):
    model = AutoencoderKLWan(**config)
    for name, parameter in model.named_parameters():
        torch.nn.init.normal_(parameter, mean=float(name.endswith("gamma")), std=0.5 if name.endswith("bias") else STD)
    size, stride = (side * config["scale_factor_spatial"] for side in (SIZE, STRIDE))
    model.enable_tiling(size, size, stride, stride)
    latents = torch.randn(1, config["z_dim"], 3, 5, 7, requires_grad=True)
    mean, std = (torch.tensor(config[f"latents_{name}"]).view(1, -1, 1, 1, 1) for name in ("mean", "std"))
    return model, latents, latents * std + mean


def golden(config):
    torch.manual_seed(0)
    model, latents, unscaled = (of_videos if "z_dim" in config else of_images)(config)
    output = model.decode(unscaled).sample
    model.disable_tiling()
    whole = model.decode(unscaled).sample
    # Tiles see less than the whole: the test would not tell them from it otherwise.
    assert output.shape == whole.shape and (output - whole).abs().max() > 0.01
    return of_decoder(model, latents, output)


if __name__ == "__main__":
    write("tiles", CONFIGS, golden)
