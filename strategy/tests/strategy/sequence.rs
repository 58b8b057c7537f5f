//! Ranks that run their batches together, each a slice of the rows, compared with a rank that runs them alone.

use std::{ops::Range, sync::Arc};

use anyroll_backends::{CollectiveGroup, Device};
use anyroll_models::{
    Decoder, DecoderConfig, LoraConfig, LoraTarget, Model, NormPlaces, PackedBatch, QkNorm, Scores,
    ScoresGrad, Sequence, ValueModel,
};
use anyroll_strategy::{AdamW, Decays, Mesh, Precision, Recompute, Zero, ZeroConfig, ZeroStage};
use tch::{Kind, Tensor};

use crate::harness::{STAGES, four_heads, ranks};

/// Groups of samples of one prompt, a multiple of every number of ranks. The last are short: of fewer rows than ranks, and
/// of none.
const GROUPS: usize = 4;
const PROMPT_LEN: usize = 5;

/// AdamW with steps nearly proportional to the gradient, so that weights show it.
pub const NEARLY_SGD: AdamW = AdamW {
    betas: (0.0, 0.0),
    eps: 1.0,
    weight_decay: 0.0,
    decays: Decays::Matrices,
    max_grad_norm: f64::INFINITY,
};

/// A model, and options of its training.
pub struct Case {
    pub name: &'static str,
    pub model: Arc<Decoder>,
    pub recompute: Recompute,
    /// True if prompts are shared, false if adapters have dropout.
    pub shares_prompts: bool,
}

/// Scores of a rank's sequences before two optimizer steps, the norms of their gradients, and the weights after them.
#[derive(Clone, Debug, PartialEq)]
pub struct Outcome {
    pub scores: Vec<f32>,
    pub norms: Vec<f64>,
    pub weights: Vec<f32>,
}

/// Decoders with four heads of queries, which two and four ranks share: like Qwen 2.5, with fewer key heads than ranks; like
/// Qwen 3, with experts; like Gemma 3; and like OLMo 2.
fn even_cases() -> [Case; 4] {
    cases(four_heads())
}

/// The same with three heads of queries, or with six and three key heads, which neither two nor four ranks can share.
fn odd_cases() -> [Case; 4] {
    let of = |shape: DecoderConfig, num_attention_heads, num_key_value_heads| DecoderConfig {
        num_attention_heads,
        num_key_value_heads,
        ..shape
    };
    let [plain, qwen2, qwen3, gemma3] = four_heads();
    cases([of(plain, 3, 3), of(qwen2, 3, 1), of(qwen3, 6, 3), of(gemma3, 3, 3)])
}

fn cases([plain, qwen2, qwen3, gemma3]: [DecoderConfig; 4]) -> [Case; 4] {
    let olmo2 = DecoderConfig { qk_norm: Some(QkNorm::Together), norms: NormPlaces::After, ..plain };
    let lora = LoraConfig { dropout: 0.3, ..LoraConfig::new(4, 8.0, LoraTarget::ALL.to_vec()) };
    let device = tch::Device::Cpu;
    let whole = |config: DecoderConfig| Arc::new(Decoder::new(config, device).unwrap());
    let adapted = Arc::new(Decoder::with_lora(gemma3.clone(), &lora, device).unwrap());
    let case = |name, model, recompute, shares_prompts| Case { name, model, recompute, shares_prompts };
    [
        case("Qwen 2.5", whole(qwen2), Recompute::None, true),
        case("Qwen 3", whole(qwen3), Recompute::Full, true),
        case("Gemma 3 with adapters", adapted, Recompute::Selective, false),
        case("OLMo 2", whole(olmo2), Recompute::None, true),
    ]
}

/// Returns the sequences of a group: a prompt, and completions of several lengths.
fn sequences(group: usize) -> Vec<Vec<i64>> {
    let lengths = match group {
        2 => vec![3],
        3 => vec![1],
        _ => (0..3).map(|sample| 7 + (group * 3 + sample * 2) % 7).collect(),
    };
    let sequence = |(sample, length): (usize, usize)| {
        let token = |at: usize| group * 5 + at * at * 3 + at + if at < PROMPT_LEN { 0 } else { sample * 7 };
        (0..length).map(|at| (token(at) % 13) as i64).collect()
    };
    lengths.into_iter().enumerate().map(sequence).collect()
}

