"""Writes tests/golden/tiny_wan/: a tiny Wan as diffusers publishes it, texts, and a network that scores latents.

    python tests/python/make_tiny_wan.py

Needs torch, diffusers and safetensors. Of the autoencoder there is the configuration alone.
"""

import json
import shutil
from pathlib import Path

import torch
from diffusers import UniPCMultistepScheduler, WanTransformer3DModel
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
    (OUT / "model" / "vae").mkdir()
    vae = {"_class_name": "AutoencoderKLWan", "scale_factor_temporal": 4, "scale_factor_spatial": 8}
    (OUT / "model" / "vae" / "config.json").write_text(json.dumps(vae, indent=1) + "\n")
    save_file({"prompt_embeds": torch.randn(TEXTS, TOKENS, WIDTH)}, OUT / "prompts.safetensors")
    torch.jit.script(Mean()).save(str(OUT / "scorer.pt"))


if __name__ == "__main__":
    main()
