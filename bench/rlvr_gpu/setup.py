"""Writes what both programs read: `setup.py FOLDER --size 1.5b --prompt-tokens 128`.

A decoder of Qwen2.5's shape with random weights in bf16, a tokenizer of as many words as it has tokens, and prompts of
so many of them. Wants torch and transformers.
"""

import argparse
import json
import pathlib
import random

import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers

PROMPTS = 2048
SHAPES = {
    "tiny": dict(hidden_size=64, intermediate_size=176, num_hidden_layers=2, num_attention_heads=4),
    "0.5b": dict(hidden_size=896, intermediate_size=4864, num_hidden_layers=24, num_attention_heads=14),
    "1.5b": dict(hidden_size=1536, intermediate_size=8960, num_hidden_layers=28, num_attention_heads=12),
}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--size", default="1.5b", choices=SHAPES)
    parser.add_argument("--prompt-tokens", type=int, default=128)
    arguments = parser.parse_args()
    vocabulary = 1024 if arguments.size == "tiny" else 151936
    config = transformers.Qwen2Config(
        vocab_size=vocabulary,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=0,
        **SHAPES[arguments.size],
    )
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    model.to(torch.bfloat16).save_pretrained(arguments.folder)
    # No special token may begin a word: it would be found inside of it.
    names = ["<end>", "<pad>", *(f"w{i}" for i in range(2, vocabulary))]
    words = Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="<pad>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<end>", pad_token="<pad>")
    fast.save_pretrained(arguments.folder)
    draw = random.Random(0)
    with open(arguments.folder / "prompts.jsonl", "w") as file:
        for _ in range(PROMPTS):
            prompt = " ".join(f"w{draw.randrange(2, vocabulary)}" for _ in range(arguments.prompt_tokens))
            file.write(json.dumps({"prompt": prompt, "answer": ""}) + "\n")


if __name__ == "__main__":
    main()
