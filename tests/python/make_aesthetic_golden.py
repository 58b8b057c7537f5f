"""Writes tests/golden/aesthetic/: a head of linear layers, what it says of images that tests/golden/clip/plain sees, and
gradients.

    python tests/python/make_aesthetic_golden.py

Needs torch, transformers, tokenizers and safetensors. The head is built, and read from an image's vector, as LAION's
`improved-aesthetic-predictor` does it. Its layers have numbers of one and of two digits.
"""

from pathlib import Path

import torch
from make_clip_golden import OUT as CLIP
from make_clip_golden import SIZES, pixels
from safetensors.torch import save_file
from torch import nn
from transformers import CLIPModel

OUT = Path(__file__).parent.parent / "golden" / "aesthetic"


class Predictor(nn.Module):
    def __init__(self, width):
        super().__init__()
        dropouts = [nn.Dropout(0.2) for _ in range(7)]
        self.layers = nn.Sequential(
            nn.Linear(width, 10), nn.Dropout(0.2), nn.Linear(10, 5), *dropouts, nn.Linear(5, 4), nn.Linear(4, 1)
        )

    def forward(self, vectors):
        return self.layers(vectors)


def golden(clip, predictor):
    tensors = {}
    for number, size in enumerate(SIZES):
        images = torch.rand(2, 3, *size).requires_grad_()
        seen = clip.get_image_features(pixel_values=pixels(images))
        seen = getattr(seen, "pooler_output", seen)
        scores = predictor(seen / seen.norm(dim=-1, keepdim=True)).squeeze(1)
        (gradient,) = torch.autograd.grad(scores.sum(), images)
        tensors |= {f"images.{number}": images, f"scores.{number}": scores, f"gradient.{number}": gradient}
    return {name: tensor.detach().contiguous() for name, tensor in tensors.items()}


def main():
    clip = CLIPModel.from_pretrained(CLIP / "plain").eval()
    torch.manual_seed(0)
    predictor = Predictor(clip.config.projection_dim).eval()
    for parameter in predictor.parameters():
        nn.init.normal_(parameter, std=0.7)
    OUT.mkdir(exist_ok=True)
    save_file(predictor.state_dict(), OUT / "head.safetensors")
    save_file(golden(clip, predictor), OUT / "golden.safetensors")


if __name__ == "__main__":
    main()
