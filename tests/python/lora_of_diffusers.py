"""Says how far a pipeline with the adapters of a folder is from one whose transformer has them merged.

usage: python lora_of_diffusers.py MODEL ADAPTER MERGED      # folders; diffusers 0.42 and PEFT 0.21

MODEL was trained from, ADAPTER and MERGED are what `anyroll export`, with and without `--adapter`, made of the run.
"""

import sys

import torch
from diffusers import SD3Transformer2DModel, StableDiffusion3Pipeline

model, adapter, merged = sys.argv[1:]
plain = SD3Transformer2DModel.from_pretrained(f"{model}/transformer")
pipe = StableDiffusion3Pipeline(
    transformer=plain, scheduler=None, vae=None, text_encoder=None, tokenizer=None, text_encoder_2=None,
    tokenizer_2=None, text_encoder_3=None, tokenizer_3=None,
)
config = plain.config
torch.manual_seed(0)
inputs = {
    "hidden_states": torch.randn(2, config.in_channels, config.sample_size, config.sample_size),
    "encoder_hidden_states": torch.randn(2, 5, config.joint_attention_dim),
    "pooled_projections": torch.randn(2, config.pooled_projection_dim),
    "timestep": torch.tensor([900.0, 100.0]),
}
with torch.no_grad():
    before = pipe.transformer(**inputs).sample
    pipe.load_lora_weights(adapter)
    loaded = pipe.transformer(**inputs).sample
    whole = SD3Transformer2DModel.from_pretrained(f"{merged}/transformer")(**inputs).sample
print("adapters move it by", (loaded - before).abs().max().item())
print("and it differs from the merged one by", (loaded - whole).abs().max().item())
