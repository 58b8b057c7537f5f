"""Writes tests/golden/text_encoders/: the tiny text encoders and tokenizers of a Stable Diffusion 3 and of a Wan, as diffusers
publishes them, and what `transformers` and diffusers' pipelines make of texts.

    python tests/python/make_text_encoder_golden.py

Needs torch, transformers, diffusers, tokenizers, ftfy and safetensors. Weights are random, all of them, so that no part is
silent. Widths are those of tests/golden/tiny_sd3 and tiny_wan. CLIP's tokenizers are `vocab.json` and `merges.txt`, as Stable
Diffusion 3 has them. T5 is in several files, UMT5 in bf16.
"""

import json
import shutil
from pathlib import Path

import torch
from diffusers import SD3Transformer2DModel, StableDiffusion3Pipeline, WanPipeline
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import (
    CLIPTextConfig,
    CLIPTextModelWithProjection,
    CLIPTokenizer,
    PreTrainedTokenizerFast,
    T5Config,
    T5EncoderModel,
    UMT5Config,
    UMT5EncoderModel,
)

GOLDEN = Path(__file__).parent.parent / "golden"
OUT = GOLDEN / "text_encoders"
CLIP_TOKENS, TOKENS = 12, 16
START, END = "<|startoftext|>", "<|endoftext|>"
TEXTS = [
    "a red cat",
    "A  DOG on\ta blue cat's 42nd roof, isn't it?",
    "a red dog on a blue cat on a red dog on a blue cat on a red dog on a blue cat on a red dog on a blue cat",
    "naïve café: 猫 🐱 Ⅻ½ --- we'll've",
    "wow! a cat!!",
    "",
]
NEGATIVE = "blue dog"
# A text for each encoder, and how many of a CLIP's last layers are skipped besides the last.
TEXTS_APART = [("a red cat", "a dog", "blue"), ("a dog", "a dog", "a dog"), ("", "a red cat on a blue dog", "the cat")]
NEGATIVES_APART = ("blue dog", "red", "a cat")
CLIP_SKIP = 1
# Cleaned before they are read. What ftfy makes of them is made here as well.
WAN_TEXTS = [
    "a red cat &amp; a blue dog",
    "  a \u201cred\u201d\u3000cat\u2019s \n dog &amp;lt;b&amp;gt; ",
    "&quot&eacute;&#39;&#x72;ed&notit;",
    "a red dog on a blue cat on a red dog on a blue cat on a red dog on a blue cat on a red dog on a blue cat",
    "",
]


def randomize(model, std):
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=std)
    return model.eval()


