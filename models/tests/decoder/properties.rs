//! Properties of any decoder, tested without a reference.

use std::path::Path;

use anyroll_close::largest_difference;
use anyroll_models::hf::ModelFolder;
use anyroll_models::{Decoder, DecoderConfig, Model, PackedBatch, QkNorm, Sequence, SlidingWindow, Weights};
use tch::{Device, Kind, Tensor};

use crate::holder::Holder;

fn config() -> DecoderConfig {
    DecoderConfig {
        vocab_size: 19,
        num_key_value_heads: 2,
        head_dim: 6,
        intermediate_size: 36,
        rope_theta: 100.0,
        qkv_bias: true,
        qk_norm: Some(QkNorm::PerHead),
        tie_word_embeddings: true,
        initializer_range: 0.3,
        ..DecoderConfig::plain(2, 20, 4)
    }
}

fn holder(config: DecoderConfig, kind: Kind) -> Holder {
    Holder::of_kind(Decoder::new(config, Device::Cpu).unwrap(), 1, kind)
}

/// Returns sequences of unequal lengths, one without a completion.
fn sequences() -> Vec<(Vec<i64>, usize)> {
    let lengths = [(9, 4), (2, 1), (30, 11), (5, 5), (17, 1)];
    let tokens = |length: i64| (0..length).map(|i| (i * i + 3 * length) % 19).collect();
    lengths.iter().map(|&(length, prompt_len)| (tokens(length), prompt_len)).collect()
}

fn pack(sequences: &[(Vec<i64>, usize)]) -> PackedBatch {
    let sequences: Vec<Sequence> =
        sequences.iter().map(|(tokens, prompt_len)| Sequence { tokens, prompt_len: *prompt_len }).collect();
    PackedBatch::new(&sequences, 0.8, Device::Cpu).unwrap()
}

#[test]
fn packed_sequences_do_not_see_each_other() {
    let holder = holder(config(), Kind::Float);
    let all = sequences();
    let together = holder.forward(&pack(&all), false).0;
    let apart: Vec<_> =
        all.iter().map(|one| holder.forward(&pack(std::slice::from_ref(one)), false).0).collect();
    let logprobs = Tensor::cat(&apart.iter().map(|scores| &scores.logprobs).collect::<Vec<_>>(), 0);
    let entropy = Tensor::cat(&apart.iter().map(|scores| &scores.entropy).collect::<Vec<_>>(), 0);
    assert_eq!(logprobs.size(), [5 + 1 + 19 + 16]);
    assert!(largest_difference(&together.logprobs, &logprobs) <= 1e-5);
    assert!(largest_difference(&together.entropy, &entropy) <= 1e-5);
}

#[test]
fn targets_that_are_kept_score_as_among_all() {
    let (holder, all) = (holder(config(), Kind::Float), sequences());
    let whole = holder.forward(&pack(&all), false).0;
    let kept = [0, 3, 4, 20, 40];
    let batch = pack(&all).keeping(&kept).unwrap();
    assert_eq!(batch.targets(), 5);
    let some = holder.forward(&batch, false).0;
    let kept = Tensor::from_slice(&kept);
    for (some, whole) in [(some.logprobs, whole.logprobs), (some.entropy, whole.entropy)] {
        assert!(largest_difference(&some, &whole.index_select(0, &kept)) <= 1e-6);
    }
    for wrong in [&[1, 1][..], &[2, 0], &[-1], &[41]] {
        let message = pack(&all).keeping(wrong).unwrap_err().to_string();
        assert!(message.contains("ascending indices below 41"), "{message}");
    }
}