pub fn pack(shares_prompts: bool, group: usize) -> PackedBatch {
    let sequences = sequences(group);
    let prompt_len = |tokens: &[i64]| PROMPT_LEN.min(tokens.len() - 1).max(1);
    let sequences: Vec<Sequence> =
        sequences.iter().map(|tokens| Sequence { tokens, prompt_len: prompt_len(tokens) }).collect();
    match shares_prompts {
        true => PackedBatch::sharing(&sequences, 0.8, tch::Device::Cpu).unwrap(),
        false => {
            let keys: Vec<u64> =
                (0..sequences.len() as u64).map(|sample| sample * 10 + group as u64).collect();
            PackedBatch::new(&sequences, 0.8, tch::Device::Cpu).unwrap().with_dropout(&keys).unwrap()
        }
    }
}

/// A loss of log-probs and entropies whose gradient differs from target to target.
pub fn loss(scores: &Scores) -> ScoresGrad {
    let logprobs = (&scores.logprobs * 0.01 - 0.02) * (&scores.entropy + 1.0);
    ScoresGrad { logprobs, entropy: Some(&scores.logprobs * 0.005), divergence: None }
}

pub fn floats(tensor: &Tensor) -> Vec<f32> {
    Vec::try_from(tensor.to_kind(Kind::Float).reshape([-1])).unwrap()
}

fn own_groups(group: &CollectiveGroup) -> Range<usize> {
    let own = GROUPS / group.world_size();
    group.rank() * own..(group.rank() + 1) * own
}

/// Takes two optimizer steps with a micro-batch of each of the rank's groups.
pub fn trained<M: Model<Batch = PackedBatch>>(
    zero: &mut Zero<M>,
    pack: impl Fn(usize) -> PackedBatch,
    read: impl Fn(&M::Scores) -> Vec<f32>,
    loss: impl Fn(&M::Scores) -> M::ScoresGrad,
) -> Outcome {
    let own = own_groups(zero.group());
    trained_on(zero, own, pack, read, loss)
}

/// Takes two optimizer steps with a micro-batch of each of the groups `own`.
pub fn trained_on<M: Model<Batch = PackedBatch>>(
    zero: &mut Zero<M>,
    own: Range<usize>,
    pack: impl Fn(usize) -> PackedBatch,
    read: impl Fn(&M::Scores) -> Vec<f32>,
    loss: impl Fn(&M::Scores) -> M::ScoresGrad,
) -> Outcome {
    let scores = own.clone().flat_map(|group| read(&zero.score(&pack(group)).unwrap())).collect();
    let steps = (0..2).map(|_| {
        for group in own.clone() {
            zero.accumulate(&pack(group), |scores| Ok(loss(scores))).unwrap();
        }
        let step = zero.step(0.5).unwrap();
        zero.finish_step(&step).unwrap().grad_norm.unwrap()
    });
    let norms = steps.collect();
    let weights = zero.weights().unwrap().iter().flatten().flat_map(floats).collect();
    Outcome { scores, norms, weights }
}

fn run(case: &Case, config: ZeroConfig, device: &Arc<dyn Device>, mesh: Mesh) -> Outcome {
    let config = ZeroConfig { recompute: case.recompute, ..config };
    let mut zero = Zero::new(case.model.clone(), config, Some(NEARLY_SGD), device, mesh, 7).unwrap();
    let read = |scores: &Scores| [floats(&scores.logprobs), floats(&scores.entropy)].concat();
    trained(&mut zero, |group| pack(case.shares_prompts, group), read, loss)
}

/// Joins the scores of all ranks, which must agree in everything else.
pub fn joined(of_ranks: impl IntoIterator<Item = Outcome>) -> Outcome {
    let of_ranks: Vec<Outcome> = of_ranks.into_iter().collect();
    let scores = of_ranks.iter().flat_map(|rank| rank.scores.clone()).collect();
    let all = Outcome { scores, ..of_ranks[0].clone() };
    for rank in of_ranks {
        assert!((&rank.norms, &rank.weights) == (&all.norms, &all.weights), "ranks differ");
    }
    all
}

/// The outcomes of `cases` at all `configs`, on `world_size` ranks of which `sequence` share their batches.
fn outcomes(
    (world_size, sequence): (usize, usize),
    harsh: bool,
    cases: &[Case],
    configs: &[ZeroConfig],
) -> Vec<Vec<Outcome>> {
    let mesh = |group| Mesh::from(group).in_sequence_groups(sequence).unwrap();
    outcomes_on(world_size, mesh, harsh, cases, configs)
}

