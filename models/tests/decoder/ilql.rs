//! The heads of ILQL beside a decoder's own.

use anyroll_models::{
    Decoder, Grads, HiddenModel, IlqlGrad, IlqlModel, IlqlScores, Model, OfAction, Output, OutputGrad,
    PackedBatch, ParamSpec, Saved, ScoresGrad, Sequence, UnitGrads, Weights, WithIlqlHeads,
    init::{Seed, whole},
};
use tch::{Device, Kind, Tensor};

use super::value::config;

const SEED: Seed = Seed(1);

fn model(tied: bool, two_qs: bool) -> IlqlModel {
    let config = anyroll_models::DecoderConfig { tie_word_embeddings: tied, ..config() };
    IlqlModel::new(config, two_qs, Device::Cpu).unwrap()
}

/// Initial weights in fp64.
fn weights(model: &IlqlModel) -> Vec<Vec<Tensor>> {
    let source = WithIlqlHeads { base: &SEED, seed: SEED };
    let tensor = |spec: &ParamSpec| whole(&source, spec, Kind::Double, Device::Cpu).unwrap();
    model.units().iter().map(|unit| unit.params.iter().map(tensor).collect()).collect()
}

/// Tokens of sequences, and the lengths of their prompts. The last two share all rows, and have targets after the same
/// ones.
fn texts() -> [(Vec<i64>, usize); 4] {
    let tokens = |length: i64| (0..length).map(|i| (i * i + 3 * length) % 19).collect::<Vec<_>>();
    [(tokens(9), 4), (tokens(2), 1), (tokens(17), 1), (tokens(17), 9)]
}

fn targets() -> Vec<i64> {
    texts().into_iter().flat_map(|(tokens, prompt_len)| tokens[prompt_len..].to_vec()).collect()
}

fn batch() -> PackedBatch {
    let texts = texts();
    let sequences: Vec<Sequence> =
        texts.iter().map(|(tokens, prompt_len)| Sequence { tokens, prompt_len: *prompt_len }).collect();
    PackedBatch::sharing(&sequences, 1.0, Device::Cpu).unwrap()
}

fn of_block<'a>(model: &impl Model, weights: &'a [Vec<Tensor>], block: usize) -> Vec<&'a [Tensor]> {
    model.units_of(block).iter().map(|&unit| &weights[unit][..]).collect()
}

/// Runs all blocks.
fn forward<M: Model<Batch = PackedBatch>>(
    model: &M,
    weights: &[Vec<Tensor>],
    batch: &PackedBatch,
) -> (M::Scores, Vec<Saved>) {
    let (mut hidden, mut all_saved) = (None, Vec::new());
    for block in 0..model.blocks() {
        let units = of_block(model, weights, block);
        let (output, saved) =
            model.forward(block, &Weights::new(&units), hidden.as_ref(), batch, true).unwrap();
        all_saved.push(saved);
        match output {
            Output::Hidden(x) => hidden = Some(x),
            Output::Scores(scores) => return (scores, all_saved),
        }
    }
    unreachable!("the last block returns scores")
}

#[track_caller]
fn near(found: &Tensor, expected: &Tensor) {
    assert_eq!(found.size(), expected.size());
    let apart = (found - expected).abs().max().double_value(&[]);
    assert!(apart < 1e-10, "{apart}");
}

/// Heads as in trlx's `make_head`, computed with libtorch's linear layers from the normed rows.
#[test]
fn heads_are_perceptrons_on_the_normed_rows() {
    for (tied, two_qs) in [(false, true), (true, false)] {
        let model = model(tied, two_qs);
        let (weights, batch) = (weights(&model), batch());
        let (scores, _) = forward(&model, &weights, &batch);
        let decoder = Decoder::new(model.decoder().config().clone(), Device::Cpu).unwrap();
        let own = decoder.units().len();
        let (plain, _) = forward(&decoder, &weights[..own], &batch);
        near(&scores.language.logprobs, &plain.logprobs);
        near(&scores.language.entropy, &plain.entropy);

        let rows = HiddenModel::new(model.decoder().config().clone(), Device::Cpu).unwrap();
        let (h, _) = forward(&rows, &weights[..own], &batch);
        let of = |unit: usize, head: usize| {
            let params = &weights[unit][4 * head..][..4];
            h.linear(&params[0], Some(&params[1])).relu().linear(&params[2], Some(&params[3]))
        };
        let targets = Tensor::from_slice(&targets()).unsqueeze(1);
        let chosen = |all: &Tensor| all.gather(1, &targets, false).squeeze_dim(1);
        let count = if two_qs { 2 } else { 1 };
        assert_eq!(scores.qs.len(), count);
        for (head, OfAction { q, logprobs }) in scores.qs.iter().enumerate() {
            near(q, &chosen(&of(own, head)));
            near(logprobs, &chosen(&of(own, head).log_softmax(1, Kind::Double)));
        }
        let mut target_q = chosen(&of(own + 1, 0));
        if two_qs {
            target_q = target_q.minimum(&chosen(&of(own + 1, 1)));
        }
        near(&scores.target_q, &target_q);
        near(&scores.values, &of(own + 2, 0).squeeze_dim(1));
        let (targets, sources) = model.targets_and_sources();
        assert_eq!(weights[targets].len(), 4 * count);
        for (target, source) in weights[targets].iter().zip(&weights[sources]) {
            assert!(target.equal(source), "targets begin as the Q heads");
            assert!(source.abs().max().double_value(&[]) > 0.0, "heads begin at random");
        }
    }
}

