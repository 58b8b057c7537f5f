//! Recorded decoding steps compared with passes on a CPU. Without a GPU the tests print that they are
//! skipped, and why.

use std::{io::Write, iter::repeat_n, sync::Arc};

use anyroll_backends::{
    BackendKind, DType, Device, DeviceId, Error, Stream, devices, open,
    ops::{self, AttentionParts, Causal, PagedCache, StepRotation},
};
use anyroll_close::largest_difference;
use anyroll_models::{
    Completion, Decoder, DecoderConfig, Engine, ExpertsConfig, KvCache, LoraConfig, LoraTarget, LoraTargets,
    Model, ModulePattern, Multipliers, NormPlaces, OtherRope, PackedBatch, ParamSpec, QkNorm, Request,
    Sample, SamplingParams, Sequence, SlidingWindow,
    generation::{Format, FormatTracker, Limits, Speculation},
    init,
    model::Init,
};
use tch::{Kind, Tensor};

use crate::{holder::Holder, speculation::SPECULATION};

/// Returns a shape with `heads` query heads of width `head_dim` and two key heads.
fn config(heads: i64, head_dim: i64, qk_norm: bool) -> DecoderConfig {
    DecoderConfig {
        vocab_size: 1003,
        num_key_value_heads: 2,
        head_dim,
        intermediate_size: 160,
        rope_theta: 1000.0,
        max_position_embeddings: 1024,
        qkv_bias: !qk_norm,
        qk_norm: qk_norm.then_some(QkNorm::PerHead),
        tie_word_embeddings: qk_norm,
        initializer_range: 0.2,
        ..DecoderConfig::plain(2, 96, heads)
    }
}

/// Adds a bias to every matrix of a layer.
fn biased(config: DecoderConfig) -> DecoderConfig {
    DecoderConfig { qkv_bias: true, o_bias: true, mlp_bias: true, ..config }
}

/// Adds ten experts to these layers, `num_experts_per_tok` per token. Weights are half as large. In bf16 the
/// ordinary operations differ from training as much as recorded steps do: by 0.033 per log-prob, with the
/// other weights and all ten chosen.
fn mixture(config: DecoderConfig, num_experts_per_tok: i64, layers: [bool; 2]) -> DecoderConfig {
    let experts = ExpertsConfig::plain(layers.to_vec(), 10, num_experts_per_tok, 128);
    DecoderConfig { hidden_size: 192, experts: Some(experts), initializer_range: 0.1, ..config }
}

/// Adds Granite's four multipliers, none a power of two.
fn multiplied(config: DecoderConfig) -> DecoderConfig {
    let multipliers = Multipliers {
        embedding: 1.7,
        rounds_embedding: false,
        attention: Some(0.07),
        residual: 0.6,
        logits_scaling: 1.3,
    };
    DecoderConfig { multipliers, ..config }
}

/// Opens the device. Without it, prints a skip message past the harness, which hides the output of passing
/// tests.
fn device(id: DeviceId) -> Option<Arc<dyn Device>> {
    match open(id) {
        Ok(device) => Some(device),
        Err(error @ Error::Unavailable { .. }) => {
            let _ = writeln!(std::io::stderr(), "SKIPPED: {error}");
            None
        }
        Err(error) => panic!("{error}"),
    }
}

/// Uses fused projections like Phi-3's files, and partly rotated heads.
fn fused(config: DecoderConfig) -> DecoderConfig {
    DecoderConfig { fused_projections: true, partial_rotary_factor: 0.75, qkv_bias: false, ..config }
}

/// A decoder, with adapters on some or all of its matrices if there is a `lora`.
#[derive(Clone, Debug)]
struct Shape {
    config: DecoderConfig,
    lora: Option<LoraConfig>,
    strict: bool,
    prefill_tokens: usize,
    eight_bits: bool,
    /// Rounds activations to 8 bits.
    rounds_rows: bool,
    speculation: Option<Speculation>,
}

impl From<DecoderConfig> for Shape {
    fn from(config: DecoderConfig) -> Shape {
        Shape {
            config,
            lora: None,
            strict: false,
            prefill_tokens: 1 << 14,
            eight_bits: false,
            rounds_rows: false,
            speculation: None,
        }
    }
}

impl Shape {
    fn with_adapters(config: DecoderConfig, targets: &[LoraTarget]) -> Shape {
        let lora = LoraConfig::new(6, 9.0, targets.to_vec());
        Shape { lora: Some(lora), ..Shape::from(config) }
    }

    /// Adds adapters with different ranks.
    fn with_patterns(config: DecoderConfig) -> Shape {
        let of = |pattern: &str, rank| (ModulePattern::new(pattern).unwrap(), rank);
        let rank_pattern = vec![of("0.self_attn.q_proj", 16), of("(q|down)_proj", 3), of("1.mlp.*", 8)];
        let lora = LoraConfig { rank_pattern, ..LoraConfig::new(6, 9.0, LoraTarget::ALL.to_vec()) };
        Shape { lora: Some(lora), ..Shape::from(config) }
    }