#[test]
fn a_token_that_there_is_not_is_refused_before_it_is_looked_up() {
    let holder = holder(config(), Kind::Float);
    // In a prompt, as an input of a completion, as the last target, and negative.
    for (tokens, unknown) in [(&[19, 1, 2], 19), (&[0, 1, 99], 99), (&[0, 50, 2], 50), (&[0, 1, -1], -1)] {
        let batch = pack(&[(vec![0, 18], 1), (tokens.to_vec(), 1)]);
        let forward = |weights: &Weights| holder.decoder.forward(0, weights, None, &batch, false).err();
        let error = holder.with_weights(0, forward).expect("the batch is refused").to_string();
        assert_eq!(error, format!("`tokens`: there is no token {unknown}: the model has tokens 0 to 18"));
    }
}

/// Returns two groups with a common prefix of their prompts: samples, one of them twice, and a prompt without
/// a completion.
fn groups() -> Vec<(Vec<i64>, usize)> {
    let prompts: [&[i64]; 2] = [&[3, 1, 4, 1, 5, 9], &[3, 1, 4, 2, 6]];
    let completions: [&[i64]; 6] = [&[2, 7], &[1, 8, 2, 8, 1], &[1, 8, 2, 8, 1], &[], &[1, 8, 11], &[0]];
    let of = |prompt: &[i64], completion: &&[i64]| ([prompt, completion].concat(), prompt.len());
    prompts.iter().flat_map(|prompt| completions.iter().map(|completion| of(prompt, completion))).collect()
}

#[test]
fn rows_in_common_come_to_the_same() {
    let sequences = groups();
    let sequences: Vec<Sequence> =
        sequences.iter().map(|(tokens, prompt_len)| Sequence { tokens, prompt_len: *prompt_len }).collect();
    let apart = PackedBatch::new(&sequences, 0.8, Device::Cpu).unwrap();
    let shared = PackedBatch::sharing(&sequences, 0.8, Device::Cpu).unwrap();
    assert_eq!(apart.tokens(), (7 + 10 + 10 + 5 + 8 + 6) + (6 + 9 + 9 + 4 + 7 + 5));
    // The rows of each beyond the shared prefix. The sequence without a completion ends before its prompt
    // does.
    assert_eq!(shared.tokens(), [7, 4, 0, 0, 3, 0, 3, 4, 0, 0, 3, 0].iter().sum::<i64>());
    assert_eq!(shared.targets(), apart.targets());
    assert!(shared.with_dropout(&[0; 12]).is_err());

    // Drawn once for both: the generator is the process's, and other tests use it, too.
    let gradient = || Tensor::randn([apart.targets()], (Kind::Double, Device::Cpu));
    let (dlogprobs, dentropy) = (gradient(), gradient());
    let window = SlidingWindow { tokens: 4, layers: vec![false, true] };
    for (qk_norm, sliding_window) in
        [(Some(QkNorm::PerHead), None), (None, None), (None, Some(window.clone()))]
    {
        let config = DecoderConfig { qk_norm, sliding_window, ..config() };
        check_rows_in_common(&config, &sequences, [&dlogprobs, &dentropy]);
        // Strict mode has only one order of sums.
        let decoder = Decoder::new(config, Device::Cpu).unwrap().strict(true);
        let strict = Holder::new(decoder, 1);
        let [apart, shared] = [PackedBatch::new, PackedBatch::sharing]
            .map(|pack| strict.forward(&pack(&sequences, 0.8, Device::Cpu).unwrap(), false).0);
        assert!(apart.logprobs.equal(&shared.logprobs));
    }
    // Differentiated by libtorch.
    for family in ["deepseek_v3", "glm4"] {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/golden/hf").join(family);
        let folder = ModelFolder::open_shape(&folder).unwrap();
        check_rows_in_common(folder.decoder_config(), &sequences, [&dlogprobs, &dentropy]);
    }
}

