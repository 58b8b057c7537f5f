"""Writes tests/golden/tiny_sd3/: a tiny Stable Diffusion 3.5 as diffusers publishes it, texts, and what it paints of them.

    python tests/python/make_tiny_sd3.py

Needs torch, diffusers and safetensors. The folder `model` is what `StableDiffusion3Pipeline.save_pretrained` writes, without
the text encoders; `prompts.safetensors` has what they would say, and `golden.safetensors` the noise, the latents and the
images of four guided denoising steps. Weights are random, all of them, so that no part is silent.
"""

import shutil
from pathlib import Path

import torch
from diffusers import (
    AutoencoderKL,
    FlowMatchEulerDiscreteScheduler,
    SD3Transformer2DModel,
    StableDiffusion3Pipeline,
)
from safetensors.torch import save_file

OUT = Path(__file__).parent.parent / "golden" / "tiny_sd3"
TEXTS, TOKENS, WIDTH, POOLED = 4, 3, 12, 10
STEPS, GUIDANCE, SIDE = 4, 2.5, 16


def model():
    torch.manual_seed(0)
    transformer = SD3Transformer2DModel(
        sample_size=8, patch_size=2, in_channels=4, out_channels=4, num_layers=2, attention_head_dim=8,
        num_attention_heads=2, joint_attention_dim=WIDTH, caption_projection_dim=16, pooled_projection_dim=POOLED,
        pos_embed_max_size=8, dual_attention_layers=(0,), qk_norm="rms_norm",
    )
    vae = AutoencoderKL(
        block_out_channels=(4, 8), down_block_types=("DownEncoderBlock2D",) * 2, layers_per_block=1,
        up_block_types=("UpDecoderBlock2D",) * 2, latent_channels=4, norm_num_groups=2, sample_size=SIDE,
        scaling_factor=1.5305, shift_factor=0.0609, use_quant_conv=False, use_post_quant_conv=False,
    )
    for parameter in [*transformer.parameters(), *vae.parameters()]:
        torch.nn.init.normal_(parameter, std=0.2)
    return StableDiffusion3Pipeline(
        transformer=transformer, vae=vae, scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0), text_encoder=None,
        tokenizer=None, text_encoder_2=None, tokenizer_2=None, text_encoder_3=None, tokenizer_3=None,
    )


def main():
    shutil.rmtree(OUT, ignore_errors=True)
    pipeline = model()
    pipeline.save_pretrained(OUT / "model")
    texts = {
        "prompt_embeds": torch.randn(TEXTS, TOKENS, WIDTH),
        "pooled_prompt_embeds": torch.randn(TEXTS, POOLED),
        "negative_prompt_embeds": torch.randn(1, TOKENS, WIDTH),
        "negative_pooled_prompt_embeds": torch.randn(1, POOLED),
    }
    save_file(texts, OUT / "prompts.safetensors")
    noise = torch.randn(TEXTS, 4, SIDE // 2, SIDE // 2)
    arguments = dict(texts)
    for name in ["negative_prompt_embeds", "negative_pooled_prompt_embeds"]:
        arguments[name] = texts[name].expand(TEXTS, *texts[name].shape[1:])
    pipeline.set_progress_bar_config(disable=True)

    def paint(output_type):
        return pipeline(
            **arguments, latents=noise.clone(), num_inference_steps=STEPS, guidance_scale=GUIDANCE, height=SIDE,
            width=SIDE, output_type=output_type,
        ).images

    save_file({"noise": noise, "latents": paint("latent"), "images": paint("pt")}, OUT / "golden.safetensors")


if __name__ == "__main__":
    main()
