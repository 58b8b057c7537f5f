//! A decoder with a teacher: their divergence on the same tokens.

use anyroll_backends::ops::Divergence;
use anyroll_models::{
    Decoder, DecoderConfig, HiddenModel, Model, Output, PackedBatch, ScoresGrad, Sequence, Teacher, Weights,
};
use tch::{Device, Kind, Tensor};

use super::{holder::Holder, value};

fn config(vocab_size: i64, hidden_size: i64, tie_word_embeddings: bool) -> DecoderConfig {
    DecoderConfig { vocab_size, hidden_size, tie_word_embeddings, ..value::config() }
}

fn holder(config: DecoderConfig, seed: u64) -> Holder {
    Holder::of_kind(Decoder::new(config, Device::Cpu).unwrap(), seed, Kind::Double)
}

fn batch() -> PackedBatch {
    let tokens = |length: i64| (0..length).map(|i| (i * i + 3 * length) % 17).collect();
    let sequences: [(Vec<i64>, usize); 3] = [(tokens(9), 4), (tokens(17), 1), (tokens(17), 9)];
    let sequences: Vec<Sequence> =
        sequences.iter().map(|(tokens, prompt_len)| Sequence { tokens, prompt_len: *prompt_len }).collect();
    PackedBatch::sharing(&sequences, 1.0, Device::Cpu).unwrap()
}

/// Returns the output of `holder`, with a model of the shape `config`, as a teacher.
fn teacher(holder: &Holder, config: DecoderConfig, divergence: Divergence) -> Teacher {
    let (model, batch) = (HiddenModel::new(config, Device::Cpu).unwrap(), batch());
    let mut hidden = None;
    for block in 0..model.blocks() {
        let units: Vec<&[Tensor]> =
            model.units_of(block).iter().map(|&unit| &holder.weights[unit][..]).collect();
        match model.forward(block, &Weights::new(&units), hidden.as_ref(), &batch, false).unwrap().0 {
            Output::Hidden(x) => hidden = Some(x),
            Output::Scores(rows) => {
                let (unit, param) = model.lm_head();
                let lm_head = holder.weights[unit][param].shallow_clone();
                return Teacher { rows, lm_head, divergence };
            }
        }
    }
    unreachable!("the last block has scores")
}

#[test]
fn a_teacher_says_what_its_decoder_does() {
    for tied in [false, true] {
        let config = config(19, 12, tied);
        let own = holder(config.clone(), 3);
        let Teacher { rows, lm_head, .. } =
            teacher(&own, config.clone(), Divergence { beta: 0.5, temperature: 1.0 });
        let log_probs = rows.linear(&lm_head, None::<&Tensor>).log_softmax(1, None);
        let (scores, _) = own.forward(&batch(), false);
        let apart =
            (log_probs.exp() * &log_probs).sum_dim_intlist([1i64].as_slice(), false, None) + &scores.entropy;
        assert!(apart.abs().max().double_value(&[]) < 1e-12, "tied: {tied}");
        // The divergence from itself is 0.
        for beta in [0.0, 0.3, 1.0] {
            let teacher = teacher(&own, config.clone(), Divergence { beta, temperature: 0.8 });
            let (scores, _) = own.forward(&batch().with_teacher(teacher).unwrap(), false);
            assert!(scores.divergence.unwrap().abs().max().double_value(&[]) < 1e-12, "beta {beta}");
        }
    }
}

/// Compares with a directional derivative of every weight, for all outputs of the head. The teacher is wider
/// and has another vocabulary.
#[test]
fn gradients_equal_finite_differences() {
    tch::manual_seed(0);
    for (beta, tied, keeps) in [(0.0, false, true), (0.4, true, false), (1.0, false, false)] {
        let theirs = config(23, 20, false);
        let says =
            || teacher(&holder(theirs.clone(), 5), theirs.clone(), Divergence { beta, temperature: 0.8 });
        let decoder = Decoder::new(config(19, 12, tied), Device::Cpu).unwrap().keeping_logits(keeps);
        let mut own = Holder::of_kind(decoder, 3, Kind::Double);
        let batch = batch().with_teacher(says()).unwrap();
        let random = || Tensor::randn([batch.targets()], (Kind::Double, Device::Cpu));
        let of = [random(), random(), random()];
        let loss = |own: &Holder| {
            let scores = own.forward(&batch, false).0;
            let said = [scores.logprobs, scores.entropy, scores.divergence.unwrap()];
            said.iter().zip(&of).map(|(said, of)| (said * of).sum(None).double_value(&[])).sum::<f64>()
        };
        let (_, saved) = own.forward(&batch, true);
        let [logprobs, entropy, divergence] = of.each_ref().map(Tensor::shallow_clone);
        let grad = ScoresGrad { logprobs, entropy: Some(entropy), divergence: Some(divergence) };
        own.backward_of(&batch, saved, grad);
        for unit in 0..own.weights.len() {
            for param in 0..own.weights[unit].len() {
                let direction = own.weights[unit][param].randn_like();
                let found = (&own.grads[unit].views()[param] * &direction).sum(None).double_value(&[]);
                let mut moved = |distance: f64| {
                    let _ = own.weights[unit][param].g_add_(&(&direction * distance));
                    let moved = loss(&own);
                    let _ = own.weights[unit][param].g_add_(&(&direction * -distance));
                    moved
                };
                let expected = (moved(2e-6) - moved(-2e-6)) / 4e-6;
                let error = (found - expected).abs() / expected.abs().max(1.0);
                assert!(error < 1e-6, "beta {beta}, {unit}, {param}: {found}, and {expected} by differences");
            }
        }
    }
}

#[test]
fn rows_of_other_targets_are_refused() {
    let theirs = config(23, 20, false);
    let says = teacher(&holder(theirs.clone(), 5), theirs, Divergence { beta: 0.0, temperature: 1.0 });
    let rows = says.rows.narrow(0, 1, 3);
    let error = batch().with_teacher(Teacher { rows, ..says }).unwrap_err().to_string();
    assert!(error.contains("teacher") && error.contains("[3, 20]"), "{error}");
}
