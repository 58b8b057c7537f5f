"""Writes tests/golden/gguf/*: GGUF files with what llama.cpp's and the tokenizers' own packages make of them.

    python tests/python/make_gguf_golden.py

Needs gguf, numpy, safetensors, sentencepiece and tokenizers.

- `llama.gguf` is a tiny random Llama with tensors of every type that is read. `llama` is its folder in fp32: values are
  those of gguf's `dequantize`, and rows of queries and keys are put back by the inverse of llama.cpp's `permute`.
- `NAME.gguf` of the other names have a tokenizer, and an embedding alone. `tokens.json` has the ids of texts by Python's
  `tokenizers` and `sentencepiece`.
- `llama3.gguf` has the factors of Llama 3.1's rotations in place of its numbers.
"""

import json
import math
from pathlib import Path

import gguf
import numpy as np
import sentencepiece
from gguf import GGMLQuantizationType as Type
from safetensors.numpy import save_file
from tokenizers import Regex, Tokenizer, normalizers, pre_tokenizers

ROOT = Path(__file__).parent.parent / "golden"
OUT = ROOT / "gguf"
LAYERS, HIDDEN, HEADS, KV_HEADS, WIDE, VOCAB = 3, 32, 4, 2, 256, 328
CONTEXT, THETA, EPSILON = 2048, 10000.0, 1e-5
# Types of a layer's tensors. The K types need rows of 256 values, which only the last has.
TYPES = {
    "attn_q": Type.Q4_0,
    "attn_k": Type.Q4_1,
    "attn_v": Type.Q5_0,
    "attn_output": Type.Q5_1,
    "ffn_gate": Type.F16,
    "ffn_up": Type.BF16,
}
LAST = [Type.Q4_K, Type.Q5_K, Type.Q6_K]
NAMES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
TEXTS = [
    "What is 12 + 34?",
    " It's\n\n  the   end. \t",
    "Grüße, 你好 \U0001f600 <|im_end|>",
    "e\u0301tude",
    "",
    "<|im_start|>user\nsort 314159<|im_end|>\n",
    "we'll've DON'T x=y**2;\r\n",
]
LLAMA3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
numbers = np.random.default_rng(0)


def permute(rows, heads):
    """llama.cpp's order of the rows of queries and keys, from convert_hf_to_gguf.py."""
    return rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def blocks(kind, rows):
    """Random blocks of a K type, whose scales give values of a usual size."""
    _, size = gguf.GGML_QUANT_SIZES[kind]
    data = numbers.integers(0, 256, (rows, size), dtype=np.uint8)
    scale = numbers.uniform(0.5, 1.0, (rows, 2)).astype(np.float16) * np.float16(2e-4)
    if kind == Type.Q6_K:
        data[:, -2:] = (scale[:, :1] / 8).astype(np.float16).view(np.uint8)
    else:
        data[:, :4] = scale.astype(np.float16).view(np.uint8)
    return data


def tensors():
    """Yields each tensor's names in the file and in the folder, its type, and its data in the file."""
    random = lambda *shape: (numbers.standard_normal(shape) * 0.3).astype(np.float32)
    norm = lambda: (1 + random(HIDDEN)).astype(np.float32)
    yield "token_embd.weight", "model.embed_tokens.weight", Type.Q8_0, random(VOCAB, HIDDEN)
    yield "output_norm.weight", "model.norm.weight", Type.F32, norm()
    for layer in range(LAYERS):
        ours, theirs = f"blk.{layer}.", f"model.layers.{layer}."
        yield ours + "attn_norm.weight", theirs + "input_layernorm.weight", Type.F32, norm()
        yield ours + "ffn_norm.weight", theirs + "post_attention_layernorm.weight", Type.F32, norm()
        kv = HIDDEN // HEADS * KV_HEADS
        shapes = {"attn_k": (kv, HIDDEN), "attn_v": (kv, HIDDEN), "ffn_gate": (WIDE, HIDDEN), "ffn_up": (WIDE, HIDDEN)}
        for part, kind in TYPES.items():
            name = f"{theirs}{NAMES[part]}.weight"
            yield f"{ours}{part}.weight", name, kind, random(*shapes.get(part, (HIDDEN, HIDDEN)))
        yield f"{ours}ffn_down.weight", f"{theirs}{NAMES['ffn_down']}.weight", LAST[layer], None


def write_llama(vocabulary):
    writer = start(OUT / "llama.gguf", vocabulary, "qwen2")
    expected = {}
    for ours, theirs, kind, values in tensors():
        part = ours.split(".")[-2]
        heads = {"attn_q": HEADS, "attn_k": KV_HEADS}.get(part)
        if heads:
            values = permute(values, heads)
        data = blocks(kind, HIDDEN) if values is None else gguf.quants.quantize(values, kind)
        writer.add_tensor(ours, data, raw_dtype=kind)
        found = gguf.quants.dequantize(data, kind).astype(np.float32)
        if heads:
            order = permute(np.arange(len(found)), heads)
            back = np.empty_like(found)
            back[order] = found
            found = back
        expected[theirs] = found
    finish(writer)
    folder = OUT / "llama"
    folder.mkdir(exist_ok=True)
    save_file(expected, folder / "model.safetensors")
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "intermediate_size": WIDE,
        "hidden_act": "silu",
        "max_position_embeddings": CONTEXT,
        "rms_norm_eps": EPSILON,
        "rope_theta": THETA,
        "tie_word_embeddings": True,
        "eos_token_id": 321,
    }
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    for name in ["tokenizer.json", "tokenizer_config.json"]:
        (folder / name).write_bytes((ROOT / "tiny_model" / name).read_bytes())


