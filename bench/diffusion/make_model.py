"""Writes a model of Stable Diffusion 3.5 medium's shape with random weights, texts and a scorer: `make_model.py FOLDER`.

Needs torch, diffusers and safetensors. `--tiny` makes one that a CPU runs in seconds, to try the scripts; `--wan` one of
Wan 2.1 14B's shape, whose scorer reads latents.
"""

import argparse
import json
import pathlib

import torch
from diffusers import (
    AutoencoderKL,
    AutoencoderKLWan,
    FlowMatchEulerDiscreteScheduler,
    SD3Transformer2DModel,
    UniPCMultistepScheduler,
    WanTransformer3DModel,
)
from safetensors.torch import save_file

TRANSFORMER = dict(
    sample_size=128, patch_size=2, in_channels=16, out_channels=16, num_layers=24, attention_head_dim=64,
    num_attention_heads=24, joint_attention_dim=4096, caption_projection_dim=1536, pooled_projection_dim=2048,
    pos_embed_max_size=384, dual_attention_layers=tuple(range(13)), qk_norm="rms_norm",
)
VAE = dict(
    block_out_channels=(128, 256, 512, 512), down_block_types=("DownEncoderBlock2D",) * 4, layers_per_block=2,
    up_block_types=("UpDecoderBlock2D",) * 4, latent_channels=16, norm_num_groups=32, sample_size=1024,
    scaling_factor=1.5305, shift_factor=0.0609, use_quant_conv=False, use_post_quant_conv=False,
)
TINY_TRANSFORMER = dict(
    TRANSFORMER, num_layers=2, num_attention_heads=1, joint_attention_dim=16, caption_projection_dim=64,
    pooled_projection_dim=8, pos_embed_max_size=64, dual_attention_layers=(0,),
)
TINY_VAE = dict(VAE, block_out_channels=(8, 8, 8, 8), norm_num_groups=4)
TEXTS, TOKENS = 64, 333


class Brightness(torch.nn.Module):
    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return images.mean(dim=[1, 2, 3])


class LatentBrightness(torch.nn.Module):
    def forward(self, latents: torch.Tensor) -> torch.Tensor:
        return latents.mean(dim=[1, 2, 3, 4])


def write_wan(folder):
    """diffusers' own defaults are the 14B model and its autoencoder."""
    torch.manual_seed(0)
    with torch.device("cuda"):
        torch.set_default_dtype(torch.bfloat16)
        WanTransformer3DModel().save_pretrained(folder / "transformer")
        AutoencoderKLWan().save_pretrained(folder / "vae")
        texts = {"prompt_embeds": torch.randn(TEXTS, 512, 4096).cpu()}
    scheduler = UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=5.0)
    scheduler.save_pretrained(folder / "scheduler")
    save_file(texts, folder / "prompts.safetensors")
    torch.jit.script(LatentBrightness()).save(str(folder / "scorer.pt"))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--wan", action="store_true")
    args = parser.parse_args()
    if args.wan:
        return write_wan(args.folder)
    shape, vae = (TINY_TRANSFORMER, TINY_VAE) if args.tiny else (TRANSFORMER, VAE)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    with torch.device(device):
        transformer = SD3Transformer2DModel(**shape).to(torch.bfloat16)
        decoder = AutoencoderKL(**vae).to(torch.bfloat16)
        context, width = torch.randn(TEXTS + 1, TOKENS, shape["joint_attention_dim"]), shape["pooled_projection_dim"]
        pooled = torch.randn(TEXTS + 1, width)
    transformer.save_pretrained(args.folder / "transformer", max_shard_size="100GB")
    decoder.save_pretrained(args.folder / "vae")
    FlowMatchEulerDiscreteScheduler(shift=3.0).save_pretrained(args.folder / "scheduler")
    texts = {"prompt_embeds": context[1:], "negative_prompt_embeds": context[:1]}
    texts |= {"pooled_prompt_embeds": pooled[1:], "negative_pooled_prompt_embeds": pooled[:1]}
    texts = {name: tensor.to(torch.bfloat16).cpu().contiguous() for name, tensor in texts.items()}
    save_file(texts, args.folder / "prompts.safetensors")
    torch.jit.script(Brightness()).save(str(args.folder / "scorer.pt"))
    (args.folder / "model_index.json").write_text(json.dumps({"_class_name": "StableDiffusion3Pipeline"}))


if __name__ == "__main__":
    main()
