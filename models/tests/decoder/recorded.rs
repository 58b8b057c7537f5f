//! Recorded decoding steps against the passes of a CPU. Without a GPU the tests say that they are skipped, and why.

use std::{io::Write, sync::Arc};

use anyroll_backends::{
    BackendKind, DType, Device, DeviceId, Error, Stream, devices, open,
    ops::{self, AttentionParts, Causal, PagedCache},
};
use anyroll_models::{
    Completion, Decoder, DecoderConfig, Engine, KvCache, LoraConfig, LoraTarget, Model, Output, PackedBatch,
    ParamSpec, Request, RopeScaling, Sample, SamplingParams, Sequence, SlidingWindow, Weights,
    generation::Limits, init, model::Init,
};
use tch::{Kind, Tensor};

/// `heads` query heads of width `head_dim` on two key heads.
fn config(heads: i64, head_dim: i64, qk_norm: bool) -> DecoderConfig {
    DecoderConfig {
        vocab_size: 1003,
        hidden_size: 96,
        num_hidden_layers: 2,
        num_attention_heads: heads,
        num_key_value_heads: 2,
        head_dim,
        intermediate_size: 160,
        rms_norm_eps: 1e-6,
        rope_theta: 1000.0,
        rope_scaling: RopeScaling::None,
        sliding_window: None,
        max_position_embeddings: 1024,
        qkv_bias: !qk_norm,
        qk_norm,
        tie_word_embeddings: qk_norm,
        initializer_range: 0.2,
    }
}

/// The device; without it says so past the harness, which keeps what passing tests print.
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

/// A decoder, with adapters on some or all of its matrices where it says so.
#[derive(Clone)]
struct Shape {
    config: DecoderConfig,
    lora: Option<LoraConfig>,
    strict: bool,
    prefill_tokens: usize,
}

impl From<DecoderConfig> for Shape {
    fn from(config: DecoderConfig) -> Shape {
        Shape { config, lora: None, strict: false, prefill_tokens: 1 << 14 }
    }
}

impl Shape {
    fn with_adapters(config: DecoderConfig, targets: &[LoraTarget]) -> Shape {
        let lora = LoraConfig { rank: 6, alpha: 9.0, targets: targets.to_vec(), dropout: 0.0 };
        Shape { lora: Some(lora), ..Shape::from(config) }
    }

    fn decoder(&self, at: tch::Device) -> Decoder {
        let config = self.config.clone();
        let decoder = match &self.lora {
            Some(lora) => Decoder::with_lora(config, lora, at).unwrap(),
            None => Decoder::new(config, at).unwrap(),
        };
        decoder.strict(self.strict)
    }
}

fn weights(decoder: &Decoder, kind: Kind, at: tch::Device) -> Vec<Vec<Tensor>> {
    let weight = |spec: &ParamSpec| {
        // An adapter that begins as none would show nothing.
        let init = if spec.init == Init::Zeros { Init::Normal { std: 0.2 } } else { spec.init };
        let spec = ParamSpec { init, ..spec.clone() };
        let values = Tensor::from_slice(&init::fill(&spec, 3)).view(spec.shape.as_slice());
        values.to_kind(kind).to_device(at)
    };
    decoder.units().iter().map(|unit| unit.params.iter().map(weight).collect()).collect()
}

fn prompts(config: &DecoderConfig) -> Vec<Vec<i64>> {
    let lengths = [1, 5, 255, 256, 257, 600, 17, 31, 100, 2];
    let token = |number: usize, i: i64| (number as i64 * 131 + i * 37) % config.vocab_size;
    let prompt = |(number, len): (usize, i64)| (0..len).map(|i| token(number, i)).collect();
    lengths.into_iter().enumerate().map(prompt).collect()
}

