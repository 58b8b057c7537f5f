"""Writes tests/golden/hf/*: tiny models of every family as `transformers` saves them, and what it makes of them.

    python tests/python/make_hf_golden.py [NAME...]      all of them, or those that are named

Needs torch, transformers 4.57 and safetensors. A folder holds the model (`config.json`, `model*.safetensors`,
`generation_config.json`) and `golden.safetensors`: `tokens`, `lengths`, `prompt_lens`; `logprobs` of the completion
tokens, each sequence run alone in fp32; `logits` of each sequence's last token; `grad.<name>` of every weight for the
loss sum(d_logprobs * logprobs); `bf16_logprobs`, the same in bfloat16; and `generate_prompts` with their greedy
`generate_completions`, a row each, padded with 255.
"""

import os
import pathlib
import shutil
import sys

# Some virtual machines report AMX tiles and then raise SIGILL on them, which bf16 products would meet.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")

import torch
import transformers
from safetensors.torch import save_file
from transformers import GenerationConfig

COMMON = dict(
    vocab_size=40,
    hidden_size=16,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    intermediate_size=24,
    max_position_embeddings=64,
    rope_theta=100.0,
    initializer_range=0.3,
    bos_token_id=0,
    eos_token_id=1,
    pad_token_id=None,
    tie_word_embeddings=False,
    attn_implementation="eager",
)
LLAMA3 = dict(
    rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=32
)
MOE = dict(head_dim=6, num_experts=6, num_experts_per_tok=2, moe_intermediate_size=10)
# Every width of a head differs.
MLA = dict(
    num_key_value_heads=4,
    kv_lora_rank=10,
    qk_nope_head_dim=6,
    qk_rope_head_dim=4,
    v_head_dim=8,
    n_routed_experts=8,
    num_experts_per_tok=3,
    moe_intermediate_size=10,
)
FAMILIES = {
    "qwen2": ("Qwen2", {}),
    "qwen2_tied_yarn": (
        "Qwen2",
        dict(
            tie_word_embeddings=True,
            rope_scaling=dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=16),
        ),
    ),
    "qwen3": ("Qwen3", dict(head_dim=6, tie_word_embeddings=True)),
    "qwen3_biased": ("Qwen3", dict(head_dim=6, attention_bias=True)),
    # Experts in layers around one without, and in every other layer of a model with windows.
    "qwen3_moe": ("Qwen3Moe", dict(MOE, norm_topk_prob=True, mlp_only_layers=[1], num_hidden_layers=3)),
    "qwen3_moe_unnormed": (
        "Qwen3Moe",
        dict(
            MOE,
            norm_topk_prob=False,
            num_experts=8,
            num_experts_per_tok=3,
            decoder_sparse_step=2,
            attention_bias=True,
            tie_word_embeddings=True,
            use_sliding_window=True,
            sliding_window=7,
        ),
    ),
    "mixtral": ("Mixtral", dict(num_local_experts=6, num_experts_per_tok=2)),
    "mixtral_window": ("Mixtral", dict(num_local_experts=4, num_experts_per_tok=3, head_dim=6, sliding_window=7)),
    # Their heads take the whole width of the stream.
    "olmoe": ("Olmoe", dict(num_experts=6, num_experts_per_tok=2, norm_topk_prob=False)),
    "olmoe_biased": (
        "Olmoe",
        dict(num_experts=8, num_experts_per_tok=3, norm_topk_prob=True, attention_bias=True, num_key_value_heads=4),
    ),
    "llama_biased": ("Llama", dict(attention_bias=True, mlp_bias=True)),
    "llama2": ("Llama", dict(num_key_value_heads=4, rms_norm_eps=1e-5)),
    "llama3_sharded": ("Llama", dict(rms_norm_eps=1e-5, rope_scaling=LLAMA3)),
    "llama_linear": ("Llama", dict(rope_scaling=dict(rope_type="linear", factor=2.0))),
    "mistral": ("Mistral", dict(sliding_window=60, rms_norm_eps=1e-5)),
    # Windows that most sequences are longer than: in every layer, and from the second one on.
    "mistral_window": ("Mistral", dict(sliding_window=7, rms_norm_eps=1e-5)),
    "qwen2_window": ("Qwen2", dict(use_sliding_window=True, sliding_window=5, max_window_layers=1)),
    # One layer of each kind: with a rotation and without, and the latter with a window.
    "smollm3": ("SmolLM3", dict(no_rope_layers=[1, 0], tie_word_embeddings=True)),
    "smollm3_window": (
        "SmolLM3",
        dict(
            no_rope_layer_interval=2,
            use_sliding_window=True,
            sliding_window=7,
            attention_bias=True,
            mlp_bias=True,
            rope_scaling=dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=16),
        ),
    ),
    "olmo2": ("Olmo2", dict(rms_norm_eps=1e-5)),
    # The scaled rotation is that of the layer without a window.
    "olmo3": (
        "Olmo3",
        dict(
            sliding_window=7,
            layer_types=["sliding_attention", "full_attention"],
            rope_scaling=dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=16),
        ),
    ),
    # None of the four is a power of two, as which rounding would not tell.
    "granite": (
        "Granite",
        dict(
            embedding_multiplier=3.3,
            attention_multiplier=0.7,
            residual_multiplier=0.4,
            logits_scaling=1.3,
            tie_word_embeddings=True,
            rms_norm_eps=1e-5,
        ),
    ),
    "granite_biased": (
        "Granite",
        dict(
            num_hidden_layers=3,
            residual_multiplier=0.22,
            logits_scaling=0.6,
            attention_bias=True,
            mlp_bias=True,
            rope_scaling=LLAMA3,
        ),
    ),
    # A head is wider than its part of the stream, and the root of 18 is no number of bfloat16.
    "gemma3": (
        "Gemma3",
        dict(
            hidden_size=18,
            head_dim=6,
            query_pre_attn_scalar=10,
            sliding_window=7,
            layer_types=["sliding_attention", "full_attention"],
            rope_local_base_freq=30.0,
            tie_word_embeddings=True,
        ),
    ),
    "gemma3_scaled": (
        "Gemma3",
        dict(
            num_hidden_layers=4,
            head_dim=8,
            query_pre_attn_scalar=8,
            sliding_window=5,
            layer_types=["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
            rope_local_base_freq=50.0,
            rope_scaling=dict(rope_type="linear", factor=8.0),
            attention_bias=True,
        ),
    ),
    "phi3": ("Phi3", dict(num_key_value_heads=4, rms_norm_eps=1e-5)),
    "phi3_window": ("Phi3", dict(sliding_window=7)),
    # Three pairs of a head of eight are turned.
    "phi3_partial": ("Phi3", dict(hidden_size=32, partial_rotary_factor=0.75, tie_word_embeddings=True)),
    # Texts up to the original length, of models that read longer ones.
    "phi3_longrope": (
        "Phi3",
        dict(
            max_position_embeddings=256,
            original_max_position_embeddings=64,
            rope_scaling=dict(type="longrope", short_factor=[1.3, 2.5], long_factor=[4.0, 9.0]),
        ),
    ),
    "phi3_longrope_partial": (
        "Phi3",
        dict(
            hidden_size=32,
            partial_rotary_factor=0.75,
            tie_word_embeddings=True,
            max_position_embeddings=4096,
            original_max_position_embeddings=56,
            rope_scaling=dict(type="longrope", short_factor=[1.0, 1.17, 3.4], long_factor=[1.0, 7.5, 64.25]),
        ),
    ),
    "deepseek_v3": (
        "DeepseekV3",
        dict(
            MLA,
            num_hidden_layers=3,
            q_lora_rank=12,
            n_group=4,
            topk_group=2,
            n_shared_experts=2,
            first_k_dense_replace=1,
            routed_scaling_factor=1.7,
        ),
    ),
    "deepseek_v3_plain": (
        "DeepseekV3",
        dict(
            MLA,
            q_lora_rank=None,
            n_group=1,
            topk_group=1,
            n_shared_experts=1,
            first_k_dense_replace=0,
            routed_scaling_factor=0.6,
            norm_topk_prob=False,
            rope_interleave=False,
            attention_bias=True,
            tie_word_embeddings=True,
            rope_scaling=dict(
                rope_type="yarn", factor=4.0, mscale=0.7, mscale_all_dim=0.9, original_max_position_embeddings=16
            ),
        ),
    ),
    "glm4": ("Glm4", dict(head_dim=8)),
    "glm4_unbiased": (
        "Glm4", dict(head_dim=8, partial_rotary_factor=0.75, attention_bias=False, tie_word_embeddings=True)
    ),
    "olmo3_biased": (
        "Olmo3", dict(num_hidden_layers=4, num_key_value_heads=4, sliding_window=5, attention_bias=True)
    ),
}
LENGTHS, PROMPT_LENS = [7, 2, 51, 5, 18], [3, 1, 17, 5, 1]
PROMPTS, NEW_TOKENS, NONE = 200, 16, 255