    /// Adds adapters with magnitudes in the second layer only.
    fn with_dora(config: DecoderConfig, targets: &[LoraTarget]) -> Shape {
        let plain = LoraConfig::new(6, 9.0, Vec::new());
        let targets = LoraTargets::ByLayer([(1, targets.to_vec())].into());
        Shape { lora: Some(LoraConfig { targets, dora: true, ..plain }), ..Shape::from(config) }
    }

    fn decoder(&self, at: tch::Device) -> Decoder {
        let config = self.config.clone();
        let decoder = match &self.lora {
            Some(lora) => Decoder::with_lora(config, lora, at).unwrap(),
            None => Decoder::new(config, at).unwrap(),
        };
        let decoder = decoder.strict(self.strict);
        if self.rounds_rows { decoder.rounding_rows() } else { decoder }
    }

    fn weights(&self, decoder: &Decoder, (at, kind): (tch::Device, Kind)) -> Vec<Vec<Tensor>> {
        let weight = |spec: &ParamSpec| {
            // An untrained adapter would have no effect, and magnitudes of 1 match norms near 1.
            let init = if spec.init == Init::Zeros { Init::Normal { std: 0.2 } } else { spec.init };
            let spec = ParamSpec { init, ..spec.clone() };
            let values = Tensor::from_slice(&init::fill(&spec, 3)).view(spec.shape.as_slice());
            values.to_kind(kind).to_device(at)
        };
        let all = decoder.units().iter().map(|unit| unit.params.iter().map(weight).collect()).collect();
        if self.eight_bits { decoder.all_in_eight_bits(all).unwrap() } else { all }
    }
}

/// Returns prompts of 1 to 600 tokens, and the number of samples of each.
fn prompts(vocab_size: i64) -> impl Iterator<Item = (Vec<i64>, u64)> {
    let prompt =
        move |(number, len): (i64, i64)| (0..len).map(|i| (number * 131 + i * 37) % vocab_size).collect();
    (0..).zip([1, 5, 255, 256, 257, 600, 17, 31, 100, 2]).map(move |of| (prompt(of), 1 + of.0 as u64 % 2))
}

/// Returns their completions on a device, possibly ended by `stop_tokens`.
fn completions(shape: &Shape, at: (DeviceId, DType), params: &SamplingParams) -> Option<Vec<Completion>> {
    held_completions(shape, at, params, |_| None)
}

/// Returns their completions, each with the format that `held` returns for its prompt's index.
fn held_completions(
    shape: &Shape,
    at: (DeviceId, DType),
    params: &SamplingParams,
    format: impl Fn(usize) -> Option<Format>,
) -> Option<Vec<Completion>> {
    let (id, dtype) = at;
    let device = device(id)?;
    let torch = device.torch_device().unwrap().tch();
    let (decoder, config) = (Arc::new(shape.decoder(torch)), &shape.config);
    let weights = shape.weights(&decoder, (torch, dtype.kind()));
    let cache = KvCache::new(config, 400, dtype, &Stream::torch(&device).unwrap()).unwrap();
    let engine = Engine::new(decoder, weights, 0, cache, limits(shape)).unwrap();
    Some(run(engine, config, params, format).0)
}

/// Returns limits to fewer live sequences than samples, so that their number changes.
fn limits(shape: &Shape) -> Limits {
    Limits { prefill_tokens: shape.prefill_tokens, speculation: shape.speculation, ..Limits::new(7) }
}

/// Returns the completions of an engine, and the engine.
fn run(
    engine: Engine,
    config: &DecoderConfig,
    params: &SamplingParams,
    format: impl Fn(usize) -> Option<Format>,
) -> (Vec<Completion>, Engine) {
    let mut engine = if config.experts.is_some() { engine.recording_routes().unwrap() } else { engine };
    for (number, (prompt, count)) in prompts(config.vocab_size).enumerate() {
        let params = SamplingParams { max_new_tokens: 20 + number * 3, ..params.clone() };
        let sample = |sample| Sample { seed: number as u64 * 10 + sample, ..Sample::default() };
        let samples = (0..count).map(sample).collect();
        engine
            .submit(Request { prompt, params: Arc::new(params), stop: None, format: format(number), samples })
            .unwrap();
    }
    let mut completions = vec![Completion::default(); 15];
    engine.run(|id, completion| completions[id as usize] = completion).unwrap();
    assert_eq!(engine.load().free_blocks, engine.load().blocks);
    (completions, engine)
}

/// Returns the log-probs of completions at a temperature by the same device's training forward, in batches.
fn scores(shape: &Shape, at: (DeviceId, DType), completions: &[Completion], how: (f64, usize)) -> Vec<f32> {
    routed_scores(shape, at, completions, how, false).0
}

