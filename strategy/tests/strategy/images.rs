//! Plans of diffusion models match the memory that passes take.

use std::sync::Arc;

use anyroll_backends::{DType, tensor_peak_bytes};
use anyroll_models::{
    Model, Runs, Unit,
    clip::{Activation, Clip, ClipConfig, TextConfig, TowerConfig},
    diffusion::{
        DenoiseBatch, DenoiseSize, Dit, DitConfig, LatentBatch, LatentSize, Lora, Sd3Config, TextWidths,
        Texts, Transformer, TransformerConfig, VaeConfig, VaeDecoder, VideoLatentSize, WanConfig,
        WanVaeConfig, WanVaeDecoder,
    },
    passes,
};
use anyroll_strategy::{
    Precision, Recompute, Zero, ZeroConfig, ZeroStage,
    plan::{
        Passes, Ranks, driver_bytes, held, recorded_activations, scoring_activations, training_activations,
    },
};
use tch::{Device, Kind, Tensor};

use crate::harness::{ADAMW, assert_planned, assert_planned_within, ranks};

const RUNS: Runs = Runs { dtype: DType::F32, on_host: true };
const TEXT: i64 = 10;

fn dit() -> Transformer {
    let config = DitConfig {
        image_size: 16,
        channels: 4,
        patch_size: 2,
        classes: 3,
        hidden_size: 96,
        layers: 3,
        heads: 4,
        intermediate_size: 256,
    };
    Transformer::Dit(Box::new(Dit::new(config).unwrap()))
}

/// Returns Stable Diffusion 3's shape, or 3.5's with a second attention and norms.
fn sd3(is_newer: bool) -> TransformerConfig {
    TransformerConfig::Sd3(Sd3Config {
        sample_size: 16,
        patch_size: 2,
        in_channels: 4,
        out_channels: 4,
        num_layers: 3,
        attention_head_dim: 24,
        num_attention_heads: 4,
        joint_attention_dim: 40,
        pooled_projection_dim: 32,
        pos_embed_max_size: 16,
        dual_attention_layers: if is_newer { vec![0] } else { Vec::new() },
        qk_rms_norm: is_newer,
    })
}

fn wan() -> TransformerConfig {
    TransformerConfig::Wan(WanConfig {
        patch_size: [1, 2, 2],
        num_attention_heads: 4,
        attention_head_dim: 24,
        in_channels: 4,
        text_dim: 40,
        freq_dim: 32,
        ffn_dim: 256,
        num_layers: 3,
        cross_attn_norm: true,
        eps: 1e-6,
        rope_max_seq_len: 32,
        boundary_ratio: None,
    })
}

fn build(config: &TransformerConfig, lora: Option<&[&str]>) -> Transformer {
    let TextWidths { token: width, pooled } = config.text_widths();
    let random = |size: &[i64]| Tensor::ones(size, (Kind::Float, Device::Cpu)) * 0.1;
    let texts = Texts::new(random(&[2, TEXT, width]), pooled.map(|pooled| random(&[2, pooled]))).unwrap();
    let lora = lora.map(|ends| {
        let modules = config.modules().into_iter();
        let modules = modules.filter(|name| ends.iter().any(|end| name.ends_with(end))).collect();
        Lora { rank: 6, scale: 2.0, modules }
    });
    config.build(lora.as_ref(), Some(texts), Device::Cpu).unwrap()
}