/// Completions of [`prompts`] on a device, whose tokens may be cut short by `stop_tokens`.
fn completions(shape: &Shape, at: (DeviceId, DType), params: &SamplingParams) -> Option<Vec<Completion>> {
    let (id, dtype) = at;
    let device = device(id)?;
    let torch = device.torch_device().unwrap().tch().unwrap();
    let (decoder, config) = (Arc::new(shape.decoder(torch)), &shape.config);
    let weights = weights(&decoder, dtype.kind(), torch);
    let cache = KvCache::new(config, 400, dtype, &Stream::torch(&device).unwrap()).unwrap();
    // Fewer live sequences than there are, so that their number changes on the way.
    let limits = Limits { sequences: 7, prefill_tokens: shape.prefill_tokens };
    let mut engine = Engine::new(decoder, weights, 0, cache, limits).unwrap();
    for (number, prompt) in prompts(config).into_iter().enumerate() {
        let params = SamplingParams { max_new_tokens: 20 + number * 3, ..params.clone() };
        let sample = |sample| Sample { seed: number as u64 * 10 + sample, begun: Completion::default() };
        let samples = (0..1 + number as u64 % 2).map(sample).collect();
        engine.submit(Request { prompt, params: Arc::new(params), stop: None, samples }).unwrap();
    }
    let mut completions = vec![Completion::default(); 15];
    engine.run(|id, completion| completions[id as usize] = completion).unwrap();
    assert_eq!(engine.load().free_blocks, engine.load().blocks);
    Some(completions)
}

const CPU: DeviceId = DeviceId { backend: BackendKind::Cpu, ordinal: 0 };

/// The first device that runs models and is no host; of the first such backend where there is none.
fn gpu() -> DeviceId {
    let kinds = || BackendKind::ALL.into_iter().filter(|kind| kind.runs_models() && !kind.is_host());
    let backend = kinds().find(|kind| devices(*kind).is_ok()).or(kinds().next());
    DeviceId { backend: backend.expect("some backend has GPUs"), ordinal: 0 }
}