/// Returns these log-probs, and the share of rows and layers whose recorded experts differ from the router's. If it
/// `replays` them, tokens go to the recorded experts.
fn routed_scores(
    shape: &Shape,
    (id, dtype): (DeviceId, DType),
    completions: &[Completion],
    (temperature, at_once): (f64, usize),
    replays: bool,
) -> (Vec<f32>, f64) {
    let device = device(id).unwrap();
    let torch = device.torch_device().unwrap().tch();
    let decoder = Arc::new(shape.decoder(torch));
    let mut weights = shape.weights(&decoder, (torch, dtype.kind()));
    if !shape.rounds_rows {
        weights.iter_mut().flatten().for_each(|it| *it = ops::widened(it, dtype.kind()).unwrap());
    }
    let holder = Holder { decoder, weights, grads: Vec::new() };
    let prompts =
        prompts(shape.config.vocab_size).flat_map(|(prompt, count)| repeat_n(prompt, count as usize));
    let texts: Vec<(Vec<i64>, usize, &Completion)> = prompts
        .zip(completions)
        .map(|(it, completion)| ([&it[..], &completion.tokens].concat(), it.len(), completion))
        .collect();
    let (mut differing, mut replayed) = (0.0, 0.0);
    let of_batch = |texts: &[(Vec<i64>, usize, &Completion)]| {
        let sequences =
            texts.iter().map(|(tokens, prompt_len, _)| Sequence { tokens, prompt_len: *prompt_len });
        let mut batch = PackedBatch::new(&sequences.collect::<Vec<_>>(), temperature, torch).unwrap();
        if replays {
            let routes: Vec<_> = texts.iter().map(|(_, _, completion)| &completion.routes).collect();
            batch = batch.with_routes(&routes, holder.decoder.route_shape().unwrap()).unwrap().watching(0.0);
        }
        let scores = holder.forward(&batch, false).0;
        if let Some(sums) = batch.router().and_then(|router| router.take().unwrap()) {
            differing += sums.others.double_value(&[3]);
            replayed += sums.others.double_value(&[2]);
        }
        Vec::<f32>::try_from(scores.logprobs.to_device(tch::Device::Cpu)).unwrap()
    };
    let logprobs = texts.chunks(at_once).flat_map(of_batch).collect();
    (logprobs, differing / f64::max(replayed, 1.0))
}

const CPU: DeviceId = DeviceId { backend: BackendKind::CPU, ordinal: 0 };

/// Returns the first device that runs models and is not the host, or one of the first such backend if there
/// is none.
fn gpu() -> DeviceId {
    let kinds = || BackendKind::all().filter(|kind| kind.runs_models() && !kind.is_host());
    let backend = kinds().find(|kind| devices(*kind).is_ok()).or(kinds().next());
    DeviceId { backend: backend.expect("some backend has GPUs"), ordinal: 0 }
}

/// In fp32 the two differ only by the order of sums; if that changes a token, the text diverges.
fn check(shape: impl Into<Shape>, params: &SamplingParams) {
    let shape = shape.into();
    let Some(recorded) = completions(&shape, (gpu(), DType::F32), params) else { return };
    let shape = Shape { speculation: None, ..shape };
    let expected = completions(&shape, (CPU, DType::F32), params).unwrap();
    let (mut same, mut all, mut largest) = (0, 0, 0f32);
    for (recorded, expected) in recorded.iter().zip(&expected) {
        assert_eq!(recorded.policies[0].tokens, recorded.tokens.len());
        all += expected.tokens.len();
        let pairs = recorded.tokens.iter().zip(&expected.tokens);
        let agreed = pairs.take_while(|(recorded, expected)| recorded == expected).count();
        same += agreed;
        let agreed = recorded.logprobs.iter().zip(&expected.logprobs).take(agreed);
        largest = agreed.map(|(recorded, expected)| (recorded - expected).abs()).fold(largest, f32::max);
    }
    eprintln!("{params:?}: {same} of {all} tokens, log-probs within {largest:e}");
    assert!(same * 100 >= all * 95, "{same} of {all} tokens are the same: {params:?}");
    assert!(largest < 2e-3, "log-probs differ by {largest}: {params:?}");
}

fn greedy() -> SamplingParams {
    SamplingParams { temperature: 0.0, ..SamplingParams::default() }
}

#[test]
fn recorded_steps_equal_the_passes() {
    let sizes =
        [(4, 64, false), (14, 64, true), (12, 128, false), (2, 128, true), (4, 16, false), (10, 32, true)];
    for config in sizes.map(|(heads, head_dim, qk_norm)| config(heads, head_dim, qk_norm)) {
        check(config.clone(), &greedy());
        check(config, &SamplingParams::default());
    }
}

/// Returns a shape whose sequences propose tokens.
fn proposing(shape: impl Into<Shape>) -> Shape {
    Shape { speculation: Some(Speculation { sequences: 7, ..SPECULATION }), ..shape.into() }
}

/// Rows of one sequence see each other's keys, in every width of heads, with norms and windows.
#[test]
fn recorded_steps_of_proposed_tokens_equal_the_passes() {
    let sizes =
        [(4, 64, false), (14, 64, true), (12, 128, false), (2, 128, true), (4, 16, false), (10, 32, true)];
    for config in sizes.map(|(heads, head_dim, qk_norm)| config(heads, head_dim, qk_norm)) {
        check(proposing(config.clone()), &greedy());
        check(proposing(config), &warm());
    }
    let sliding_window = Some(SlidingWindow { tokens: 5, layers: vec![true, true] });
    check(proposing(DecoderConfig { sliding_window, ..config(4, 64, false) }), &greedy());
    check(proposing(fused(config(12, 128, false))), &greedy());
    check(proposing(Shape::with_adapters(config(12, 128, true), &LoraTarget::ALL)), &greedy());
    check(proposing(config(4, 64, false)), &SamplingParams { repetition_penalty: 1.3, ..greedy() });
}