#[test]
fn activations_are_those_that_are_planned() {
    const POINTS: usize = 4;
    let attention: &[&str] = &["to_q", "to_k", "to_v", "to_out.0"];
    let image = [1, 16, 16];
    let models = [
        ("dit", dit(), image),
        ("sd3", build(&sd3(false), None), image),
        ("sd3 of 3.5", build(&sd3(true), None), image),
        ("sd3 of 3.5 with adapters", build(&sd3(true), Some(attention)), image),
        ("wan", build(&wan(), None), [3, 8, 12]),
        ("wan with adapters", build(&wan(), Some(attention)), [3, 8, 12]),
    ];
    for (name, model, sides) in models {
        let model = Arc::new(model);
        let [frames, height, width] = sides.map(|side| side as i64);
        let shape =
            [&[POINTS as i64, 4][..], &[frames][..usize::from(frames > 1)], &[height, width]].concat();
        for latents_grad in [false, true] {
            let size = DenoiseSize { points: POINTS, sides, text: TEXT as usize, latents_grad };
            let batch = || DenoiseBatch {
                latents: Tensor::ones(&shape[..], (Kind::Float, Device::Cpu)) * 0.5,
                sigmas: Tensor::full([POINTS as i64], 0.5, (Kind::Float, Device::Cpu)),
                labels: Tensor::zeros([POINTS as i64], (Kind::Int64, Device::Cpu)),
                adapters: true,
                latents_grad,
            };
            for recompute in [Recompute::None, Recompute::Full] {
                for (world_size, stage) in [(1, ZeroStage::Zero0), (2, ZeroStage::Zero3)] {
                    let config = ZeroConfig { recompute, ..stage.into() };
                    ranks(world_size, false, |device, group| {
                        let mut zero =
                            Zero::new(model.clone(), config, Some(ADAMW), device, group, 7).unwrap();
                        let batch = batch();
                        let (_, measured) = tensor_peak_bytes(|| {
                            let (velocity, tape) = zero.record(&batch).unwrap();
                            let grad = velocity.full_like(0.01);
                            zero.backward(&batch, tape, grad).unwrap()
                        })
                        .unwrap();
                        let passes = recorded_activations(&*model, &size, config, RUNS);
                        let what = format!("{name}, {recompute:?}, {stage:?}, {latents_grad}");
                        assert_planned(passes.forward.max(passes.backward), measured, &what);
                    });
                }
            }
            // The memory kept for one backward is also kept for each of several open tapes.
            ranks(1, false, |device, group| {
                let stage = ZeroStage::Zero1;
                let mut zero = Zero::new(model.clone(), stage, Some(ADAMW), device, group, 7).unwrap();
                let batch = batch();
                let of = |passes: usize, zero: &mut Zero<Transformer>| {
                    let record = || (0..passes).map(|_| zero.record(&batch).unwrap()).collect::<Vec<_>>();
                    tensor_peak_bytes(record).unwrap().1
                };
                let measured = of(3, &mut zero) - of(2, &mut zero);
                let kept = recorded_activations(&*model, &size, stage.into(), RUNS).kept;
                assert_planned(kept, measured, &format!("{name}, a tape"));
            });
        }
        let size = DenoiseSize { points: POINTS, sides, text: TEXT as usize, latents_grad: false };
        ranks(1, false, |device, group| {
            let mut zero = Zero::new(model.clone(), ZeroStage::Zero1, Some(ADAMW), device, group, 7).unwrap();
            let batch = DenoiseBatch {
                latents: Tensor::ones(&shape[..], (Kind::Float, Device::Cpu)),
                sigmas: Tensor::full([POINTS as i64], 0.5, (Kind::Float, Device::Cpu)),
                labels: Tensor::zeros([POINTS as i64], (Kind::Int64, Device::Cpu)),
                adapters: true,
                latents_grad: false,
            };
            let (_, measured) = tensor_peak_bytes(|| drop(zero.score(&batch).unwrap())).unwrap();
            assert_planned(scoring_activations(&*model, &size, RUNS), measured, &format!("{name}, scoring"));
            let (_, measured) = tensor_peak_bytes(|| {
                zero.accumulate(&batch, |velocity| Ok(velocity.full_like(0.01))).unwrap()
            })
            .unwrap();
            let planned = training_activations(&*model, &size, ZeroStage::Zero1.into(), RUNS);
            assert_planned(planned, measured, &format!("{name}, without the first block"));
        });
        assert!(model.blocks() > 3);
    }
}

