"""Says how far a pipeline with the adapters of a folder is from one whose transformers have them merged.

usage: python lora_of_diffusers.py MODEL ADAPTER MERGED      # folders; diffusers 0.42 and PEFT 0.21

MODEL was trained from, ADAPTER and MERGED are what `anyroll export --dtype fp32`, with and without `--adapter`, made of the run.
"""

import json
import sys
from pathlib import Path

import torch
from diffusers import SD3Transformer2DModel, StableDiffusion3Pipeline, WanPipeline, WanTransformer3DModel


def stable_diffusion(folder):
    transformer = SD3Transformer2DModel.from_pretrained(folder / "transformer")
    config = transformer.config
    inputs = {
        "hidden_states": torch.randn(2, config.in_channels, config.sample_size, config.sample_size),
        "encoder_hidden_states": torch.randn(2, 5, config.joint_attention_dim),
        "pooled_projections": torch.randn(2, config.pooled_projection_dim),
        "timestep": torch.tensor([900.0, 100.0]),
    }
    nothing = dict.fromkeys(
        ["scheduler", "vae", "text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2", "text_encoder_3", "tokenizer_3"]
    )
    return StableDiffusion3Pipeline(transformer=transformer, **nothing), inputs


def wan(folder):
    names = [name for name in ("transformer", "transformer_2") if (folder / name).exists()]
    transformers = {name: WanTransformer3DModel.from_pretrained(folder / name) for name in names}
    config = transformers["transformer"].config
    inputs = {
        "hidden_states": torch.randn(2, config.in_channels, 2, 4, 4),
        "encoder_hidden_states": torch.randn(2, 5, config.text_dim),
        "timestep": torch.tensor([900.0, 100.0]),
    }
    pipe = WanPipeline(tokenizer=None, text_encoder=None, vae=None, scheduler=None, boundary_ratio=0.5, **transformers)
    return pipe, inputs


def main():
    model, adapter, merged = map(Path, sys.argv[1:])
    kind = json.loads((model / "transformer" / "config.json").read_text())["_class_name"]
    opened = {"SD3Transformer2DModel": stable_diffusion, "WanTransformer3DModel": wan}[kind]
    torch.manual_seed(0)
    pipe, inputs = opened(model)
    whole, _ = opened(merged)
    is_pair = (model / "transformer_2").exists()
    for name in ["transformer", "transformer_2"] if is_pair else ["transformer"]:
        own = adapter / name if is_pair else adapter
        if not own.exists():
            print(f"{name} has no adapters")
            continue
        with torch.no_grad():
            before = getattr(pipe, name)(**inputs).sample
            pipe.load_lora_weights(own, **({"load_into_transformer_2": True} if name == "transformer_2" else {}))
            loaded = getattr(pipe, name)(**inputs).sample
            expected = getattr(whole, name)(**inputs).sample
        print(f"adapters move {name} by", (loaded - before).abs().max().item())
        print("and it differs from the merged one by", (loaded - expected).abs().max().item())


if __name__ == "__main__":
    main()