/// In 16 bits log-probs are as far from training's as those of steps of one token.
#[test]
fn recorded_steps_of_proposed_tokens_in_16_bits_stay_near_training() {
    let mixture = mixture(config(12, 128, false), 3, [false, true]);
    for config in [config(14, 64, false), config(12, 128, true), config(4, 32, false), mixture] {
        for (dtype, most) in [(DType::Bf16, 0.03), (DType::F16, 0.03 / 8.0)] {
            let (shape, at) = (proposing(config.clone()), (gpu(), dtype));
            let Some(recorded) = completions(&shape, at, &warm()) else { return };
            assert_eq!(completions(&shape, at, &warm()).unwrap(), recorded, "another run differs");
            let expected = scores(&shape, at, &recorded, (0.8, recorded.len()));
            let errors =
                logprobs(&recorded).into_iter().zip(&expected).map(|(a, b)| f64::from((a - b).abs()));
            let mean = errors.sum::<f64>() / expected.len() as f64;
            assert!(mean < most, "{dtype:?}: log-probs differ by {mean} on average: {config:?}");
        }
    }
    if check_strict(proposing(self::config(4, 64, false)), &warm()).is_some() {
        check_strict(proposing(self::config(12, 128, true)), &warm());
    }
}

/// Engines with the steps of one before, whose weights have other values and then also other addresses, and whose cache is
/// smaller, against an engine of its own.
#[test]
fn kept_steps_equal_those_of_a_new_engine() {
    let mixture = mixture(config(4, 64, false), 2, [true, true]);
    for (shape, dtype) in [
        (Shape::from(config(4, 64, false)), DType::F32),
        (Shape::with_dora(config(12, 128, true), &LoraTarget::ALL), DType::Bf16),
        (Shape::from(mixture), DType::Bf16),
    ] {
        let Some(device) = device(gpu()) else { return };
        let torch = device.torch_device().unwrap().tch();
        let decoder = Arc::new(shape.decoder(torch));
        let mut weights = shape.weights(&decoder, (torch, dtype.kind()));
        let copies = |weights: &[Vec<Tensor>], copy: fn(&Tensor) -> Tensor| -> Vec<Vec<Tensor>> {
            weights.iter().map(|unit| unit.iter().map(copy).collect()).collect()
        };
        let cache =
            |blocks| KvCache::new(&shape.config, blocks, dtype, &Stream::torch(&device).unwrap()).unwrap();
        let new = |weights: &[Vec<Tensor>], blocks| {
            let weights = copies(weights, Tensor::shallow_clone);
            Engine::new(decoder.clone(), weights, 0, cache(blocks), limits(&shape)).unwrap()
        };
        let completed = |engine| run(engine, &shape.config, &greedy(), |_| None);

        let (before, engine) = completed(new(&weights, 400));
        let Some(kept) = engine.into_kept().unwrap() else {
            assert!(shape.config.experts.is_some(), "its steps are recorded");
            continue;
        };
        let fit = |decoder, sequences, blocks| kept.fits(decoder, Limits::new(sequences), blocks);
        let other = Arc::new(shape.decoder(torch));
        assert_eq!(
            [fit(&decoder, 7, 300), fit(&decoder, 7, 401), fit(&decoder, 8, 300)],
            [true, false, false]
        );
        assert!(!fit(&other, 7, 300));

        weights.iter_mut().flatten().for_each(|weight| drop(weight.f_mul_scalar_(0.7).unwrap()));
        let (expected, _) = completed(new(&copies(&weights, Tensor::copy), 300));
        assert_ne!(expected, before);
        let with = |kept, weights| Engine::with_kept(kept, weights, 0, 300, limits(&shape)).unwrap();
        let (found, engine) = completed(with(kept, copies(&weights, Tensor::shallow_clone)));
        assert_eq!(found, expected);
        let kept = engine.into_kept().unwrap().expect("its steps were recorded");
        let (found, _) = completed(with(kept, copies(&weights, Tensor::copy)));
        assert_eq!(found, expected);
    }
}

#[test]
fn recorded_steps_with_adapters_and_biases_equal_the_passes() {
    for targets in [&LoraTarget::ALL[..], &[LoraTarget::V, LoraTarget::Up]] {
        check(Shape::with_adapters(config(12, 128, true), targets), &greedy());
    }
    check(Shape::with_patterns(biased(config(12, 128, true))), &greedy());
    for targets in [&LoraTarget::ALL[..], &[LoraTarget::V, LoraTarget::Up, LoraTarget::Down]] {
        check(Shape::with_dora(biased(config(12, 128, true)), targets), &greedy());
    }
    check(biased(config(4, 64, false)), &greedy());
    for targets in [&LoraTarget::FUSED[..], &[LoraTarget::Qkv, LoraTarget::Down], &[LoraTarget::GateUp]] {
        check(Shape::with_adapters(fused(config(12, 128, false)), targets), &greedy());
        check(Shape::with_dora(fused(config(12, 128, false)), targets), &greedy());
    }
}