def byte_symbols():
    """The 256 characters that GPT-2's code, and CLIP's, writes bytes as."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    return [chr(byte) for byte in plain] + [chr(256 + number) for number in range(len(others))]


def clip_tokenizer(folder, pad):
    merges = ["r e", "re d</w>", "c a", "ca t</w>", "d o", "do g</w>", "b l", "u e</w>", "bl ue</w>", "' s</w>", "o n</w>"]
    symbols = byte_symbols()
    vocab = symbols + [symbol + "</w>" for symbol in symbols] + [merge.replace(" ", "") for merge in merges]
    folder.mkdir(parents=True)
    words = {word: number for number, word in enumerate([*vocab, START, END])}
    (folder / "vocab.json").write_text(json.dumps(words, ensure_ascii=False))
    (folder / "merges.txt").write_text("#version: 0.2\n" + "".join(merge + "\n" for merge in merges))
    named = {"bos_token": START, "eos_token": END, "unk_token": END, "pad_token": pad}
    config = {"tokenizer_class": "CLIPTokenizer", "model_max_length": CLIP_TOKENS, **named}
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    return CLIPTokenizer.from_pretrained(folder)


def clip(folder, tokenizer, hidden_act, hidden, projection, eos):
    config = CLIPTextConfig(
        vocab_size=len(tokenizer), hidden_size=hidden, intermediate_size=10, projection_dim=projection,
        num_hidden_layers=3, num_attention_heads=2, max_position_embeddings=CLIP_TOKENS, hidden_act=hidden_act,
        eos_token_id=eos, bos_token_id=0, pad_token_id=1,
    )
    model = randomize(CLIPTextModelWithProjection(config), 0.4)
    model.save_pretrained(folder)
    return model


def pieces_tokenizer(folder):
    """A Unigram model that knows some words, and all letters of the texts."""
    words = ["▁red", "▁cat", "▁dog", "▁blue", "▁on", "▁a", "▁the", "ed", "at"]
    letters = sorted(set("▁abcdefghijklmnopqrstuvwxyz0123456789&;<>#,.'\"é?"))
    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0)]
    pieces += [(word, -2.0 - number / 8) for number, word in enumerate(words)]
    pieces += [(letter, -5.0 - number / 16) for number, letter in enumerate(letters)]
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=2))
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace(prepend_scheme="always")]
    )
    tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    made = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="</s>", unk_token="<unk>", pad_token="<pad>", model_max_length=512
    )
    # Published files say what was last asked of them, which is not what is asked here.
    made(["a"], padding="max_length", max_length=7, truncation=True)
    made.save_pretrained(folder)
    return made


def t5(config_class, model_class, tokenizer, d_model):
    config = config_class(
        vocab_size=len(tokenizer) + 3, d_model=d_model, d_kv=4, d_ff=10, num_layers=3, num_heads=2,
        relative_attention_num_buckets=8, relative_attention_max_distance=11, feed_forward_proj="gated-gelu",
    )
    return randomize(model_class(config), 0.4)


def write_sd3():
    out = OUT / "sd3"
    torch.manual_seed(0)
    tokenizers = [clip_tokenizer(out / "tokenizer", END), clip_tokenizer(out / "tokenizer_2", "!")]
    clips = [
        clip(out / "text_encoder", tokenizers[0], "quick_gelu", 4, 3, 2),
        clip(out / "text_encoder_2", tokenizers[1], "gelu", 6, 7, len(tokenizers[1]) - 1),
    ]
    pieces = pieces_tokenizer(out / "tokenizer_3")
    encoder = t5(T5Config, T5EncoderModel, pieces, 12)
    encoder.save_pretrained(out / "text_encoder_3", max_shard_size="3KB")
    tensors = {}
    for number, (tokenizer, model) in enumerate(zip(tokenizers, clips)):
        tokens = tokenizer(TEXTS, padding="max_length", truncation=True, return_tensors="pt").input_ids
        said = model(tokens, output_hidden_states=True)
        tensors |= {f"clip.{number}.tokens": tokens, f"clip.{number}.hidden": said.hidden_states[-2],
                    f"clip.{number}.pooled": said.text_embeds}
    tokens = pieces(TEXTS, padding="max_length", max_length=TOKENS, truncation=True, return_tensors="pt").input_ids
    tensors |= {"t5.tokens": tokens, "t5.hidden": encoder(tokens).last_hidden_state}
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, out / "encoders.safetensors")

    transformer = SD3Transformer2DModel.from_pretrained(GOLDEN / "tiny_sd3" / "model" / "transformer")
    parts = dict(
        transformer=transformer, vae=None, scheduler=None, text_encoder=clips[0], tokenizer=tokenizers[0],
        text_encoder_2=clips[1], tokenizer_2=tokenizers[1],
    )
    write_texts(out / "texts.jsonl", TEXTS)
    for name, third in [("prompts", encoder), ("prompts_without_t5", None)]:
        pipeline = StableDiffusion3Pipeline(
            **parts, text_encoder_3=third, tokenizer_3=pieces if third is not None else None
        )
        embeds, negative, pooled, negative_pooled = pipeline.encode_prompt(
            TEXTS, None, None, negative_prompt=NEGATIVE, device="cpu", max_sequence_length=TOKENS
        )
        tensors = {"prompt_embeds": embeds, "pooled_prompt_embeds": pooled,
                   "negative_prompt_embeds": negative[:1], "negative_pooled_prompt_embeds": negative_pooled[:1]}
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, out / f"{name}.safetensors")
    write_apart(StableDiffusion3Pipeline(**parts, text_encoder_3=encoder, tokenizer_3=pieces), out)


def write_apart(pipeline, out):
    """What is made of a text for each encoder, with `clip_skip`; the second has one for all."""
    lines = [{"prompt": one, "prompt_2": two, "prompt_3": three} for one, two, three in TEXTS_APART]
    lines[1] = {"prompt": TEXTS_APART[1][0], "prompt_3": None}
    (out / "texts_apart.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    texts = [list(texts) for texts in zip(*TEXTS_APART)]
    negatives = [[text] * len(TEXTS_APART) for text in NEGATIVES_APART]
    embeds, negative, pooled, negative_pooled = pipeline.encode_prompt(
        *texts, negative_prompt=negatives[0], negative_prompt_2=negatives[1], negative_prompt_3=negatives[2],
        device="cpu", max_sequence_length=TOKENS, clip_skip=CLIP_SKIP,
    )
    tensors = {"prompt_embeds": embeds, "pooled_prompt_embeds": pooled,
               "negative_prompt_embeds": negative[:1], "negative_pooled_prompt_embeds": negative_pooled[:1]}
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, out / "prompts_apart.safetensors")


def write_wan():
    out = OUT / "wan"
    torch.manual_seed(1)
    pieces = pieces_tokenizer(out / "tokenizer")
    t5(UMT5Config, UMT5EncoderModel, pieces, 6).to(torch.bfloat16).save_pretrained(out / "text_encoder")
    encoder = UMT5EncoderModel.from_pretrained(out / "text_encoder", dtype=torch.float32).eval()
    asked = pieces(WAN_TEXTS, padding="max_length", max_length=TOKENS, truncation=True, return_tensors="pt")
    tokens, mask = asked.input_ids, asked.attention_mask
    hidden = encoder(tokens, mask).last_hidden_state * mask[..., None]
    save_file({"tokens": tokens, "lengths": mask.sum(dim=1), "hidden": hidden}, out / "encoders.safetensors")
    pipeline = WanPipeline(tokenizer=pieces, text_encoder=encoder, vae=None, scheduler=None, transformer=None)
    embeds, negative = pipeline.encode_prompt(
        WAN_TEXTS, negative_prompt=NEGATIVE, device="cpu", max_sequence_length=TOKENS
    )
    write_texts(out / "texts.jsonl", WAN_TEXTS)
    save_file({"prompt_embeds": embeds, "negative_prompt_embeds": negative[:1].contiguous()}, out / "prompts.safetensors")


def write_texts(path, texts):
    path.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))


def main():
    shutil.rmtree(OUT, ignore_errors=True)
    with torch.no_grad():
        write_sd3()
        write_wan()


if __name__ == "__main__":
    main()