def fill(model, random, norms):
    """Weights of which every one counts: also the biases, which start as 0, and those of norms, which start as `norms`."""
    for name, weight in model.named_parameters():
        noise = torch.randn(weight.shape, generator=random)
        weight.data = norms + 0.3 * noise if name.endswith("norm.weight") else 0.3 * noise
    for bias in correction_biases(model).values():
        # Above 0, or experts that no group offers could be chosen, of which all are equal.
        bias.data = 0.3 * torch.rand(bias.shape, generator=random)


def correction_biases(model):
    """What a router adds to its scores to choose by: saved, but never differentiated."""
    return {name: it for name, it in model.named_buffers() if name.endswith("e_score_correction_bias")}


def logprobs(model, sequences):
    found = []
    for sequence, prompt_len in zip(sequences, PROMPT_LENS):
        log_p = model(sequence[None]).logits[0, prompt_len - 1 : -1].float().log_softmax(-1)
        found.append(log_p.gather(1, sequence[prompt_len:, None])[:, 0])
    return torch.cat(found)


def grad_of(weight):
    return torch.zeros_like(weight) if weight.grad is None else weight.grad


def pad(rows, width):
    return torch.tensor([row + [NONE] * (width - len(row)) for row in rows], dtype=torch.uint8)


def generate(model, random):
    """One prompt at a time, of mixed lengths."""
    lengths = torch.randint(1, 24, (PROMPTS,), generator=random).tolist()
    prompts = [torch.randint(2, COMMON["vocab_size"], (length,), generator=random) for length in lengths]
    greedy = GenerationConfig(do_sample=False, max_new_tokens=NEW_TOKENS, eos_token_id=1, pad_token_id=1)
    completions = [
        model.generate(prompt[None], attention_mask=torch.ones(1, len(prompt)), generation_config=greedy)[0, len(prompt) :]
        for prompt in prompts
    ]
    return {
        "generate_prompts": pad([prompt.tolist() for prompt in prompts], max(lengths)),
        "generate_completions": pad([completion.tolist() for completion in completions], NEW_TOKENS),
    }