/// In fp32 the two differ by the order of sums alone; where that tips a token, what comes after is another text.
fn check(shape: impl Into<Shape>, params: &SamplingParams) {
    let shape = shape.into();
    let Some(recorded) = completions(&shape, (gpu(), DType::F32), params) else { return };
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

#[test]
fn recorded_steps_equal_the_passes() {
    let greedy = SamplingParams { temperature: 0.0, ..SamplingParams::default() };
    let free = SamplingParams::default();
    let sizes =
        [(4, 64, false), (14, 64, true), (12, 128, false), (2, 128, true), (4, 16, false), (10, 32, true)];
    for config in sizes.map(|(heads, head_dim, qk_norm)| config(heads, head_dim, qk_norm)) {
        check(config.clone(), &greedy);
        check(config, &free);
    }
    for targets in [&LoraTarget::ALL[..], &[LoraTarget::V, LoraTarget::Up]] {
        check(Shape::with_adapters(config(12, 128, true), targets), &greedy);
    }
    // Windows within a run, across splits, and of one layer of the two.
    for (tokens, layers) in [(5, [true, true]), (300, [true, true]), (100, [false, true])] {
        let sliding_window = Some(SlidingWindow { tokens, layers: layers.to_vec() });
        check(DecoderConfig { sliding_window, ..config(4, 64, false) }, &greedy);
    }
    let config = config(4, 64, false);
    let choices = [
        SamplingParams { temperature: 0.7, ..free.clone() },
        SamplingParams { top_k: 5, ..free.clone() },
        SamplingParams { top_p: 0.8, ..free.clone() },
        SamplingParams { min_p: 0.1, ..free.clone() },
        SamplingParams { top_k: 50, top_p: 0.9, min_p: 0.02, temperature: 1.3, ..free.clone() },
        SamplingParams { stop_tokens: (0..100).collect(), ..free.clone() },
        // Not recorded: the tokens are chosen on the host.
        SamplingParams { repetition_penalty: 1.3, ..free },
    ];
    choices.iter().for_each(|params| check(config.clone(), params));
}

/// In bf16 the passes of the same device are the reference: a penalty next to none makes the engine take them.
#[test]
fn recorded_steps_in_bf16_stay_near_the_passes() {
    let adapted = Shape::with_adapters(config(12, 128, false), &LoraTarget::ALL);
    let plain = [config(14, 64, false), config(12, 128, true), config(4, 32, false)].map(Shape::from);
    for shape in plain.into_iter().chain([adapted]) {
        let params = SamplingParams::default();
        let passes = SamplingParams { repetition_penalty: 1.0 + 1e-7, ..params.clone() };
        let Some(recorded) = completions(&shape, (gpu(), DType::Bf16), &params) else { return };
        let expected = completions(&shape, (gpu(), DType::Bf16), &passes).unwrap();
        let (mut sum, mut count) = (0.0, 0);
        for (recorded, expected) in recorded.iter().zip(&expected) {
            let pairs = recorded.tokens.iter().zip(&expected.tokens);
            let agreed = pairs.take_while(|(recorded, expected)| recorded == expected).count();
            let agreed = recorded.logprobs.iter().zip(&expected.logprobs).take(agreed);
            for (recorded, expected) in agreed {
                sum += f64::from((recorded - expected).abs());
                count += 1;
            }
        }
        let mean = sum / f64::from(count);
        eprintln!("bf16: log-probs of {count} tokens differ by {mean:.4} on average");
        assert!(count > 20 && mean < 0.03, "log-probs of {count} tokens differ by {mean} on average");
    }
}

/// Log-probs of completions by training's forward, of so many in a batch.
fn trained(shape: &Shape, dtype: DType, completions: &[Completion], at_once: usize) -> Vec<f32> {
    let device = device(gpu()).unwrap();
    let torch = device.torch_device().unwrap().tch().unwrap();
    let (decoder, prompts) = (shape.decoder(torch), prompts(&shape.config));
    let weights = weights(&decoder, dtype.kind(), torch);
    // Every second prompt has two samples.
    let prompts = prompts.iter().enumerate().flat_map(|(number, it)| vec![it; 1 + number % 2]);
    let texts: Vec<(Vec<i64>, usize)> = prompts
        .zip(completions)
        .map(|(prompt, completion)| ([&prompt[..], &completion.tokens].concat(), prompt.len()))
        .collect();
    let mut found = Vec::new();
    for part in texts.chunks(at_once) {
        let sequences: Vec<Sequence> =
            part.iter().map(|(tokens, prompt_len)| Sequence { tokens, prompt_len: *prompt_len }).collect();
        let batch = PackedBatch::new(&sequences, 0.8, torch).unwrap();
        let mut hidden = None;
        for block in 0..decoder.blocks() {
            let units: Vec<&[Tensor]> =
                decoder.units_of(block).iter().map(|&unit| weights[unit].as_slice()).collect();
            let output = decoder.forward(block, &Weights::new(&units), hidden.as_ref(), &batch, false);
            match output.unwrap().0 {
                Output::Hidden(x) => hidden = Some(x),
                Output::Scores(scores) => {
                    found.extend(Vec::<f32>::try_from(scores.logprobs.to_device(tch::Device::Cpu)).unwrap());
                }
            }
        }
    }
    found
}

#[test]
fn strict_steps_have_the_log_probs_of_training_to_the_bit() {
    let params = SamplingParams { temperature: 0.8, ..SamplingParams::default() };
    let window = SlidingWindow { tokens: 100, layers: vec![true, false] };
    // Of the last one the products are those of `product_kernels` as well.
    let wide =
        DecoderConfig { vocab_size: 1024, hidden_size: 256, intermediate_size: 512, ..config(12, 64, true) };
    let shapes = [
        Shape::from(config(4, 64, false)),
        Shape::from(config(12, 128, true)),
        Shape::from(DecoderConfig { sliding_window: Some(window), ..config(10, 32, true) }),
        Shape::with_adapters(config(12, 128, false), &LoraTarget::ALL),
        Shape::from(wide),
    ];
    for (shape, dtype) in shapes.iter().flat_map(|shape| [(shape, DType::F32), (shape, DType::Bf16)]) {
        let strict = Shape { strict: true, ..shape.clone() };
        let Some(sampled) = completions(&strict, (gpu(), dtype), &params) else { return };
        let found: Vec<f32> = sampled.iter().flat_map(|it| it.logprobs.clone()).collect();
        let what = format!("{dtype:?}, {:?}", shape.config);
        for at_once in [1, 4, sampled.len()] {
            assert_eq!(trained(&strict, dtype, &sampled, at_once), found, "{at_once} in a batch: {what}");
        }
        let in_pieces = Shape { prefill_tokens: 48, ..strict.clone() };
        assert_eq!(completions(&in_pieces, (gpu(), dtype), &params).unwrap(), sampled, "in pieces: {what}");
    }
    let fast = completions(&shapes[0], (gpu(), DType::Bf16), &params).unwrap();
    let found: Vec<f32> = fast.iter().flat_map(|it| it.logprobs.clone()).collect();
    assert_ne!(trained(&shapes[0], DType::Bf16, &fast, 4), found, "nothing is asked of strict");
}

/// Attention over blocks in any order, of lengths around those of runs and splits; what is behind a sequence is NaN.
#[test]
fn attention_in_parts_is_attention() {
    let Some(device) = device(gpu()) else { return };
    let at = device.torch_device().unwrap().tch().unwrap();
    for (kind, tolerance) in [(Kind::Float, 1e-5), (Kind::BFloat16, 8e-3)] {
        for (heads, kv_heads, dim) in [
            (12, 2, 128),
            (14, 2, 64),
            (28, 4, 128),
            (8, 8, 64),
            (20, 2, 64),
            (6, 2, 128),
            (4, 4, 16),
            (18, 2, 32),
        ] {
            let lengths = [1i64, 7, 15, 16, 17, 64, 65, 255, 256, 257, 300, 511, 512, 513, 700];
            let (rows, table_len) = (lengths.len() as i64, 44);
            let random = |size: &[i64]| Tensor::randn(size, (kind, at));
            let qkv = random(&[rows, heads + 2 * kv_heads, dim]);
            let tables = Tensor::randperm(rows * table_len, (Kind::Int64, at)).view([rows, table_len]) + 1;
            let caches = [(); 2].map(|()| {
                let cache = random(&[rows * table_len + 1, 16, kv_heads, dim]);
                for (row, &length) in lengths.iter().enumerate() {
                    let block = tables.int64_value(&[row as i64, length / 16]);
                    if length % 16 > 0 {
                        drop(cache.get(block).narrow(0, length % 16, 16 - length % 16).fill_(f64::NAN));
                    }
                }
                cache
            });
            let lengths = Tensor::from_slice(&lengths).to_device(at);
            let (narrow_tables, positions) = (tables.to_kind(Kind::Int), &lengths - 1);
            let cache = PagedCache { keys: &caches[0], values: &caches[1], tables: &narrow_tables };
            let mut parts = AttentionParts::new(rows, heads, dim, table_len * 16, at).unwrap();
            for window in [None, Some(1), Some(16), Some(100), Some(256), Some(500), Some(701)] {
                let causal = Causal { scale: 0.125, window };
                let mut found = Tensor::zeros([rows, heads * dim], (kind, at));
                ops::attend_into(&qkv.narrow(1, 0, heads), &positions, cache, causal, &mut parts, &mut found)
                    .unwrap();
                let wide = |tensor: &Tensor| tensor.to_kind(Kind::Float);
                let queries = wide(&qkv.narrow(1, 0, heads));
                let (keys, values) = (wide(&caches[0]), wide(&caches[1]));
                let expected =
                    ops::composite::decode_attention(&queries, &keys, &values, &tables, &lengths, causal);
                let expected = expected.unwrap();
                let error = (wide(&found) - &expected).abs().max().double_value(&[]);
                let scale = expected.abs().max().double_value(&[]);
                let what = format!("{kind:?} {heads}/{kv_heads} x {dim}, {window:?}: {error:e} of {scale}");
                eprintln!("{what}");
                assert!(error <= tolerance * scale, "{what}");
            }
        }
    }
}
