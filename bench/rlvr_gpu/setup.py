"""Writes what both programs read: `setup.py FOLDER --size 1.5b --prompt-tokens 128`.

A decoder of Qwen2.5's shape (`30b-a3b`: of Qwen3's mixture) with random weights in bf16, a tokenizer of as many words as it has tokens, and prompts of
so many of them. Wants torch and transformers.
"""

import argparse
import json
import pathlib
import random

import torch
import transformers
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers

PROMPTS = 2048
SHAPES = {
    "tiny": dict(hidden_size=64, intermediate_size=176, num_hidden_layers=2, num_attention_heads=4),
    "tiny-mixture": dict(hidden_size=64, num_hidden_layers=2, num_attention_heads=4, moe_intermediate_size=32),
    "0.5b": dict(hidden_size=896, intermediate_size=4864, num_hidden_layers=24, num_attention_heads=14),
    "1.5b": dict(hidden_size=1536, intermediate_size=8960, num_hidden_layers=28, num_attention_heads=12),
    "30b-a3b": dict(hidden_size=2048, num_hidden_layers=48, num_attention_heads=32, moe_intermediate_size=768),
}
OF_MIXTURES = dict(num_experts=128, num_experts_per_tok=8, norm_topk_prob=True, head_dim=128, intermediate_size=6144)


def layer_shapes(config):
    """Of each tensor of a layer with experts, by its name behind `model.layers.N.`."""
    hidden, width, dim = config.hidden_size, config.moe_intermediate_size, config.head_dim
    queries, keys = config.num_attention_heads * dim, config.num_key_value_heads * dim
    attention = {"q_proj": (queries, hidden), "k_proj": (keys, hidden), "v_proj": (keys, hidden)}
    attention |= {"o_proj": (hidden, queries), "q_norm": (dim,), "k_norm": (dim,)}
    expert = {"gate_proj": (width, hidden), "up_proj": (width, hidden), "down_proj": (hidden, width)}
    shapes = {f"self_attn.{name}": shape for name, shape in attention.items()}
    shapes |= {"input_layernorm": (hidden,), "post_attention_layernorm": (hidden,), "mlp.gate": (OF_MIXTURES["num_experts"], hidden)}
    for number in range(OF_MIXTURES["num_experts"]):
        shapes |= {f"mlp.experts.{number}.{name}": shape for name, shape in expert.items()}
    return shapes


def write_mixture(config, folder):
    """As `save_pretrained` does, a layer at a time, since a whole model and what it is made from do not fit on a GPU."""
    ends = {"model.embed_tokens": (config.vocab_size, config.hidden_size), "model.norm": (config.hidden_size,)}
    ends |= {"lm_head": ends["model.embed_tokens"]}
    of_layers = range(config.num_hidden_layers)
    files = [ends] + [{f"model.layers.{n}.{name}": it for name, it in layer_shapes(config).items()} for n in of_layers]
    weight_map = {}
    config.architectures = ["Qwen3MoeForCausalLM"]
    config.save_pretrained(folder)
    for number, shapes in enumerate(files):
        file = f"model-{number:05}-of-{len(files) - 1:05}.safetensors"
        made = {f"{name}.weight": torch.ones(it) if len(it) == 1 else 0.02 * torch.randn(it) for name, it in shapes.items()}
        save_file(made, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(made, file)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--size", default="1.5b", choices=SHAPES)
    parser.add_argument("--prompt-tokens", type=int, default=128)
    arguments = parser.parse_args()
    vocabulary = 1024 if arguments.size.startswith("tiny") else 151936
    shape = SHAPES[arguments.size]
    shape |= dict(vocab_size=vocabulary, max_position_embeddings=4096, bos_token_id=None, eos_token_id=0)
    if "moe_intermediate_size" in shape:
        config = transformers.Qwen3MoeConfig(num_key_value_heads=4, tie_word_embeddings=False, **shape, **OF_MIXTURES)
    else:
        config = transformers.Qwen2Config(num_key_value_heads=2, tie_word_embeddings=True, **shape)
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        if "moe_intermediate_size" in shape:
            write_mixture(config, arguments.folder)
        else:
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