def start(path, vocabulary, pre):
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(WIDE)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(EPSILON)
    writer.add_rope_freq_base(THETA)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    if pre is not None:
        tokens, merges = vocabulary
        # Rows without a token, as llama.cpp's script pads them.
        padding = [f"[PAD{row}]" for row in range(len(tokens), VOCAB)]
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(pre)
        writer.add_token_list(tokens + padding)
        writer.add_token_types([3 if token.startswith("<|im_") else 1 for token in tokens] + [5] * len(padding))
        writer.add_token_merges(merges)
        writer.add_bos_token_id(320)
        writer.add_eos_token_id(321)
        writer.add_pad_token_id(321)
        config = json.loads((ROOT / "tiny_model/tokenizer_config.json").read_text())
        writer.add_chat_template(config["chat_template"])
    return writer


def finish(writer):
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_tokenizers(whole, vocabulary):
    """Writes a file for each way to split words."""
    byte_level = lambda regex: pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=regex)
    split = lambda last: pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(LLAMA3), "isolated"), last])
    digits = pre_tokenizers.Digits(individual_digits=True)
    splitters = {
        "gpt-2": (byte_level(True), None),
        "smollm": (pre_tokenizers.Sequence([digits, byte_level(True)]), None),
        "llama-bpe": (split(byte_level(False)), None),
        "qwen2": (whole.pre_tokenizer, normalizers.NFC()),
    }
    found = {}
    for pre, (splitter, normalizer) in splitters.items():
        writer = start(OUT / f"{pre}.gguf", vocabulary, pre)
        writer.add_tensor("token_embd.weight", np.zeros((VOCAB, HIDDEN), np.float16))
        finish(writer)
        content = json.loads(whole.to_str())
        content["model"]["ignore_merges"] = pre == "llama-bpe"
        tokenizer = Tokenizer.from_str(json.dumps(content))
        tokenizer.pre_tokenizer = splitter
        if normalizer:
            tokenizer.normalizer = normalizer
        # Llama 3 begins each text with its first token.
        first = [320] if pre == "llama-bpe" else []
        found[pre] = [{"text": text, "ids": first + tokenizer.encode(text).ids} for text in TEXTS]
    return found


def write_sentence_pieces():
    """Writes the file of a SentencePiece model, trained on this script."""
    model = OUT / "spm"
    sentencepiece.SentencePieceTrainer.train(
        input=__file__,
        model_prefix=str(model),
        vocab_size=420,
        model_type="bpe",
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        split_digits=True,
        max_sentence_length=10000,
        minloglevel=2,
    )
    processor = sentencepiece.SentencePieceProcessor(model_file=f"{model}.model")
    for ending in ["model", "vocab"]:
        model.with_suffix(f".{ending}").unlink()
    ids = range(processor.vocab_size())
    kinds = [2 if processor.is_unknown(id) else 3 if processor.is_control(id) else 6 if processor.is_byte(id) else 1 for id in ids]
    writer = start(OUT / "spm.gguf", None, None)
    writer.add_tokenizer_model("llama")
    writer.add_token_list([processor.id_to_piece(id) for id in ids])
    writer.add_token_scores([processor.get_score(id) for id in ids])
    writer.add_token_types(kinds)
    writer.add_unk_token_id(processor.unk_id())
    writer.add_bos_token_id(processor.bos_id())
    writer.add_eos_token_id(processor.eos_id())
    writer.add_tensor("token_embd.weight", np.zeros((len(ids), HIDDEN), np.float16))
    finish(writer)
    encode = lambda text: processor.encode(text, add_bos=True)
    return [{"text": text, "ids": encode(text), "decoded": processor.decode(encode(text))} for text in TEXTS]


def write_llama3(vocabulary):
    """Writes the factors that convert_hf_to_gguf.py computes for Llama 3.1."""
    factor, low, high, original = 8.0, 1.0, 4.0, 8192
    factors = []
    for index in range(0, HIDDEN // HEADS, 2):
        wavelength = 2 * math.pi * 500000.0 ** (index / (HIDDEN // HEADS))
        if wavelength < original / high:
            factors.append(1)
        elif wavelength > original / low:
            factors.append(factor)
        else:
            smooth = (original / wavelength - low) / (high - low)
            factors.append(1 / ((1 - smooth) / factor + smooth))
    writer = start(OUT / "llama3.gguf", vocabulary, "llama-bpe")
    # The last value of a key is written.
    writer.kv_data[0]["llama.rope.freq_base"].value = 500000.0
    writer.add_tensor("token_embd.weight", np.zeros((VOCAB, HIDDEN), np.float16))
    writer.add_tensor("rope_freqs.weight", np.array(factors, np.float32))
    finish(writer)


def main():
    OUT.mkdir(exist_ok=True)
    whole = Tokenizer.from_file(str(ROOT / "tiny_model/tokenizer.json"))
    ids = whole.get_vocab()
    content = json.loads(whole.to_str())["model"]
    vocabulary = (sorted(ids, key=ids.get), [" ".join(merge) for merge in content["merges"]])
    write_llama(vocabulary)
    write_llama3(vocabulary)
    found = write_tokenizers(whole, vocabulary)
    found["spm"] = write_sentence_pieces()
    (OUT / "tokens.json").write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