/// The outcomes of `cases` at all `configs`, on `world_size` ranks laid out as `mesh`.
pub fn outcomes_on(
    world_size: usize,
    mesh: impl Fn(CollectiveGroup) -> Mesh + Sync,
    harsh: bool,
    cases: &[Case],
    configs: &[ZeroConfig],
) -> Vec<Vec<Outcome>> {
    let mut of_ranks: Vec<_> = ranks(world_size, harsh, |device, group| {
        let mesh = mesh(group);
        let runs = cases.iter().flat_map(|case| configs.iter().map(move |&config| (case, config)));
        runs.map(|(case, config)| run(case, config, device, mesh.clone())).collect::<Vec<_>>()
    })
    .into_iter()
    .map(Vec::into_iter)
    .collect();
    let mut next = || joined(of_ranks.iter_mut().map(|outcomes| outcomes.next().unwrap()));
    cases.iter().map(|_| configs.iter().map(|_| next()).collect()).collect()
}

#[track_caller]
pub fn assert_near(what: &str, split: &Outcome, whole: &Outcome) {
    for (split, whole) in split.norms.iter().zip(&whole.norms) {
        assert!(*whole > 1e-2, "{what}: no gradient");
        assert!((split - whole).abs() < 1e-5 * whole, "{what}: norm {split} is not {whole}");
    }
    for (split, whole) in [(&split.scores, &whole.scores), (&split.weights, &whole.weights)] {
        assert_eq!(split.len(), whole.len(), "{what}");
        for (split, whole) in split.iter().zip(whole) {
            assert!((split - whole).abs() < 1e-5, "{what}: {split} is not {whole}");
        }
    }
}

/// Asserts that slices are whole batches up to rounding, that stages are equal, and that runs repeat.
#[track_caller]
fn check_slices(cases: &[Case]) {
    let alone = outcomes((1, 1), false, cases, &[ZeroStage::Zero0.into()]);
    let stages = STAGES.map(ZeroConfig::from);
    for ranks in [(2, 2), (4, 2), (4, 4)] {
        let split = outcomes(ranks, false, cases, &stages);
        for ((case, split), alone) in cases.iter().zip(&split).zip(&alone) {
            let what = format!("{}, {} ranks, {} together", case.name, ranks.0, ranks.1);
            assert_near(&what, &split[0], &alone[0]);
            assert!(split.iter().all(|stage| *stage == split[0]), "{what}: stages differ");
        }
        if ranks == (4, 2) {
            let again = outcomes(ranks, true, cases, &stages[3..]);
            assert!(again.iter().zip(&split).all(|(again, split)| again[0] == split[0]), "runs differ");
        }
    }
}

#[test]
fn slices_over_ranks_give_the_scores_and_gradients_of_one_rank() {
    check_slices(&even_cases());
}

#[test]
fn slices_that_gather_keys_give_the_scores_and_gradients_of_one_rank() {
    check_slices(&odd_cases());
}

#[test]
fn slices_in_bf16_are_within_its_rounding() {
    let config = ZeroConfig { precision: Precision::Bf16, ..ZeroStage::Zero2.into() };
    let cases: Vec<Case> = even_cases().into_iter().chain(odd_cases()).collect();
    let [alone, split] = [(1, 1), (2, 2)].map(|ranks| outcomes(ranks, false, &cases, &[config]));
    for ((case, split), alone) in cases.iter().zip(&split).zip(&alone) {
        let apart = split[0].scores.iter().zip(&alone[0].scores).map(|(split, alone)| (split - alone).abs());
        assert!(
            apart.fold(0.0, f32::max) < 0.1,
            "{}: {:?} {:?}",
            case.name,
            split[0].scores,
            alone[0].scores
        );
        let norms = split[0].norms.iter().zip(&alone[0].norms);
        // A router may choose another expert after rounding.
        let bound = if case.name == "Qwen 3" { 0.3 } else { 0.05 };
        assert!(
            norms.clone().all(|(split, alone)| (split - alone).abs() < bound * alone),
            "{}: {norms:?}",
            case.name
        );
    }
}

#[test]
fn values_of_slices_are_those_of_one_rank() {
    let values = |shape: &DecoderConfig, world_size, sequence| {
        let of_ranks = ranks(world_size, false, |device, group| {
            let mesh = Mesh::from(group).in_sequence_groups(sequence).unwrap();
            let model = Arc::new(ValueModel::new(shape.clone(), tch::Device::Cpu).unwrap());
            let mut zero = Zero::new(model, ZeroStage::Zero1, Some(NEARLY_SGD), device, mesh, 7).unwrap();
            // The head starts at 0: the second step is the first that changes the blocks.
            let loss = |values: &Tensor| (values - 1.0) * 0.05;
            trained(&mut zero, |group| pack(true, group), floats, loss);
            trained(&mut zero, |group| pack(true, group), floats, loss)
        });
        joined(of_ranks)
    };
    for case in [&even_cases()[0], &odd_cases()[0]] {
        let shape = case.model.config();
        assert_near("values", &values(shape, 4, 4), &values(shape, 1, 1));
    }
}