/// Layers with other rotations or none, norms on branch outputs, and norms over all heads.
#[test]
fn steps_with_other_rotations_and_norms_equal_the_passes() {
    for theta in [None, Some(50.0)] {
        let other_rope = Some(OtherRope { theta, layers: vec![false, true] });
        check(DecoderConfig { other_rope, ..config(4, 64, false) }, &greedy());
    }
    for (head_dim, qk_norm) in [(128, false), (64, true), (16, false)] {
        check(DecoderConfig { partial_rotary_factor: 0.75, ..config(12, head_dim, qk_norm) }, &greedy());
    }
    let (qk_norm, norms) = (Some(QkNorm::Together), NormPlaces::After);
    let behind = |config: DecoderConfig| DecoderConfig { qk_norm, norms, ..config };
    check(behind(config(4, 64, false)), &greedy());
    check(DecoderConfig { qk_norm, ..config(12, 128, false) }, &greedy());
    check(Shape::with_adapters(behind(biased(config(4, 64, false))), &LoraTarget::ALL), &greedy());
    check_strict(behind(config(4, 64, false)), &warm());
}

#[test]
fn steps_that_multiply_equal_the_passes() {
    check(multiplied(config(4, 64, false)), &greedy());
    check(multiplied(config(12, 128, true)), &SamplingParams::default());
    check(Shape::with_adapters(multiplied(biased(config(4, 64, false))), &LoraTarget::ALL), &greedy());
    check_strict(multiplied(biased(config(4, 64, false))), &warm());
}

/// Windows within a run, across splits, and in one of the two layers.
#[test]
fn recorded_steps_with_windows_equal_the_passes() {
    for (tokens, layers) in [(5, [true, true]), (300, [true, true]), (100, [false, true])] {
        let sliding_window = Some(SlidingWindow { tokens, layers: layers.to_vec() });
        check(DecoderConfig { sliding_window, ..config(4, 64, false) }, &greedy());
    }
}

#[test]
fn recorded_steps_choose_as_the_passes_do() {
    let free = SamplingParams::default();
    let choices = [
        SamplingParams { temperature: 0.7, ..free.clone() },
        SamplingParams { top_k: 5, ..free.clone() },
        SamplingParams { top_p: 0.8, ..free.clone() },
        SamplingParams { min_p: 0.1, ..free.clone() },
        SamplingParams { top_k: 50, top_p: 0.9, min_p: 0.02, temperature: 1.3, ..free.clone() },
        SamplingParams { stop_tokens: (0..100).collect(), ..free.clone() },
        SamplingParams { repetition_penalty: 1.3, ..free.clone() },
        SamplingParams { repetition_penalty: 1.3, ..greedy() },
        SamplingParams { repetition_penalty: 1.2, top_k: 20, top_p: 0.9, temperature: 0.8, ..free.clone() },
        SamplingParams { repetition_penalty: 0.8, min_p: 0.05, ..free },
    ];
    choices.iter().for_each(|params| check(config(4, 64, false), params));
}

/// Every second prompt has a format that only the host knows; the others are unaffected.
#[test]
fn recorded_steps_keep_to_a_format() {
    /// Tokens that end with 0, or whose remainder by 7 is the number of earlier tokens.
    struct Counted(i64);
    impl FormatTracker for Counted {
        fn allowed(&mut self) -> Result<Vec<u32>, String> {
            let fits = |token: i64| token % 7 == self.0 % 7;
            Ok((0..16)
                .map(|word| (0..32).filter(|bit| fits(word * 32 + bit)).map(|bit| 1u32 << bit).sum())
                .collect())
        }
        fn push(&mut self, _: i64) -> Result<(), String> {
            self.0 += 1;
            Ok(())
        }
    }
    let counted = || Format(Arc::new(|| Box::new(Counted(0))));
    let shape = Shape::from(config(4, 64, false));
    for params in
        [greedy(), warm(), SamplingParams { top_k: 40, top_p: 0.9, repetition_penalty: 1.2, ..warm() }]
    {
        let at = (gpu(), DType::F32);
        let format = |number| (number % 2 == 0).then(counted);
        let Some(mixed) = held_completions(&shape, at, &params, format) else { return };
        let free = completions(&shape, at, &params).unwrap();
        let numbers = prompts(shape.config.vocab_size).enumerate();
        let numbers = numbers.flat_map(|(number, (_, count))| repeat_n(number, count as usize));
        for ((number, mixed), free) in numbers.zip(&mixed).zip(&free) {
            match number % 2 {
                0 => {
                    let mut at = 0..;
                    let keeps = |&token: &i64| token < 512 && token % 7 == at.next().unwrap() % 7;
                    assert!(mixed.tokens.iter().all(keeps), "{params:?}: {:?}", mixed.tokens);
                }
                _ => assert_eq!(mixed.tokens, free.tokens, "{params:?}"),
            }
        }
        let temperature = if params.temperature == 0.0 { 1.0 } else { params.temperature };
        let expected = scores(&shape, at, &mixed, (temperature, 5));
        let found = logprobs(&mixed);
        let apart = found.iter().zip(&expected).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
        assert!(found.len() == expected.len() && apart < 2e-3, "{params:?}: {apart}");
    }
}

