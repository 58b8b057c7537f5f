//! Generation against the training forward.

use crate::holder::Holder;
use anyroll_models::{
    Completion, Decoder, DecoderConfig, KvCache, PackedBatch, RopeScaling, SamplingParams, Sequence, generate,
};
use tch::{Device, Kind, Tensor};

const MAX_NEW_TOKENS: usize = 9;

/// A model whose distributions are far from even: weights of a larger deviation.
fn holder(qk_norm: bool) -> Holder {
    let config = DecoderConfig {
        vocab_size: 13,
        hidden_size: 24,
        num_hidden_layers: 2,
        num_attention_heads: 4,
        num_key_value_heads: 2,
        head_dim: 10,
        intermediate_size: 40,
        rms_norm_eps: 1e-6,
        rope_theta: 1000.0,
        rope_scaling: RopeScaling::None,
        max_position_embeddings: 40,
        sliding_window: None,
        qkv_bias: true,
        qk_norm,
        tie_word_embeddings: false,
        initializer_range: 0.4,
    };
    Holder::new(Decoder::new(config, Device::Cpu).unwrap(), 3)
}

/// Groups of equal prompts of unequal lengths.
fn prompts() -> Vec<Vec<i64>> {
    let distinct =
        [vec![1, 2, 3], vec![4], vec![5, 6, 7, 8, 9, 10, 11, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9], vec![4, 4]];
    distinct.iter().flat_map(|prompt| std::iter::repeat_n(prompt.clone(), 5)).collect()
}

fn params(temperature: f64) -> SamplingParams {
    SamplingParams {
        temperature,
        top_k: 0,
        top_p: 1.0,
        max_new_tokens: MAX_NEW_TOKENS,
        stop_tokens: vec![12],
    }
}

fn run(holder: &Holder, prompts: &[Vec<i64>], params: &SamplingParams, seeds: &[u64]) -> Vec<Completion> {
    let weights: Vec<&[Tensor]> = holder.weights.iter().map(Vec::as_slice).collect();
    let config = holder.decoder.config();
    let mut cache = KvCache::new(config, prompts.len(), 30, Kind::Float, Device::Cpu).unwrap();
    generate(&holder.decoder, &weights, prompts, params, seeds, &mut cache).unwrap()
}

#[test]
fn logprobs_equal_the_training_forward() {
    for (qk_norm, temperature) in [(false, 1.0), (true, 0.6)] {
        let (holder, prompts) = (holder(qk_norm), prompts());
        let seeds: Vec<u64> = (0..prompts.len() as u64).collect();
        let completions = run(&holder, &prompts, &params(temperature), &seeds);
        let tokens: Vec<Vec<i64>> =
            prompts.iter().zip(&completions).map(|(p, c)| [p.as_slice(), &c.tokens].concat()).collect();
        let sequences: Vec<Sequence> = tokens
            .iter()
            .zip(&prompts)
            .map(|(tokens, prompt)| Sequence { tokens, prompt_len: prompt.len() })
            .collect();
        let batch = PackedBatch::new(&sequences, temperature, Device::Cpu).unwrap();
        let expected = Vec::<f32>::try_from(holder.forward(&batch, false).0.logprobs).unwrap();
        let found: Vec<f32> = completions.iter().flat_map(|c| c.logprobs.clone()).collect();
        assert_eq!(found.len(), expected.len());
        for (found, expected) in found.iter().zip(&expected) {
            assert!((found - expected).abs() <= 1e-5, "{found} {expected}");
        }
        let ends: Vec<bool> = completions.iter().map(|c| c.finished).collect();
        assert!(ends.contains(&true) && ends.contains(&false), "the test needs both ends");
        for completion in &completions {
            let stop = completion.tokens.iter().position(|&token| token == 12);
            assert_eq!(stop, completion.finished.then(|| completion.tokens.len() - 1));
            assert!(completion.finished || completion.tokens.len() == MAX_NEW_TOKENS);
        }
    }
}

#[test]
fn a_sample_does_not_depend_on_its_batch() {
    let (holder, prompts) = (holder(false), prompts());
    let seeds: Vec<u64> = (0..prompts.len() as u64).map(|index| index % 4 + 100).collect();
    let params = SamplingParams { top_k: 6, top_p: 0.9, ..params(0.9) };
    let together = run(&holder, &prompts, &params, &seeds);
    for ((prompt, &seed), in_batch) in prompts.iter().zip(&seeds).zip(&together) {
        let alone = run(&holder, std::slice::from_ref(prompt), &params, &[seed]).remove(0);
        assert_eq!((&alone.tokens, alone.finished), (&in_batch.tokens, in_batch.finished));
        for (alone, in_batch) in alone.logprobs.iter().zip(&in_batch.logprobs) {
            assert!((alone - in_batch).abs() <= 1e-5);
        }
    }
    assert_eq!(together[0], together[4], "one prompt, one seed");
    assert_ne!(together[0].tokens, together[1].tokens, "one prompt, two seeds");
}

#[test]
fn greedy_is_the_argmax_without_a_cache() {
    let (holder, prompts) = (holder(true), prompts());
    let params = SamplingParams { stop_tokens: vec![], ..params(0.0) };
    let completions = run(&holder, &prompts, &params, &vec![0; prompts.len()]);
    for (prompt, completion) in prompts.iter().zip(&completions) {
        let mut tokens = prompt.clone();
        for _ in 0..MAX_NEW_TOKENS {
            tokens.push(most_probable(&holder, &tokens));
        }
        assert_eq!(completion.tokens, tokens[prompt.len()..]);
    }
}

/// The token with the highest log-probability after `tokens`, by scoring each.
fn most_probable(holder: &Holder, tokens: &[i64]) -> i64 {
    let continued: Vec<Vec<i64>> = (0..13).map(|token| [tokens, &[token]].concat()).collect();
    let sequences: Vec<Sequence> =
        continued.iter().map(|all| Sequence { tokens: all, prompt_len: tokens.len() }).collect();
    let batch = PackedBatch::new(&sequences, 1.0, Device::Cpu).unwrap();
    holder.forward(&batch, false).0.logprobs.argmax(0, false).int64_value(&[])
}

#[test]
fn what_does_not_fit_is_refused() {
    let holder = holder(false);
    let weights: Vec<&[Tensor]> = holder.weights.iter().map(Vec::as_slice).collect();
    let config = holder.decoder.config();
    let check = |prompts: &[Vec<i64>], params: &SamplingParams, seeds: &[u64], expected: &str| {
        let mut cache = KvCache::new(config, 2, 50, Kind::Float, Device::Cpu).unwrap();
        let error = generate(&holder.decoder, &weights, prompts, params, seeds, &mut cache).unwrap_err();
        assert!(error.to_string().contains(expected), "{error}");
    };
    let (one, long) = (vec![vec![1]], vec![vec![1; 45]]);
    check(&[vec![]], &params(1.0), &[0], "prompt 0 is empty");
    check(&one, &params(1.0), &[], "0 seeds for 1 prompts");
    check(&[vec![1], vec![1], vec![1]], &params(1.0), &[0; 3], "cache of 2 sequences");
    check(&long, &params(1.0), &[0], "the cache holds 50");
    check(&[vec![1; 40]], &params(1.0), &[0], "max_position_embeddings = 40");
    check(&[vec![99]], &params(1.0), &[0], "libtorch");
}
