"""What the scripts that write golden files of tiny models have in common."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file


def write(folder, configs, golden):
    """Writes to tests/golden/`folder` a file NAME.safetensors for each of `configs`, with the tensors that `golden` makes of
    it, and the configs themselves."""
    out = Path(__file__).parent.parent / "golden" / folder
    out.mkdir(parents=True, exist_ok=True)
    for name, config in configs.items():
        tensors = {key: tensor.detach().contiguous() for key, tensor in golden(config).items()}
        save_file(tensors, out / f"{name}.safetensors")
    (out / "configs.json").write_text(json.dumps(configs, indent=1) + "\n")


def of_decoder(model, latents, output, gradients=False):
    """What a file has of an autoencoder's decoder: `latents`, the `output` made of them, a gradient of that and theirs, and its
    weights, with their `gradients` if these are asked for."""
    wanted = torch.randn_like(output)
    (output * wanted).sum().backward()
    tensors = {"latents": latents, "output": output, "d_output": wanted, "grad.latents": latents.grad}
    for name, parameter in model.named_parameters():
        if name.startswith(("decoder.", "post_quant_conv.")):
            tensors[name] = parameter
            if gradients:
                tensors[f"grad.{name}"] = parameter.grad
    return tensors