/// In 16 bits the same device's training forward is the reference. fp16 has three bits more than bf16.
#[test]
fn recorded_steps_in_16_bits_stay_near_training() {
    let adapted = Shape::with_adapters(config(12, 128, false), &LoraTarget::ALL);
    let scaled = Shape::with_dora(config(12, 128, false), &LoraTarget::ALL);
    let of_fused = Shape::with_adapters(fused(config(12, 128, false)), &LoraTarget::FUSED);
    let plain = [config(14, 64, false), config(12, 128, true), config(4, 32, false)];
    let behind = DecoderConfig {
        qk_norm: Some(QkNorm::Together),
        norms: NormPlaces::After,
        hidden_size: 256,
        intermediate_size: 512,
        ..config(4, 64, false)
    };
    let all_experts = mixture(config(4, 64, true), 10, [true, true]);
    let some_experts = mixture(config(12, 128, false), 3, [false, true]);
    let windowed = DecoderConfig {
        qk_norm: Some(QkNorm::Together),
        sliding_window: Some(SlidingWindow { tokens: 100, layers: vec![true, true] }),
        ..mixture(config(4, 64, false), 10, [true, true])
    };
    let multiplied = multiplied(config(4, 64, true));
    let others = [biased(config(4, 64, true)), multiplied, behind, all_experts, some_experts, windowed];
    let plain = plain.into_iter().chain(others).map(Shape::from);
    let shapes: Vec<Shape> = plain.chain([adapted, scaled, of_fused]).collect();
    for (dtype, most) in [(DType::Bf16, 0.03), (DType::F16, 0.03 / 8.0)] {
        // A penalty affects the choice, but not the log-probs.
        for (shape, repetition_penalty) in shapes.iter().flat_map(|shape| [1.0, 1.3].map(|it| (shape, it))) {
            let params = SamplingParams { repetition_penalty, ..SamplingParams::default() };
            let at = (gpu(), dtype);
            let Some(recorded) = completions(shape, at, &params) else { return };
            let expected = scores(shape, at, &recorded, (1.0, recorded.len()));
            let found: Vec<f32> = recorded.into_iter().flat_map(|completion| completion.logprobs).collect();
            assert_eq!(found.len(), expected.len());
            let errors =
                found.iter().zip(&expected).map(|(found, expected)| f64::from((found - expected).abs()));
            let mean = errors.sum::<f64>() / found.len() as f64;
            eprintln!("{dtype:?}, {params:?}: log-probs differ by {mean:.5} on average");
            assert!(mean < most, "{dtype:?}: log-probs differ by {mean} on average: {params:?}, {shape:?}");
        }
    }
}

/// In fp32 the experts are those of training's router. In 16 bits some are not, and log-probs are nearer with them.
#[test]
fn recorded_steps_carry_the_experts_of_their_tokens() {
    let all = mixture(config(4, 64, true), 3, [true, true]);
    let some = mixture(config(12, 128, false), 3, [false, true]);
    for (config, dtype) in
        [all, some].iter().flat_map(|it| [DType::F32, DType::Bf16].map(|dtype| (it, dtype)))
    {
        let (shape, at) = (Shape::from(config.clone()), (gpu(), dtype));
        let Some(recorded) = completions(&shape, at, &SamplingParams::default()) else { return };
        let decoder = shape.decoder(tch::Device::Cpu);
        let of_routes = decoder.route_shape().unwrap();
        let prompts = prompts(config.vocab_size).flat_map(|(it, count)| repeat_n(it, count as usize));
        for (completion, prompt) in recorded.iter().zip(prompts) {
            assert_eq!(completion.routes.tokens(of_routes), prompt.len() + completion.tokens.len() - 1);
        }
        let found: Vec<f32> = recorded.iter().flat_map(|completion| completion.logprobs.clone()).collect();
        let mean = |expected: &[f32]| {
            let errors = found.iter().zip(expected).map(|(found, it)| f64::from((found - it).abs()));
            errors.sum::<f64>() / found.len() as f64
        };
        let how = (1.0, recorded.len());
        let own = mean(&scores(&shape, at, &recorded, how));
        let (replayed, differing) = routed_scores(&shape, at, &recorded, how, true);
        let replayed = mean(&replayed);
        eprintln!(
            "{dtype:?}: {differing:.5} of choices differ, log-probs by {own:.6}, replayed {replayed:.6}"
        );
        match dtype {
            DType::F32 => assert!(differing < 1e-3 && replayed < 1e-4, "{differing}, {replayed}"),
            _ => assert!(differing < 0.05 && replayed < own, "{differing}, {replayed} and {own}"),
        }
    }
}

