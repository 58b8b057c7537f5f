"""Writes tests/golden/clip/: two tiny CLIPs as `transformers` saves them, what they say of images and texts, and gradients.

    python tests/python/make_clip_golden.py

Needs torch, transformers, tokenizers and safetensors. Weights are random, all of them, so that no part is silent. The texts'
tokens are those of the folder's tokenizer. Images are scaled as torchvision's `Resize` and `CenterCrop` do, antialiased.
"""

from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import CLIPConfig, CLIPModel, PreTrainedTokenizerFast

OUT = Path(__file__).parent.parent / "golden" / "clip"
WORDS = ["[start]", "a", "red", "blue", "cat", "dog", "on", "0", "1", "2", "3", "?", "[end]"]
TEXTS = ["a red cat", "a dog on a blue cat", "2"]
SIDE = 8
MEAN, DEVIATION = (0.5, 0.4, 0.3), (0.2, 0.3, 0.25)
# (height, width): cut above and below, cut on both sides, made larger.
SIZES = [(16, 12), (11, 16), (5, 5)]
KINDS = {
    "plain": dict(hidden_act="gelu", eos=len(WORDS) - 1),
    # The first CLIPs' configurations name a token that does not end a text.
    "first": dict(hidden_act="quick_gelu", eos=2),
}


def tokenizer():
    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="?"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    ends = [("[start]", 0), ("[end]", len(WORDS) - 1)]
    words.post_processor = processors.TemplateProcessing(single="[start] $A [end]", special_tokens=ends)
    return PreTrainedTokenizerFast(tokenizer_object=words, bos_token="[start]", eos_token="[end]", pad_token="[end]")


def model(hidden_act, eos):
    torch.manual_seed(0)
    tower = dict(intermediate_size=20, num_hidden_layers=2, num_attention_heads=2, hidden_act=hidden_act)
    config = CLIPConfig(
        text_config=dict(tower, hidden_size=12, vocab_size=len(WORDS), max_position_embeddings=9, eos_token_id=eos,
                         bos_token_id=0, pad_token_id=1),
        vision_config=dict(tower, hidden_size=16, image_size=SIDE, patch_size=4),
        projection_dim=6,
    )
    made = CLIPModel(config).eval()
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    return made


def pixels(images):
    height, width = images.shape[-2:]
    short = min(height, width)
    size = [height * SIDE // short, width * SIDE // short]
    scaled = torch.nn.functional.interpolate(images, size, mode="bicubic", antialias=True)
    top, left = (size[0] - SIDE) // 2, (size[1] - SIDE) // 2
    scaled = scaled[..., top:top + SIDE, left:left + SIDE]
    mean, deviation = (torch.tensor(of).view(3, 1, 1) for of in (MEAN, DEVIATION))
    return (scaled - mean) / deviation


def golden(made, texts):
    tensors = {}
    for number, text in enumerate(texts):
        tokens = torch.tensor([text])
        said = made.get_text_features(input_ids=tokens)
        said = getattr(said, "pooler_output", said)
        tensors[f"tokens.{number}"] = tokens[0]
        tensors[f"text.{number}"] = said[0] / said.norm()
        images = torch.rand(2, 3, *SIZES[number]).requires_grad_()
        seen = made.get_image_features(pixel_values=pixels(images))
        seen = getattr(seen, "pooler_output", seen)
        seen = seen / seen.norm(dim=-1, keepdim=True)
        cosines = seen @ tensors[f"text.{number}"]
        (gradient,) = torch.autograd.grad(cosines.sum(), images)
        tensors |= {f"images.{number}": images, f"seen.{number}": seen, f"cosines.{number}": cosines,
                    f"gradient.{number}": gradient}
    return {name: tensor.detach().contiguous() for name, tensor in tensors.items()}


def main():
    for name, kind in KINDS.items():
        folder, words, made = OUT / name, tokenizer(), model(**kind)
        made.save_pretrained(folder)
        words.save_pretrained(folder)
        (folder / "preprocessor_config.json").write_text(
            f'{{"image_mean": {list(MEAN)}, "image_std": {list(DEVIATION)}}}\n'
        )
        save_file(golden(made, words(TEXTS)["input_ids"]), folder / "golden.safetensors")


if __name__ == "__main__":
    main()
