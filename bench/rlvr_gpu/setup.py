"""Writes what both programs read: `setup.py FOLDER --size 1.5b --prompt-tokens 128`.

A decoder of Qwen2.5's shape (`30b-a3b`: of Qwen3's mixture) with random weights in bf16, a tokenizer of as many words as
it has tokens, and prompts of so many of them. Wants torch and transformers.
"""

import argparse
import concurrent.futures
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
    "tiny-large": dict(hidden_size=64, intermediate_size=176, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2),
    "tiny-mixture": dict(hidden_size=64, num_hidden_layers=2, num_attention_heads=4, moe_intermediate_size=32),
    "0.5b": dict(hidden_size=896, intermediate_size=4864, num_hidden_layers=24, num_attention_heads=14),
    "1.5b": dict(hidden_size=1536, intermediate_size=8960, num_hidden_layers=28, num_attention_heads=12),
    "7b": dict(hidden_size=3584, intermediate_size=18944, num_hidden_layers=28, num_attention_heads=28, num_key_value_heads=4),
    "14b": dict(hidden_size=5120, intermediate_size=13824, num_hidden_layers=48, num_attention_heads=40, num_key_value_heads=8),
    "32b": dict(hidden_size=5120, intermediate_size=27648, num_hidden_layers=64, num_attention_heads=40, num_key_value_heads=8),
    "30b-a3b": dict(hidden_size=2048, num_hidden_layers=48, num_attention_heads=32, moe_intermediate_size=768),
}
OF_MIXTURES = dict(num_experts=128, num_experts_per_tok=8, norm_topk_prob=True, head_dim=128, intermediate_size=6144)


def layer_shapes(config):
    """Of each tensor of a layer, by its name behind `model.layers.N.`."""
    hidden, dim = config.hidden_size, getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    queries, keys = config.num_attention_heads * dim, config.num_key_value_heads * dim
    projections = {"q_proj": (queries, hidden), "k_proj": (keys, hidden), "v_proj": (keys, hidden)}
    shapes = {f"self_attn.{name}.weight": shape for name, shape in projections.items()}
    shapes |= {"self_attn.o_proj.weight": (hidden, queries)}
    shapes |= {"input_layernorm.weight": (hidden,), "post_attention_layernorm.weight": (hidden,)}
    if isinstance(config, transformers.Qwen3MoeConfig):
        width, parts = config.moe_intermediate_size, [f"experts.{number}." for number in range(OF_MIXTURES["num_experts"])]
        shapes |= {"self_attn.q_norm.weight": (dim,), "self_attn.k_norm.weight": (dim,)}
        shapes |= {"mlp.gate.weight": (OF_MIXTURES["num_experts"], hidden)}
    else:
        width, parts = config.intermediate_size, [""]
        shapes |= {f"self_attn.{name}.bias": shape[:1] for name, shape in projections.items()}
    gated = {"gate_proj": (width, hidden), "up_proj": (width, hidden), "down_proj": (hidden, width)}
    return shapes | {f"mlp.{part}{name}.weight": shape for part in parts for name, shape in gated.items()}


def write_by_layers(config, folder):
    """As `save_pretrained` does, a layer at a time, since a whole model and what it is made from do not fit on a GPU."""
    ends = {"model.embed_tokens.weight": (config.vocab_size, config.hidden_size), "model.norm.weight": (config.hidden_size,)}
    ends |= {"lm_head.weight": ends["model.embed_tokens.weight"]}
    of_layers = range(config.num_hidden_layers)
    files = [ends] + [{f"model.layers.{n}.{name}": it for name, it in layer_shapes(config).items()} for n in of_layers]
    config.save_pretrained(folder)
    names = [f"model-{number:05}-of-{len(files) - 1:05}.safetensors" for number in range(len(files))]

    made_as = dict(dtype=torch.bfloat16, device="cuda" if torch.cuda.is_available() else "cpu")

    def write(name, shapes):
        made = {at: torch.ones(it, **made_as) if len(it) == 1 else 0.02 * torch.randn(it, **made_as) for at, it in shapes.items()}
        save_file(made, folder / name, metadata={"format": "pt"})

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        list(pool.map(write, names, files))
    weight_map = {at: name for name, shapes in zip(names, files) for at in shapes}
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
    is_large = "moe_intermediate_size" in shape or "num_key_value_heads" in shape
    if "moe_intermediate_size" in shape:
        config = transformers.Qwen3MoeConfig(
            num_key_value_heads=4, tie_word_embeddings=False, architectures=["Qwen3MoeForCausalLM"], **shape, **OF_MIXTURES
        )
    else:
        shape = dict(num_key_value_heads=2, tie_word_embeddings=not is_large) | shape
        config = transformers.Qwen2Config(architectures=["Qwen2ForCausalLM"], **shape)
    torch.manual_seed(0)
    if is_large:
        write_by_layers(config, arguments.folder)
    else:
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
