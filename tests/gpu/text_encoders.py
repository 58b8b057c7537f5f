"""The text encoders of Stable Diffusion 3 and of Wan at their published size, by `anyroll embed` and by transformers.

    python3 tests/gpu/text_encoders.py [--anyroll target/release/anyroll] [--backend cuda] [--tiny]

Needs torch, transformers and safetensors. Weights are random, in bf16; the tokenizers are those of tests/golden, which know
some hundred tokens. For fp32 and for bf16 the largest difference to transformers in fp32 is printed, of values whose root mean
square is beside it, for bf16 that of transformers' own bf16 too, and the seconds of the command, most of which it reads
weights. Ends with 1 where fp32 is off by more than 1e-3, or bf16 by more than twice what transformers is. `--tiny` tries the
script where there is no GPU.
"""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from safetensors.torch import load_file
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

GOLDEN = Path(__file__).resolve().parents[1] / "golden"
TEXTS = ["a red cat", "a blue dog on a red cat", "wow! a cat!!", "a red dog on a blue cat on a red dog on a blue cat", ""]
CLIPS = [
    dict(hidden_size=768, intermediate_size=3072, num_hidden_layers=12, num_attention_heads=12, projection_dim=768),
    dict(hidden_size=1280, intermediate_size=5120, num_hidden_layers=32, num_attention_heads=20, projection_dim=1280),
]
TINY_CLIPS = [
    dict(hidden_size=8, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2, projection_dim=8)
] * 2
T5 = dict(d_model=4096, d_kv=64, d_ff=10240, num_layers=24, num_heads=64)
TINY_T5 = dict(d_model=32, d_kv=8, d_ff=16, num_layers=2, num_heads=2)


def widen(folder, changes):
    """Overwrites fields of a JSON file."""
    config = json.loads(folder.read_text()) | changes
    folder.write_text(json.dumps(config, indent=2))


def save(model, folder):
    shutil.rmtree(folder)
    model.to(torch.bfloat16).save_pretrained(folder)
    return model.eval()


def tokens_of(tokenizer, length):
    said = tokenizer(TEXTS, padding="max_length", max_length=length, truncation=True, return_tensors="pt")
    return said.input_ids, said.attention_mask


class StableDiffusion3:
    name, length = "sd3", 256

    def __init__(self, folder, device, tiny):
        clips, t5 = (TINY_CLIPS, TINY_T5) if tiny else (CLIPS, T5)
        self.device, self.models, self.tokens = device, [], []
        for part, shape in zip(["", "_2"], clips):
            known = CLIPTextConfig.from_pretrained(folder / f"text_encoder{part}").to_dict()
            config = CLIPTextConfig(**known | shape | dict(max_position_embeddings=77))
            with torch.device(device):
                model = CLIPTextModelWithProjection(config)
            self.models.append(save(model, folder / f"text_encoder{part}"))
            widen(folder / f"tokenizer{part}" / "tokenizer_config.json", dict(model_max_length=77))
            self.tokens.append(tokens_of(CLIPTokenizer.from_pretrained(folder / f"tokenizer{part}"), 77)[0])
        with torch.device(device):
            model = T5EncoderModel(T5Config(vocab_size=66, feed_forward_proj="gated-gelu", **t5))
        self.models.append(save(model, folder / "text_encoder_3"))
        self.tokens.append(tokens_of(PreTrainedTokenizerFast.from_pretrained(folder / "tokenizer_3"), self.length)[0])
        pooled = sum(shape["projection_dim"] for shape in clips)
        dims = dict(joint_attention_dim=t5["d_model"], pooled_projection_dim=pooled)
        widen(folder / "transformer" / "config.json", dims)

    def encode(self, dtype):
        """As diffusers' StableDiffusion3Pipeline.encode_prompt puts them together."""
        states, pooled = [], []
        for model, tokens in zip(self.models[:2], self.tokens):
            said = model.to(dtype)(tokens.to(self.device), output_hidden_states=True)
            states.append(said.hidden_states[-2])
            pooled.append(said.text_embeds)
        third = self.models[2].to(dtype)(self.tokens[2].to(self.device)).last_hidden_state
        clips = torch.cat(states, -1)
        clips = torch.nn.functional.pad(clips, (0, third.shape[-1] - clips.shape[-1]))
        return {"prompt_embeds": torch.cat([clips, third], 1), "pooled_prompt_embeds": torch.cat(pooled, -1)}


class Wan:
    name, length = "wan", 512

    def __init__(self, folder, device, tiny):
        shape = TINY_T5 if tiny else T5
        self.device = device
        with torch.device(device):
            model = UMT5EncoderModel(UMT5Config(vocab_size=66, feed_forward_proj="gated-gelu", **shape))
        self.model = save(model, folder / "text_encoder")
        self.tokens, self.mask = tokens_of(PreTrainedTokenizerFast.from_pretrained(folder / "tokenizer"), self.length)
        widen(folder / "transformer" / "config.json", dict(text_dim=shape["d_model"]))

    def encode(self, dtype):
        """As diffusers' WanPipeline.encode_prompt: what is behind a text is zero."""
        mask = self.mask.to(self.device)
        said = self.model.to(dtype)(self.tokens.to(self.device), mask).last_hidden_state
        return {"prompt_embeds": said * mask[..., None]}


def apart(found, wanted):
    return {
        name: (found[name].float().cpu() - tensor.float().cpu()).abs().max().item() for name, tensor in wanted.items()
    }


@torch.no_grad()
def check(kind, args, folder):
    for source in [f"tiny_{kind.name}/model", f"text_encoders/{kind.name}"]:
        shutil.copytree(GOLDEN / source, folder, dirs_exist_ok=True)
    device = "cuda" if args.backend == "cuda" else args.backend
    torch.manual_seed(0)
    peer = kind(folder, device, args.tiny)
    wanted = {name: tensor.cpu() for name, tensor in peer.encode(torch.float32).items()}
    theirs = apart(peer.encode(torch.bfloat16), wanted)
    del peer
    torch.cuda.empty_cache()
    (folder / "texts.jsonl").write_text("".join(json.dumps({"prompt": text}) + "\n" for text in TEXTS))
    is_right = True
    for precision in ["fp32", "bf16"]:
        out, start = folder / f"{precision}.safetensors", time.monotonic()
        command = [args.anyroll, "embed", folder, "--file", folder / "texts.jsonl", "--out", out]
        command += ["--max-sequence-length", str(kind.length), "--backend", args.backend, "--precision", precision]
        subprocess.run(command, check=True, timeout=300)
        seconds = time.monotonic() - start
        ours = apart(load_file(out), wanted)
        for name, most in ours.items():
            size = wanted[name].float().square().mean().sqrt().item()
            beside = f", transformers' {theirs[name]:.3g}" if precision == "bf16" else ""
            print(f"{kind.name} {precision} {name}: {most:.3g}{beside}, of {size:.3g}; {seconds:.1f} s", flush=True)
            is_right &= most <= (2 * theirs[name] if precision == "bf16" else 1e-3)  # false for NaN
    return is_right


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--anyroll", default="target/release/anyroll")
    parser.add_argument("--backend", default="cuda")
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = False
    found = []
    for kind in [StableDiffusion3, Wan]:
        with tempfile.TemporaryDirectory() as folder:
            found.append(check(kind, args, Path(folder) / "model"))
    sys.exit(not all(found))


if __name__ == "__main__":
    main()