/// Compares scores and gradients with shared rows and without.
fn check_rows_in_common(config: &DecoderConfig, sequences: &[Sequence], [dlogprobs, dentropy]: [&Tensor; 2]) {
    let [apart, shared] = [PackedBatch::new, PackedBatch::sharing].map(|pack| {
        let batch = pack(sequences, 0.8, Device::Cpu).unwrap();
        let mut holder = holder(config.clone(), Kind::Double);
        let (scores, saved) = holder.forward(&batch, true);
        holder.backward(&batch, saved, dlogprobs.shallow_clone(), Some(dentropy.shallow_clone()));
        (scores, holder)
    });
    assert!(largest_difference(&apart.0.logprobs, &shared.0.logprobs) <= 1e-13);
    assert!(largest_difference(&apart.0.entropy, &shared.0.entropy) <= 1e-13);
    for (unit, (apart, shared)) in apart.1.grads.iter().zip(&shared.1.grads).enumerate() {
        for (param, (apart, shared)) in apart.views().iter().zip(shared.views()).enumerate() {
            let difference = largest_difference(apart, shared);
            assert!(difference <= 1e-12, "unit {unit} param {param}: {difference}");
        }
    }
}

#[test]
fn little_in_common_is_not_shared() {
    let tokens: Vec<i64> = (0..18).collect();
    let tokens = [[&[0, 1], &tokens[2..]].concat(), [&[0, 3], &tokens[2..]].concat()];
    let sequences = tokens.each_ref().map(|tokens| Sequence { tokens, prompt_len: 1 });
    assert_eq!(PackedBatch::sharing(&sequences, 1.0, Device::Cpu).unwrap().tokens(), 34);
}

/// Compares with a directional derivative of every unit's weights in fp64, where composite operations run.
#[test]
fn gradients_equal_finite_differences() {
    let mut holder = holder(config(), Kind::Double);
    let batch = pack(&sequences());
    let (scores, saved) = holder.forward(&batch, true);
    let coefficients = [0, 1].map(|seed| {
        tch::manual_seed(seed);
        Tensor::randn([batch.targets()], (Kind::Double, Device::Cpu))
    });
    let [dlogprobs, dentropy] = &coefficients;
    let loss = |scores: &anyroll_models::model::Scores| {
        (&scores.logprobs * dlogprobs + &scores.entropy * dentropy).sum(None).double_value(&[])
    };
    assert!(loss(&scores).is_finite());
    holder.backward(&batch, saved, dlogprobs.shallow_clone(), Some(dentropy.shallow_clone()));
    for unit in 0..holder.weights.len() {
        for param in 0..holder.weights[unit].len() {
            let direction = holder.weights[unit][param].randn_like();
            let slope = (holder.grads[unit].views()[param].shallow_clone() * &direction).sum(None);
            let mut moved = |distance: f64| {
                let _ = holder.weights[unit][param].g_add_(&(&direction * distance));
                let moved = loss(&holder.forward(&batch, false).0);
                let _ = holder.weights[unit][param].g_add_(&(&direction * -distance));
                moved
            };
            let expected = (moved(1e-5) - moved(-1e-5)) / 2e-5;
            let found = slope.double_value(&[]);
            let error = (found - expected).abs() / expected.abs().max(1.0);
            assert!(error <= 1e-6, "unit {unit} param {param}: {found} {expected}");
        }
    }
}

#[test]
fn bfloat16_stays_near_float32() {
    // Small enough that libtorch multiplies without AMX, which some virtual machines announce but do not run.
    let small = DecoderConfig { hidden_size: 8, head_dim: 2, intermediate_size: 10, ..config() };
    let (wide, narrow) = (holder(small.clone(), Kind::Float), holder(small, Kind::BFloat16));
    let batch = pack(&sequences()[..2]);
    let (wide, narrow) = (wide.forward(&batch, false).0, narrow.forward(&batch, false).0);
    assert_eq!(narrow.logprobs.kind(), Kind::Float);
    let difference = (&wide.logprobs - &narrow.logprobs).abs().mean(None).double_value(&[]);
    assert!(difference < 0.05, "{difference}");
}