fn random_weights(units: &[Unit]) -> Vec<Vec<Tensor>> {
    let param = |shape: &[i64]| Tensor::randn(shape, (Kind::Float, Device::Cpu)) * 0.05;
    units.iter().map(|unit| unit.params.iter().map(|spec| param(&spec.shape)).collect()).collect()
}

#[test]
fn decoders_take_what_is_planned() {
    let model = VaeDecoder::new(
        VaeConfig {
            latent_channels: 4,
            out_channels: 3,
            block_out_channels: vec![16, 32, 32],
            layers_per_block: 1,
            norm_num_groups: 4,
            scaling_factor: 1.5,
            shift_factor: 0.1,
            use_post_quant_conv: true,
        },
        false,
    )
    .unwrap();
    let weights = random_weights(model.units());
    let weights: Vec<&[Tensor]> = weights.iter().map(Vec::as_slice).collect();
    let size = LatentSize { images: 2, sides: [16, 24] };
    let batch = |latents_grad| LatentBatch {
        latents: Tensor::ones([2, 4, 16, 24], (Kind::Float, Device::Cpu)),
        latents_grad,
    };
    let only = batch(false);
    let (_, measured) =
        tensor_peak_bytes(|| passes::forward(&model, &weights, &only, false).unwrap()).unwrap();
    assert_planned(scoring_activations(&model, &size, RUNS), measured, "images");
    let batch = batch(true);
    let (_, measured) = tensor_peak_bytes(|| {
        let (images, saved) = passes::forward(&model, &weights, &batch, true).unwrap();
        let grad = images.full_like(0.01);
        passes::input_gradient(&model, &weights, &batch, saved, grad).unwrap()
    })
    .unwrap();
    let Passes { forward, backward, .. } = recorded_activations(&model, &size, ZeroStage::Zero3.into(), RUNS);
    assert_planned(forward.max(backward), measured, "images, followed back");
}

#[test]
fn decoders_of_videos_take_what_is_planned() {
    let of_2_1 = WanVaeConfig {
        base_dim: 16,
        z_dim: 4,
        dim_mult: vec![1, 2, 4],
        num_res_blocks: 1,
        temperal_downsample: vec![false, true],
        latents_mean: vec![0.1; 4],
        latents_std: vec![1.5; 4],
        out_channels: 3,
        patch_size: 1,
        is_residual: false,
    };
    let of_2_2 = WanVaeConfig { out_channels: 12, patch_size: 2, is_residual: true, ..of_2_1.clone() };
    for (name, config) in [("2.1", of_2_1), ("2.2", of_2_2)] {
        let model = WanVaeDecoder::new(config).unwrap();
        let weights = random_weights(model.units());
        let weights: Vec<&[Tensor]> = weights.iter().map(Vec::as_slice).collect();
        let size = VideoLatentSize { videos: 2, sides: [5, 8, 12], part: 1 };
        let latents = Tensor::ones([2, 4, 5, 8, 12], (Kind::Float, Device::Cpu));
        let (_, measured) =
            tensor_peak_bytes(|| model.decode(&weights, &latents, 1, false).unwrap()).unwrap();
        assert_planned(model.decoding_bytes(&size, RUNS), measured, name);
        let (_, measured) = tensor_peak_bytes(|| {
            let (videos, tape) = model.decode(&weights, &latents, 1, true).unwrap();
            let grad = videos.full_like(0.01);
            model.latents_grad(&weights, tape.unwrap(), &grad).unwrap()
        })
        .unwrap();
        // The host's convolutions over frames make more copies in backward.
        let planned = model.following_bytes(&size, RUNS);
        assert_planned_within(0.8..=1.05, planned, measured, &format!("{name}, followed back"));
    }
}

