"""Writes tests/golden/tiny_wan/: a tiny Wan as diffusers publishes it, what its decoder makes of latents, texts, and a
network that scores latents.

    python tests/python/make_tiny_wan.py

Needs torch, diffusers and safetensors.
"""

import shutil
from pathlib import Path

import torch
from diffusers import AutoencoderKLWan, UniPCMultistepScheduler, WanTransformer3DModel
from safetensors.torch import save_file

OUT = Path(__file__).parent.parent / "golden" / "tiny_wan"
TEXTS, TOKENS, WIDTH = 4, 3, 6


class Mean(torch.nn.Module):
    """The latents' mean, where the first channel counts twice as much."""

    def forward(self, latents: torch.Tensor) -> torch.Tensor:
        return latents.mean(dim=[1, 2, 3, 4]) + latents[:, 0].mean(dim=[1, 2, 3])


def main():
    shutil.rmtree(OUT, ignore_errors=True)
    torch.manual_seed(0)
    transformer = WanTransformer3DModel(
        patch_size=(1, 2, 2), num_attention_heads=2, attention_head_dim=12, in_channels=4, out_channels=4,
        text_dim=WIDTH, freq_dim=16, ffn_dim=20, num_layers=2, rope_max_seq_len=32,
    )
    for parameter in transformer.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    transformer.save_pretrained(OUT / "model" / "transformer")
    scheduler = UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0)
    scheduler.save_pretrained(OUT / "model" / "scheduler")
    save_file({"prompt_embeds": torch.randn(TEXTS, TOKENS, WIDTH)}, OUT / "prompts.safetensors")
    torch.jit.script(Mean()).save(str(OUT / "scorer.pt"))
    write_vae()


def write_vae():
    torch.manual_seed(1)
    mean, std = [0.1, -0.2, 0.3, 0.0], [1.5, 0.8, 1.2, 1.0]
    vae = AutoencoderKLWan(
        base_dim=4, z_dim=4, dim_mult=[1, 1, 1, 1], num_res_blocks=1, temperal_downsample=[False, True, True],
        latents_mean=mean, latents_std=std,
    )
    for name, parameter in vae.named_parameters():
        # Biases keep the few channels away from 0, where a norm multiplies what rounding makes of them.
        torch.nn.init.normal_(parameter, mean=float(name.endswith("gamma")), std=0.5 if name.endswith("bias") else 0.16)
    vae.save_pretrained(OUT / "model" / "vae")
    latents = torch.randn(2, 4, 2, 2, 4)
    mean, std = (torch.tensor(values).view(1, 4, 1, 1, 1) for values in (mean, std))
    with torch.no_grad():
        videos = vae.double().decode((latents * std + mean).double()).sample.float()
    save_file({"latents": latents, "videos": videos.contiguous()}, OUT / "videos.safetensors")


if __name__ == "__main__":
    main()