#[test]
fn what_is_made_again_is_the_same_and_was_most_of_what_is_kept() {
    // Proportions of a real model.
    let config = DecoderConfig { intermediate_size: 106, qk_norm: None, ..config() };
    for kind in [Kind::Float, Kind::BFloat16] {
        let holder = holder(config.clone(), kind);
        let batch = pack(&sequences());
        let (_, saved) = holder.forward(&batch, true);
        for (block, saved) in saved.into_iter().enumerate() {
            let (whole_bytes, whole) = (saved.bytes(), saved.tensors());
            let thin = holder.decoder.thin(block, saved);
            let inner = (1..=config.num_hidden_layers).contains(&block);
            assert_eq!(thin.bytes() * 2 < whole_bytes, inner, "{} of {whole_bytes}", thin.bytes());
            let again =
                holder.with_weights(block, |weights| holder.decoder.refill(block, weights, thin, &batch));
            let again = again.unwrap().tensors();
            assert!(again.iter().zip(&whole).all(|(again, whole)| again.equal(whole)), "block {block}");
        }
    }
}

/// The vocabulary is large enough that logits come in several chunks.
#[test]
fn kept_logits_give_the_same_gradients() {
    let config = DecoderConfig { vocab_size: 1_000_000, hidden_size: 8, num_hidden_layers: 1, ..config() };
    let batch = pack(&[(vec![3; 60], 1), (vec![5; 60], 1), (vec![7; 60], 1)]);
    let gradients = |keeps_logits: bool| {
        let decoder = Decoder::new(config.clone(), Device::Cpu).unwrap().keeping_logits(keeps_logits);
        let mut holder = Holder::new(decoder, 3);
        let (scores, saved) = holder.forward(&batch, true);
        let bytes = saved.last().unwrap().bytes();
        holder.backward(&batch, saved, scores.logprobs.full_like(0.5), None);
        (bytes, holder.grads)
    };
    let ((made, again), (kept, once)) = (gradients(false), gradients(true));
    assert_eq!(kept - made, 3 * 59 * config.vocab_size as usize * size_of::<f32>());
    for (again, once) in again.iter().zip(&once) {
        assert!(again.views().iter().zip(once.views()).all(|(again, once)| again.equal(once)));
    }
}

#[test]
fn frozen_units_leave_the_other_gradients_as_they_are() {
    let batch = pack(&sequences());
    let mut all = holder(config(), Kind::Float);
    let (scores, saved) = all.forward(&batch, true);
    let dlogprobs = scores.logprobs.full_like(-0.1);
    all.backward(&batch, saved, dlogprobs.shallow_clone(), None);
    for frozen in ["model.embed_tokens", "model.layers.0", "model.layers.1", "lm_head"] {
        let decoder = Decoder::new(config(), Device::Cpu).unwrap().freeze(|unit| unit.name == frozen);
        let mut some = Holder::new(decoder, 1);
        let (_, saved) = some.forward(&batch, true);
        some.backward(&batch, saved, dlogprobs.shallow_clone(), None);
        for (index, unit) in some.decoder.units().iter().enumerate() {
            let grads = some.grads[index].views().iter().zip(all.grads[index].views());
            for (some, all) in grads {
                let untouched = some.isnan().all().int64_value(&[]) == 1;
                assert_eq!(untouched, unit.name == frozen, "{} with {frozen} frozen", unit.name);
                assert!(untouched || some.equal(all), "{} with {frozen} frozen", unit.name);
            }
        }
    }
}

#[test]
fn a_batch_without_targets_has_zero_gradients() {
    let mut holder = holder(config(), Kind::Float);
    let batch = pack(&[(vec![1, 2, 3], 3)]);
    let (scores, saved) = holder.forward(&batch, true);
    assert_eq!(scores.logprobs.numel(), 0);
    holder.backward(&batch, saved, scores.logprobs.zeros_like(), None);
    for grads in &holder.grads {
        assert!(grads.views().iter().all(|grad| grad.abs().max().double_value(&[]) == 0.0));
    }
}