/// The training forward with the values that the weights in 8 bits are is the reference.
#[test]
fn recorded_steps_in_eight_bits_stay_near_training_with_their_values() {
    let sizes = |config: DecoderConfig| DecoderConfig {
        hidden_size: 256,
        intermediate_size: 512,
        initializer_range: 0.1,
        ..config
    };
    let adapted = Shape::with_adapters(sizes(config(12, 128, false)), &LoraTarget::ALL);
    let others = [sizes(config(4, 64, true)), biased(sizes(config(12, 128, false)))].map(Shape::from);
    let shapes = others.into_iter().chain([adapted]).map(|shape| Shape { eight_bits: true, ..shape });
    // After sums in another order some activations round to the other neighbour.
    let both = shapes.clone().map(|shape| (Shape { rounds_rows: true, ..shape }, DType::Bf16, 0.12));
    let weights = shapes.flat_map(|shape| {
        [(DType::Bf16, 0.03), (DType::F16, 0.03 / 8.0)].map(|(dtype, most)| (shape.clone(), dtype, most))
    });
    for (shape, dtype, most) in weights.chain(both) {
        let at = (gpu(), dtype);
        let Some(recorded) = completions(&shape, at, &SamplingParams::default()) else { return };
        let expected = scores(&shape, at, &recorded, (1.0, recorded.len()));
        let rounded = scores(
            &Shape { eight_bits: false, rounds_rows: false, ..shape.clone() },
            at,
            &recorded,
            (1.0, recorded.len()),
        );
        let found: Vec<f32> = recorded.into_iter().flat_map(|completion| completion.logprobs).collect();
        let mean = |others: &[f32]| {
            let apart = found.iter().zip(others).map(|(a, b)| f64::from((a - b).abs()));
            apart.sum::<f64>() / found.len() as f64
        };
        let [apart, by_rounding] = [mean(&expected), mean(&rounded)];
        eprintln!("{dtype:?}: log-probs differ by {apart:.5} on average, by the 8 bits {by_rounding:.5}");
        assert!(apart < most && apart < by_rounding, "{dtype:?}: {apart}, {by_rounding}: {shape:?}");
    }
}

/// Checks that steps have training's log-probs bitwise, in every precision, for any batch size and any
/// chunking of prompts. Returns `None` without a GPU.
fn check_strict(shape: impl Into<Shape>, params: &SamplingParams) -> Option<()> {
    let shape = Shape { strict: true, ..shape.into() };
    for dtype in [DType::F32, DType::Bf16, DType::F16] {
        let at = (gpu(), dtype);
        let sampled = completions(&shape, at, params)?;
        let (found, what) = (logprobs(&sampled), format!("{dtype:?}, {:?}", shape.config));
        for at_once in [1, 4, sampled.len()] {
            let expected = scores(&shape, at, &sampled, (params.temperature, at_once));
            assert_eq!(expected, found, "{at_once} in a batch: {what}");
        }
        let in_pieces = Shape { prefill_tokens: 48, ..shape.clone() };
        assert_eq!(completions(&in_pieces, at, params)?, sampled, "in pieces: {what}");
    }
    Some(())
}

fn logprobs(completions: &[Completion]) -> Vec<f32> {
    completions.iter().flat_map(|completion| completion.logprobs.clone()).collect()
}

fn warm() -> SamplingParams {
    SamplingParams { temperature: 0.8, ..SamplingParams::default() }
}

#[test]
fn strict_steps_have_the_log_probs_of_training_to_the_bit() {
    let shape = Shape::from(config(4, 64, false));
    if check_strict(shape.clone(), &warm()).is_none() {
        return;
    }
    check_strict(config(12, 128, true), &warm());
    for dtype in [DType::Bf16, DType::F16] {
        let at = (gpu(), dtype);
        let fast = completions(&shape, at, &warm()).unwrap();
        assert_ne!(scores(&shape, at, &fast, (0.8, 4)), logprobs(&fast), "strict has no effect in {dtype:?}");
    }
}

#[test]
fn strict_steps_with_windows_and_products_of_our_own_have_the_log_probs_of_training() {
    let window = SlidingWindow { tokens: 100, layers: vec![true, false] };
    check_strict(DecoderConfig { sliding_window: Some(window), ..config(10, 32, true) }, &warm());
    // Large enough that `product_kernels` computes some of the products.
    let wide =
        DecoderConfig { vocab_size: 1024, hidden_size: 256, intermediate_size: 512, ..config(12, 64, true) };
    check_strict(wide, &warm());
}

#[test]
fn strict_steps_with_adapters_and_biases_have_the_log_probs_of_training() {
    check_strict(Shape::with_adapters(config(12, 128, false), &LoraTarget::ALL), &warm());
    check_strict(Shape::with_patterns(biased(config(4, 64, true))), &warm());
    check_strict(Shape::with_dora(biased(config(4, 64, true)), &LoraTarget::ALL), &warm());
    check_strict(Shape::with_adapters(fused(config(12, 128, false)), &LoraTarget::FUSED), &warm());
    check_strict(Shape::with_dora(fused(config(4, 64, false)), &LoraTarget::FUSED), &warm());
}

/// Lengths around those of runs and splits, and for each row the first row of its sequence, if several are of one.
const LENGTHS: [i64; 15] = [1, 7, 15, 16, 17, 64, 65, 255, 256, 257, 300, 511, 512, 513, 700];
const FIRST_ROWS: [i64; 15] = [0, 1, 2, 2, 2, 5, 5, 7, 7, 7, 10, 11, 11, 11, 14];