/// Compares with a directional derivative of every weight.
#[test]
fn gradients_equal_finite_differences() {
    for (tied, two_qs) in [(true, true), (false, false)] {
        let model = model(tied, two_qs);
        let (mut weights, batch) = (weights(&model), batch());
        tch::manual_seed(0);
        let random = || Tensor::randn([batch.targets()], (Kind::Double, Device::Cpu));
        let count = if two_qs { 2 } else { 1 };
        let factors: Vec<(Tensor, Tensor)> = (0..count).map(|_| (random(), random())).collect();
        let (of_language, of_values) = (random(), random());
        let loss = |scores: &IlqlScores| {
            let of_heads = scores.qs.iter().zip(&factors);
            let of_heads = of_heads.map(|(found, (q, logprobs))| &found.q * q + &found.logprobs * logprobs);
            let rest = &scores.language.logprobs * &of_language + &scores.values * &of_values;
            of_heads.fold(rest, |sum, next| sum + next).sum(None).double_value(&[])
        };
        let (_, mut saved) = forward(&model, &weights, &batch);
        let nan = |tensor: &Tensor| tensor.full_like(f64::NAN);
        let mut grads: Vec<UnitGrads> =
            weights.iter().map(|unit| UnitGrads::new(unit.iter().map(nan).collect())).collect();
        let of_q = |(q, logprobs): &(Tensor, Tensor)| OfAction { q: q.copy(), logprobs: logprobs.copy() };
        let language = ScoresGrad { logprobs: of_language.copy(), entropy: None, divergence: None };
        let of_scores =
            IlqlGrad { language, qs: factors.iter().map(of_q).collect(), values: of_values.copy() };
        let mut grad = Some(OutputGrad::Scores(of_scores));
        for block in (0..model.blocks()).rev() {
            let views = of_block(&model, &weights, block);
            let units = model.units_of(block);
            let mut open: Vec<Option<&mut UnitGrads>> = units.iter().map(|_| None).collect();
            for (index, of_unit) in grads.iter_mut().enumerate() {
                if let Some(place) = units.iter().position(|&unit| unit == index) {
                    open[place] = Some(of_unit);
                }
            }
            let (saved, output) = (saved.pop().unwrap(), grad.take().unwrap());
            let mut open = Grads::new(open);
            let below = model.backward(block, &Weights::new(&views), &mut open, saved, output, &batch);
            grad = below.unwrap().map(OutputGrad::Hidden);
        }
        let (targets, _) = model.targets_and_sources();
        for unit in 0..weights.len() {
            for param in 0..weights[unit].len() {
                let direction = weights[unit][param].randn_like();
                let found = (&grads[unit].views()[param] * &direction).sum(None).double_value(&[]);
                let mut moved = |distance: f64| {
                    let _ = weights[unit][param].g_add_(&(&direction * distance));
                    let moved = loss(&forward(&model, &weights, &batch).0);
                    let _ = weights[unit][param].g_add_(&(&direction * -distance));
                    moved
                };
                let expected = (moved(1e-6) - moved(-1e-6)) / 2e-6;
                let error = (found - expected).abs() / expected.abs().max(1.0);
                assert!(error <= 1e-5, "unit {unit} param {param}: {found} {expected}");
                assert!(unit != targets || found == 0.0, "targets have no gradient");
            }
        }
    }
}

#[test]
fn a_batch_may_have_no_targets() {
    let model = model(false, true);
    let weights = weights(&model);
    let tokens = [1, 2, 3];
    let sequences = [Sequence { tokens: &tokens, prompt_len: 3 }];
    let batch = PackedBatch::new(&sequences, 1.0, Device::Cpu).unwrap();
    let (scores, _) = forward(&model, &weights, &batch);
    assert_eq!((scores.values.size(), scores.target_q.size()), (vec![0], vec![0]));
}