#[test]
fn a_clip_takes_what_is_planned() {
    let tower = TowerConfig {
        hidden_size: 32,
        intermediate_size: 96,
        num_hidden_layers: 3,
        num_attention_heads: 4,
        hidden_act: Activation::QuickGelu,
        layer_norm_eps: 1e-5,
    };
    let clip = Clip::new(ClipConfig {
        text_config: TextConfig {
            vocab_size: 50,
            max_position_embeddings: 12,
            eos_token_id: 49,
            tower: tower.clone(),
        },
        vision_config: tower,
        projection_dim: 24,
        image_size: 32,
        patch_size: 4,
        pixels: [[0.5; 3], [0.25; 3]],
    })
    .unwrap();
    let weights = random_weights(std::slice::from_ref(clip.units()[0])).remove(0);
    let images = Tensor::ones([3, 3, 48, 64], (Kind::Float, Device::Cpu));
    let planned = |followed| clip.image_bytes(3, [48, 64], followed, RUNS);
    let (_, measured) = tensor_peak_bytes(|| clip.embed_images(&weights, &images).unwrap()).unwrap();
    assert_planned(planned(false), measured, "a clip");
    let leaf = images.detach().set_requires_grad(true);
    let (_, measured) = tensor_peak_bytes(|| {
        let vectors = clip.embed_images(&weights, &leaf).unwrap();
        let objective = (&vectors * vectors.full_like(0.1)).sum(Kind::Float);
        drop(vectors);
        Tensor::run_backward(&[objective], &[&leaf], false, false)
    })
    .unwrap();
    assert_planned(planned(true), measured, "a clip, followed back");
}

/// Peak memory that the driver reported on H200s (docs/results/memory.md), in GiB: Stable Diffusion 3.5 medium's
/// shape in bf16, adapters of rank 32, micro-batches of 4 images of 512 pixels, doubled by guidance.
const MEASURED: [(usize, ZeroStage, f64); 2] = [(1, ZeroStage::Zero0, 21.9), (2, ZeroStage::Zero2, 22.5)];

#[test]
fn plans_are_what_was_measured_on_gpus() {
    const GIB: f64 = (1 << 30) as f64;
    const ADAPTED: [&str; 8] =
        ["to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out"];
    let config = TransformerConfig::Sd3(Sd3Config {
        sample_size: 128,
        patch_size: 2,
        in_channels: 16,
        out_channels: 16,
        num_layers: 24,
        attention_head_dim: 64,
        num_attention_heads: 24,
        joint_attention_dim: 4096,
        pooled_projection_dim: 2048,
        pos_embed_max_size: 384,
        dual_attention_layers: (0..13).collect(),
        qk_rms_norm: true,
    });
    let is_adapted = |name: &String| ADAPTED.iter().any(|end| name.ends_with(&format!(".attn.{end}")));
    let modules = config.modules().into_iter().filter(is_adapted).collect();
    let model = config.build(Some(&Lora { rank: 32, scale: 2.0, modules }), None, Device::Cpu).unwrap();
    let size = DenoiseSize { points: 8, sides: [1, 64, 64], text: 333, latents_grad: false };
    let runs = Runs { dtype: DType::Bf16, on_host: false };
    for (world_size, stage, measured) in MEASURED {
        let config = ZeroConfig { precision: Precision::Bf16, ..stage.into() };
        let at = Ranks {
            world_size,
            shards: world_size,
            tensor: 1,
            experts: 1,
            granularity_bytes: 2 << 20,
            sums_in_rank_order: true,
        };
        let passes = recorded_activations(&model, &size, config, runs);
        let activations = passes.forward.max(passes.backward);
        let held = held(&model, config, true, at).device();
        let planned = (held + activations + driver_bytes(world_size)) as f64 / GIB;
        assert!((planned / measured - 1.0).abs() < 0.05, "{world_size} GPUs: {planned:.1} GiB");
    }
}
