"""Writes tests/golden/lora*/*: adapters as PEFT saves them for tests/golden/hf/qwen2, and what the two make of texts.

    python tests/python/make_lora_golden.py

Needs torch, transformers 4.57 and peft. `golden.safetensors` has `logprobs` of the completion tokens of the model's
golden sequences, `grad.<name>` of the adapter's tensors for the loss sum(d_logprobs * logprobs), and `merged.<name>`,
the weights into which the adapter was merged.
"""

import pathlib
import shutil

import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

TARGETS = ["q_proj", "v_proj", "o_proj", "up_proj", "down_proj"]
# Ranks and alphas of single matrices and layers, where several patterns match as well, under rank-stabilized scales. The
# first pattern counts, and PEFT's file has them sorted.
PATTERNS = dict(
    use_rslora=True,
    rank_pattern={"(.*1.self_attn.q)_proj": 5, "(q|v)_proj": 2, "model.layers.0.mlp.down_proj": 1},
    alpha_pattern={"^model.*.up_proj": 1.5, "0.self_attn.q_proj": 7},
)
root = pathlib.Path(__file__).parent.parent / "golden"
base = load_file(root / "hf" / "qwen2" / "golden.safetensors")


def make(folder, options):
    shutil.rmtree(folder, ignore_errors=True)
    model = AutoModelForCausalLM.from_pretrained(root / "hf" / "qwen2", attn_implementation="eager")
    config = LoraConfig(r=3, lora_alpha=5, target_modules=TARGETS, task_type="CAUSAL_LM", **options)
    model = get_peft_model(model, config)
    random = torch.Generator().manual_seed(0)
    adapter = {name: weight for name, weight in model.named_parameters() if "lora_" in name}
    for weight in adapter.values():
        weight.data = 0.4 * torch.randn(weight.shape, generator=random)
    found = []
    sequences = base["tokens"].split(base["lengths"].tolist())
    for sequence, prompt_len in zip(sequences, base["prompt_lens"].tolist()):
        log_p = model(sequence[None]).logits[0, prompt_len - 1 : -1].log_softmax(-1)
        found.append(log_p.gather(1, sequence[prompt_len:, None])[:, 0])
    found = torch.cat(found)
    (base["d_logprobs"] * found).sum().backward()
    model.peft_config["default"].base_model_name_or_path = "qwen2"  # and not a path of this machine
    model.save_pretrained(folder)
    (folder / "README.md").unlink()
    golden = {"logprobs": found.detach()}
    golden |= {f"grad.{name.replace('.default', '')}": weight.grad.clone() for name, weight in adapter.items()}
    merged = model.merge_and_unload()
    golden |= {f"merged.{name}": weight.detach().clone() for name, weight in merged.named_parameters()}
    save_file(golden, folder / "golden.safetensors")


make(root / "lora", {})
make(root / "lora_patterns", PATTERNS)
