//! Layers that libtorch differentiates: every stage computes the same bits, and their memory is planned.

use std::sync::Arc;

use anyroll_backends::{DType, tensor_peak_bytes};
use anyroll_models::{
    Decoder, DecoderConfig, DeepseekV3, Expressed, LoraConfig, LoraTarget, PackedSize, Pairs, Runs,
    ScoresGrad,
};
use anyroll_strategy::{
    Zero, ZeroConfig, ZeroStage,
    plan::{scoring_activations, training_activations},
};

use crate::harness::{ADAMW, STAGES, assert_planned, batch, ranks, train, values};

/// Returns a layer with an MLP and one with a mixture, whose widths are multiples of `width`.
fn latent(width: i64) -> DecoderConfig {
    let expressed = DeepseekV3 {
        q_lora_rank: Some(2 * width),
        kv_lora_rank: 2 * width,
        qk_rope_head_dim: width,
        v_head_dim: 2 * width,
        pairs: Pairs::Adjacent,
        mscale_all_dim: 0.0,
        first_k_dense_replace: 1,
        n_routed_experts: 8,
        num_experts_per_tok: 2,
        moe_intermediate_size: 3 * width,
        n_shared_experts: 1,
        n_group: 4,
        topk_group: 2,
        norm_topk_prob: true,
        routed_scaling_factor: 1.5,
    };
    DecoderConfig {
        vocab_size: 11,
        head_dim: 3 * width,
        intermediate_size: 10 * width,
        initializer_range: 0.3,
        expressed: Some(Expressed::DeepseekV3(expressed)),
        ..DecoderConfig::plain(2, 4 * width, 2)
    }
}

/// Returns the same with norms behind branches and a part of each head that turns.
fn norms_on_both_sides(width: i64) -> DecoderConfig {
    DecoderConfig {
        num_key_value_heads: 1,
        partial_rotary_factor: 0.5,
        qkv_bias: true,
        expressed: Some(Expressed::Glm4),
        ..latent(width)
    }
}

fn decoder(config: DecoderConfig, lora: Option<&LoraConfig>) -> Arc<Decoder> {
    let at = tch::Device::Cpu;
    Arc::new(match lora {
        Some(lora) => Decoder::with_lora(config, lora, at).unwrap(),
        None => Decoder::new(config, at).unwrap(),
    })
}

fn adapters(names: &[&'static str]) -> LoraConfig {
    LoraConfig::new(2, 4.0, names.iter().map(|name| LoraTarget::Named(name)).collect())
}

const OF_ATTENTION: [&str; 5] = [
    "self_attn.q_a_proj",
    "self_attn.q_b_proj",
    "self_attn.kv_a_proj_with_mqa",
    "self_attn.kv_b_proj",
    "self_attn.o_proj",
];

#[test]
fn stages_are_bitwise_equal() {
    let lora = adapters(&OF_ATTENTION);
    for (config, lora) in [(latent(4), None), (latent(4), Some(&lora)), (norms_on_both_sides(4), None)] {
        let trained = |stage: ZeroStage, harsh: bool| {
            let mut results = ranks(2, harsh, |device, group| {
                let model = decoder(config.clone(), lora);
                let mut zero = Zero::new(model, stage, Some(ADAMW), device, group, 7).unwrap();
                let norms = train(&mut zero, 0..2, 6);
                (norms, values(&mut zero))
            });
            assert!(results[0] == results[1], "ranks differ at {stage:?}");
            results.swap_remove(0)
        };
        let reference = trained(ZeroStage::Zero0, false);
        assert!(reference.0.iter().all(|norm| *norm > 0.0), "nothing was learned");
        for stage in STAGES {
            assert!(trained(stage, true) == reference, "{stage:?}");
        }
    }
}

#[test]
fn activations_are_those_that_are_planned() {
    const RUNS: Runs = Runs { dtype: DType::F32, on_host: true };
    let (sequences, len) = (6, 48);
    let size = PackedSize::uniform(sequences, 2, len - 2);
    let tokens: Vec<i64> = (0..(sequences * len) as i64).map(|index| index * 7 % 11).collect();
    let tokens: Vec<Vec<i64>> = tokens.chunks(len).map(<[i64]>::to_vec).collect();
    let lora = adapters(&OF_ATTENTION);
    for (name, model) in [
        ("latent", decoder(latent(16), None)),
        ("latent, adapters", decoder(latent(16), Some(&lora))),
        ("norms on both sides", decoder(norms_on_both_sides(16), None)),
    ] {
        for (world_size, stage) in [(1, ZeroStage::Zero0), (2, ZeroStage::Zero3)] {
            let config: ZeroConfig = stage.into();
            ranks(world_size, false, |device, group| {
                let mut zero = Zero::new(model.clone(), config, Some(ADAMW), device, group, 7).unwrap();
                let batch = batch(&tokens);
                let (_, measured) = tensor_peak_bytes(|| {
                    zero.accumulate(&batch, |scores| {
                        let logprobs = scores.logprobs.full_like(-0.01);
                        Ok(ScoresGrad { logprobs, entropy: None, divergence: None })
                    })
                    .unwrap();
                })
                .unwrap();
                let planned = training_activations(&*model, &size, config, RUNS);
                assert_planned(planned, measured, &format!("{name}, {stage:?}"));
            });
        }
        ranks(1, false, |device, group| {
            let mut zero = Zero::new(model.clone(), ZeroStage::Zero1, None, device, group, 7).unwrap();
            let batch = batch(&tokens);
            let (_, measured) = tensor_peak_bytes(|| drop(zero.score(&batch).unwrap())).unwrap();
            assert_planned(scoring_activations(&*model, &size, RUNS), measured, &format!("{name}, scoring"));
        });
    }
}