def make(name, family, special, folder):
    random = torch.Generator().manual_seed(0)
    is_gemma = family == "Gemma3"  # whose config has room for images, and whose norms multiply by 1 + w
    config = getattr(transformers, family + ("TextConfig" if is_gemma else "Config"))(**{**COMMON, **special})
    model = getattr(transformers, family + "ForCausalLM")(config).eval()
    fill(model, random, norms=0 if is_gemma else 1)
    model.save_pretrained(folder, max_shard_size="12KB" if "sharded" in name else "1GB")
    tokens = torch.randint(COMMON["vocab_size"], (sum(LENGTHS),), generator=random)
    sequences = tokens.split(LENGTHS)
    found = logprobs(model, sequences)
    d_logprobs = torch.randn(len(found), generator=random)
    (d_logprobs * found).sum().backward()
    with torch.no_grad():
        golden = {
            "tokens": tokens,
            "lengths": torch.tensor(LENGTHS),
            "prompt_lens": torch.tensor(PROMPT_LENS),
            "logprobs": found.detach(),
            "d_logprobs": d_logprobs,
            "logits": torch.stack([model(sequence[None]).logits[0, -1] for sequence in sequences]),
            # An expert that no token went to has none.
            **{f"grad.{weight}": grad_of(value).clone() for weight, value in model.named_parameters()},
            **{f"grad.{name}": torch.zeros_like(bias) for name, bias in correction_biases(model).items()},
            **generate(model, random),
            "bf16_logprobs": logprobs(model.bfloat16(), sequences),
        }
    save_file(golden, folder / "golden.safetensors")


root = pathlib.Path(__file__).parent.parent / "golden" / "hf"
for name in sys.argv[1:] or FAMILIES:
    shutil.rmtree(root / name, ignore_errors=True)
    (root / name).mkdir(parents=True)
    make(name, *FAMILIES[name], root / name)
