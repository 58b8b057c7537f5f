//! Shapes of published decoders.

use anyroll_models::{DecoderConfig, ExpertsConfig, QkNorm};

/// Returns the shape called `name`: `72b`, `32b`, `7b`, `1.5b` and `0.5b` are Qwen2.5's, `qwen3-1.7b` and the mixture
/// `30b-a3b` are Qwen3's, `olmoe` is a smaller mixture, and `tiny` is for tests on a CPU.
pub fn decoder(name: &str, positions: i64) -> DecoderConfig {
    let [vocab, hidden, layers, heads, kv_heads, dim, intermediate] = match name {
        "72b" => [152_064, 8192, 80, 64, 8, 128, 29_568],
        "32b" => [152_064, 5120, 64, 40, 8, 128, 27_648],
        "7b" => [152_064, 3584, 28, 28, 4, 128, 18_944],
        "1.5b" => [151_936, 1536, 28, 12, 2, 128, 8960],
        "0.5b" => [151_936, 896, 24, 14, 2, 64, 4864],
        "qwen3-1.7b" => [151_936, 2048, 28, 16, 8, 128, 6144],
        "30b-a3b" => [151_936, 2048, 48, 32, 4, 128, 6144],
        "olmoe" => [50_304, 2048, 16, 16, 16, 128, 1024],
        "tiny" => [256, 64, 2, 4, 2, 16, 128],
        other => {
            panic!("no shape {other:?}: choose 72b, 32b, 7b, 1.5b, 0.5b, qwen3-1.7b, 30b-a3b, olmoe or tiny")
        }
    };
    let experts = match name {
        "30b-a3b" => Some((128, 768)),
        "olmoe" => Some((64, 1024)),
        _ => None,
    };
    let qk_norm = match name {
        "qwen3-1.7b" | "30b-a3b" => Some(QkNorm::PerHead),
        "olmoe" => Some(QkNorm::Together),
        _ => None,
    };
    DecoderConfig {
        vocab_size: vocab,
        num_key_value_heads: kv_heads,
        head_dim: dim,
        intermediate_size: intermediate,
        rope_theta: 1e6,
        max_position_embeddings: positions,
        qkv_bias: qk_norm.is_none(),
        qk_norm,
        experts: experts.map(|(num_experts, moe_intermediate_size)| {
            ExpertsConfig::plain(vec![true; layers as usize], num_experts, 8, moe_intermediate_size)
        }),
        tie_word_embeddings: !["7b", "32b", "72b", "30b-a3b", "olmoe"].contains(&name),
        ..DecoderConfig::plain(layers as usize, hidden, heads)
    }
}