/// Tests attention over blocks in any order, with a sequence for each row and with several rows of one.
#[test]
fn a_step_of_attention_is_rotation_and_attention() {
    let Some(device) = device(gpu()) else { return };
    let at = device.torch_device().unwrap().tch();
    for (kind, tolerance) in [(Kind::Float, 1e-5), (Kind::BFloat16, 8e-3), (Kind::Half, 1e-3)] {
        for (heads, kv_heads, dim, has_norms) in [
            (12, 2, 128, false),
            (14, 2, 64, true),
            (28, 4, 128, true),
            (8, 8, 64, false),
            (20, 2, 64, true),
            (6, 2, 128, false),
            (4, 4, 16, true),
            (18, 2, 32, false),
        ] {
            for together in [false, true] {
                check_attention((kind, at), [heads, kv_heads, dim], (has_norms, together), tolerance);
            }
        }
    }
}

/// A step writes its own tokens to the cache, bitwise equal to training's operations. Before that they are NaN, like everything
/// after a sequence.
fn check_attention(
    (kind, at): (Kind, tch::Device),
    [heads, kv_heads, dim]: [i64; 3],
    (has_norms, together): (bool, bool),
    tolerance: f64,
) {
    let (rows, table_len) = (LENGTHS.len() as i64, 44);
    let random = |size: &[i64]| Tensor::randn(size, (kind, at));
    let qkv = random(&[rows, heads + 2 * kv_heads, dim]);
    let tables = Tensor::randperm(rows * table_len, (Kind::Int64, at)).view([rows, table_len]) + 1;
    let first_rows = Tensor::from_slice(&FIRST_ROWS).to_device(at);
    let tables = if together { tables.index_select(0, &first_rows) } else { tables };
    let lengths = Tensor::from_slice(&LENGTHS).to_device(at);
    let (narrow_tables, positions) = (tables.to_kind(Kind::Int), &lengths - 1);
    let blocks = tables.gather(1, &positions.floor_divide_scalar(16).unsqueeze(1), false).squeeze_dim(1);
    let places: Tensor = blocks * 16 + positions.remainder(16);
    let behind: Vec<Tensor> = (0..16).map(|i| &places + i).collect();
    let behind = Tensor::stack(&behind, 1).masked_select(
        &(positions.remainder(16).unsqueeze(1) + Tensor::arange(16, (Kind::Int64, at))).lt(16),
    );
    let caches = [(); 2].map(|()| random(&[rows * table_len + 1, 16, kv_heads, dim]));
    let tokens_of = |cache: &Tensor| cache.view([-1, kv_heads, dim]);
    let forget = || caches.iter().for_each(|cache| drop(tokens_of(cache).index_fill_(0, &behind, f64::NAN)));

    let table = ops::rope_table(704, &ops::rope_frequencies(dim, 1e4), 1.0, at).unwrap();
    let weights = [(); 2].map(|()| random(&[dim]));
    let norms = has_norms.then_some((&weights[0], &weights[1], 1e-6));
    let turned = |from: i64, count: i64, norm: &Tensor| {
        let x = qkv.narrow(1, from, count);
        let mut x = if has_norms { ops::rms_norm(&x, norm, 1e-6).unwrap().0 } else { x.copy() };
        ops::rope_(&mut x, &positions, &table, ops::Rotation::Forward).unwrap();
        x
    };
    let queries = turned(0, heads, &weights[0]);
    let own = [turned(heads, kv_heads, &weights[1]), qkv.narrow(1, heads + kv_heads, kv_heads)];

    let cache = PagedCache { keys: &caches[0], values: &caches[1], tables: &narrow_tables };
    let rotation = StepRotation { norms, table: &table };
    let mut parts = AttentionParts::new(rows, heads, dim, table_len * 16, at).unwrap();
    for window in [None, Some(1), Some(16), Some(100), Some(256), Some(500), Some(701)] {
        let what = format!("{kind:?} {heads}/{kv_heads} x {dim}, {window:?}, together: {together}");
        let causal = Causal { scale: 0.125, window };
        let mut found = Tensor::zeros([rows, heads * dim], (kind, at));
        forget();
        let mut qkv = qkv.copy();
        if together {
            ops::turn_rows_(&mut qkv, rotation, &positions, cache).unwrap();
        }
        let rotation = (!together).then_some(rotation);
        ops::attend_into(&qkv, rotation, &positions, cache, causal, &mut parts, &mut found).unwrap();
        for (cache, own) in caches.iter().zip(&own) {
            assert!(tokens_of(cache).index_select(0, &places).equal(own), "{what}");
        }
        let [queries, keys, values] =
            [&queries, &caches[0], &caches[1]].map(|tensor| tensor.to_kind(Kind::Float));
        let expected =
            ops::composite::decode_attention(&queries, &keys, &values, &tables, &lengths, causal).unwrap();
        let error = largest_difference(&found, &expected);
        let scale = expected.abs().max().double_value(&[]);
        eprintln!("{what}: {error:e} of {scale}");
        assert!(error <= tolerance * scale, "{what}: {error:e} of {scale}");
    }
}
