"""Writes tests/golden/lora*/*: adapters as PEFT saves them for a model of tests/golden/hf, and what the two make of texts.

    python tests/python/make_lora_golden.py [NAME ...]     all of them, or these folders

Needs torch, transformers 4.57 and peft 0.21. `golden.safetensors` has `logprobs` of the completion tokens of the model's
golden sequences, `grad.<name>` of the adapter's tensors for the loss sum(d_logprobs * logprobs), and `merged.<name>`,
the weights into which the adapter was merged. With dropout, log-probs and gradients are those of training under the masks
of the sequences' KEYS, as `ops::dropout` makes them.
"""

import pathlib
import shutil
import sys

import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

TARGETS = ["q_proj", "v_proj", "o_proj", "up_proj", "down_proj"]
ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
# Ranks and alphas of single matrices and layers, where several patterns match as well, under rank-stabilized scales. The
# first pattern counts, and PEFT's file has them sorted.
PATTERNS = dict(
    use_rslora=True,
    rank_pattern={"(.*1.self_attn.q)_proj": 5, "(q|v)_proj": 2, "model.layers.0.mlp.down_proj": 1},
    alpha_pattern={"^model.*.up_proj": 1.5, "0.self_attn.q_proj": 7},
)
ONE_LAYER = dict(layers_to_transform=[1], layers_pattern="layers", exclude_modules=["o_proj"])
# Other matrices in each layer, and a part of one that is fused elsewhere.
UNEQUAL = dict(
    target_modules=r".*layers\.0\.self_attn\.[qo]_proj|.*layers\.1\.(self_attn\.v|mlp\.up|mlp\.down)_proj"
)
# Of a Phi-3, whose q, k and v are one matrix, and whose MLP's two are another.
FUSED = ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"]
# Of layers that differ, but for the experts of a mixture.
LATENT = dict(
    target_modules=r".*\.self_attn\.([qo]_proj|[qk]v?_[ab]_proj.*)|.*layers\.0\.mlp\.(gate|down)_proj|.*\.shared_experts\.up_proj"
)
# Beside biases, which stay outside of what magnitudes scale.
DORA = dict(use_dora=True, target_modules=ALL)
KEYS = [9, 1 << 60, 0, 77, 3]
MASK = (1 << 64) - 1
root = pathlib.Path(__file__).parent.parent / "golden"


def mix(x):
    for _ in range(2):
        x = ((x ^ (x >> 16)) * 0x45D9F3B) & 0xFFFFFFFF
    return x ^ (x >> 16)


