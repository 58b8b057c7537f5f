//! Shapes of published decoders.

use anyroll_models::{DecoderConfig, QkNorm};

/// Returns the shape called `name`: `72b`, `32b`, `7b`, `1.5b` and `0.5b` are Qwen2.5's, `qwen3-1.7b` is Qwen3's,
/// and `tiny` is for tests on a CPU.
pub fn decoder(name: &str, positions: i64) -> DecoderConfig {
    let [vocab, hidden, layers, heads, kv_heads, dim, intermediate] = match name {
        "72b" => [152_064, 8192, 80, 64, 8, 128, 29_568],
        "32b" => [152_064, 5120, 64, 40, 8, 128, 27_648],
        "7b" => [152_064, 3584, 28, 28, 4, 128, 18_944],
        "1.5b" => [151_936, 1536, 28, 12, 2, 128, 8960],
        "0.5b" => [151_936, 896, 24, 14, 2, 64, 4864],
        "qwen3-1.7b" => [151_936, 2048, 28, 16, 8, 128, 6144],
        "tiny" => [256, 64, 2, 4, 2, 16, 128],
        other => panic!("no shape {other:?}: choose 72b, 32b, 7b, 1.5b, 0.5b, qwen3-1.7b or tiny"),
    };
    let is_qwen3 = name.starts_with("qwen3");
    DecoderConfig {
        vocab_size: vocab,
        num_key_value_heads: kv_heads,
        head_dim: dim,
        intermediate_size: intermediate,
        rope_theta: 1e6,
        max_position_embeddings: positions,
        qkv_bias: !is_qwen3,
        qk_norm: is_qwen3.then_some(QkNorm::PerHead),
        tie_word_embeddings: !["7b", "32b", "72b"].contains(&name),
        ..DecoderConfig::plain(layers as usize, hidden, heads)
    }
}