def row_key(key, token):
    bits = (key + (token + 1) * 0x9E3779B97F4A7C15) & MASK
    bits = ((bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    bits = ((bits ^ (bits >> 27)) * 0x94D049BB133111EB) & MASK
    return (bits ^ (bits >> 31)) >> 32


class Dropout(torch.nn.Module):
    """Drops of the sequence with the key `of` what adapter `salt` does not see of it."""

    of = None

    def __init__(self, probability, salt):
        super().__init__()
        self.probability, self.salt = probability, salt

    def forward(self, x):
        columns = mix(torch.arange(x.shape[-1]))
        rows = torch.tensor([row_key(Dropout.of, token) for token in range(x.shape[1])])
        hashes = mix(mix(rows ^ self.salt)[:, None] ^ columns)
        dropped = hashes < int(self.probability * 2**32)
        return (x / (1 - self.probability)).masked_fill(dropped, 0.0)


def install_dropout(model, config):
    """In place of PEFT's, whose masks are random. Adapters have their numbers in the order of ALL, or of FUSED."""
    order = [name for name in (FUSED if "qkv_proj" in config.target_modules else ALL) if name in config.target_modules]
    for name, module in model.named_modules():
        if hasattr(module, "lora_dropout"):
            layer, number = int(name.split(".layers.")[1].split(".")[0]), order.index(name.split(".")[-1])
            module.lora_dropout["default"] = Dropout(config.lora_dropout, layer * 14 + 2 * number)
    model.train()


def make(name, options, base="qwen2"):
    if sys.argv[1:] and name not in sys.argv[1:]:
        return
    folder, given = root / name, load_file(root / "hf" / base / "golden.safetensors")
    shutil.rmtree(folder, ignore_errors=True)
    model = AutoModelForCausalLM.from_pretrained(root / "hf" / base, attn_implementation="eager")
    config = LoraConfig(**dict(r=3, lora_alpha=5, target_modules=TARGETS, task_type="CAUSAL_LM") | options)
    model = get_peft_model(model, config)
    random = torch.Generator().manual_seed(0)
    adapter = {name: weight for name, weight in model.named_parameters() if "lora_" in name}
    for name, weight in adapter.items():
        noise = 0.4 * torch.randn(weight.shape, generator=random)
        weight.data = weight.data * (1 + noise) if "magnitude" in name else noise
    if config.lora_dropout > 0:
        install_dropout(model, config)
    found = []
    sequences = given["tokens"].split(given["lengths"].tolist())
    for sequence, prompt_len, Dropout.of in zip(sequences, given["prompt_lens"].tolist(), KEYS):
        log_p = model(sequence[None]).logits[0, prompt_len - 1 : -1].log_softmax(-1)
        found.append(log_p.gather(1, sequence[prompt_len:, None])[:, 0])
    found = torch.cat(found)
    (given["d_logprobs"] * found).sum().backward()
    model.peft_config["default"].base_model_name_or_path = base  # and not a path of this machine
    model.save_pretrained(folder)
    (folder / "README.md").unlink()
    golden = {"logprobs": found.detach()}
    saved = {name: name.replace(".default", "").replace("vector.weight", "vector") for name in adapter}
    # An expert without tokens has no gradient.
    grads = {name: weight.grad if weight.grad is not None else torch.zeros_like(weight) for name, weight in adapter.items()}
    golden |= {f"grad.{saved[name]}": grad.clone() for name, grad in grads.items()}
    merged = model.merge_and_unload()
    golden |= {f"merged.{name}": weight.detach().clone() for name, weight in merged.named_parameters()}
    saved_too = [it for it in merged.named_buffers() if it[0].endswith("e_score_correction_bias")]
    golden |= {f"merged.{name}": bias.clone() for name, bias in saved_too}
    save_file(golden, folder / "golden.safetensors")


make("lora", {})
make("lora_patterns", PATTERNS)
make("lora_layers", ONE_LAYER)
make("lora_unequal", UNEQUAL)
make("lora_dropout", dict(lora_dropout=0.4))
make("lora_dora", DORA, "llama_biased")
make("lora_dora_dropout", DORA | dict(lora_dropout=0.4), "llama_biased")
# In front of the norms of branches, and of queries and keys.
make("lora_olmo3", dict(target_modules=ALL), "olmo3")
make("lora_dora_olmo3", DORA, "olmo3_biased")
# Where what branches add is multiplied, and biases stand beside.
make("lora_granite", dict(target_modules=ALL), "granite")
make("lora_dora_granite", DORA, "granite_biased")
# Between norms in front of branches and behind them, whose weights are told from 1, and behind a multiplied embedding.
make("lora_gemma3", dict(target_modules=ALL), "gemma3")
make("lora_dora_gemma3", DORA, "gemma3_scaled")
# Beside fused matrices: some and all of them, where heads are turned in part and where layers slide.
make("lora_phi3", dict(target_modules=FUSED, rank_pattern={"1.self_attn.qkv_proj": 5}, use_rslora=True), "phi3_partial")
make("lora_phi3_dropout", dict(target_modules=["qkv_proj", "gate_up_proj"], lora_dropout=0.4), "phi3_window")
make("lora_dora_phi3", dict(target_modules=FUSED, use_dora=True), "phi3_window")
make("lora_dora_phi3_dropout", dict(target_modules=FUSED, use_dora=True, lora_dropout=0.4), "phi3")
# In layers that libtorch differentiates.
make("lora_deepseek_v3", LATENT, "deepseek_v3")
make("lora_glm4", dict(target_modules=["q_proj", "v_proj", "o_proj", "gate_up_proj", "down_proj"]), "glm4")
# On each expert of a mixture, beside a layer without experts, and under the names of Mixtral.
make("lora_qwen3_moe", dict(target_modules=ALL, rank_pattern={"up_proj": 2}), "qwen3_moe")
make("lora_mixtral", dict(target_modules=["v_proj", "w1", "w2"], use_rslora=True), "mixtral")
