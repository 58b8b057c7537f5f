//! Padding of a batch, so that products come in few shapes.
//!
//! A GPU's library chooses a kernel for every new shape of a product, which takes the host 0.5 to 2 ms
//! (`docs/results/rl_step.md`). Batches of completions would have a number of rows of their own each. A tile of a product has 128
//! rows, so that rows up to a multiple of it cost next to nothing.
//!
//! Rows of padding are sequences of their own behind all others, which no target reads: their gradients are 0. Targets of padding
//! repeat the last one, and their scores have no gradient. So scores are those without padding, and gradients are sums with
//! zeros in addition, in the order of the kernel for that shape.

use tch::Device;

/// Rows of a tile of products.
const TILE_ROWS: usize = 128;

/// The token of padding. Every vocabulary has it.
pub(crate) const TOKEN: i64 = 0;

/// Number of which rows and targets are a multiple.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Padding(usize);

impl Padding {
    /// No padding.
    pub const NONE: Padding = Padding(1);
    /// Padding off the host.
    pub const DEVICE: Padding = Padding(TILE_ROWS);

    /// Returns the padding on `device`. On the host padding would cost more time than the choice of a kernel.
    pub fn on(device: Device) -> Padding {
        if device == Device::Cpu { Padding::NONE } else { Padding::DEVICE }
    }

    /// Returns the number of rows with padding; none have none.
    pub fn rows(self, counted: usize) -> usize {
        counted.next_multiple_of(self.0)
    }
}

/// Numbers of a batch without padding.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Counted {
    pub sequences: i64,
    /// Input tokens with shared ones counted for each sequence.
    pub inputs: i64,
    /// Input tokens N.
    pub tokens: i64,
    /// Targets M.
    pub targets: i64,
}

/// Returns the lengths of sequences with `rows` rows in all, of up to `longest` each.
pub(crate) fn lengths(rows: usize, longest: usize) -> impl Iterator<Item = i64> {
    (0..rows).step_by(longest.max(1)).map(move |start| longest.min(rows - start) as i64)
}

/// Repeats the last value up to a multiple.
pub(crate) fn repeat_last(values: &mut Vec<i64>, padding: Padding) {
    if let Some(&last) = values.last() {
        values.resize(padding.rows(values.len()), last);
    }
}

#[cfg(test)]
mod tests {
    use anyroll_backends::{DType, ops::Divergence};
    use anyroll_close::assert_close;
    use tch::{Kind, Tensor};

    use super::*;
    use crate::init::{Seed, whole};
    use crate::model::{Grads, Model, OutputGrad, UnitGrads, Weights};
    use crate::{
        Decoder, DecoderConfig, ExpertsConfig, LoraConfig, LoraTarget, PackedBatch, PackedSize, Routes, Runs,
        Scores, ScoresGrad, Sequence, Teacher, passes,
    };

    const SHAPE: fn() -> DecoderConfig = || DecoderConfig {
        initializer_range: 0.3,
        tie_word_embeddings: true,
        qkv_bias: true,
        ..DecoderConfig::plain(2, 16, 2)
    };

    /// Two samples of a prompt and one of another: 21 rows and 14 targets, or 17 rows if the prompt is shared.
    fn batch(padding: Padding, shares: bool) -> PackedBatch {
        let of = |length: usize, by: usize| (0..length).map(move |index| ((index * by + 3) % 12) as i64);
        let tokens: [Vec<i64>; 3] = [
            of(4, 5).chain(of(6, 7)).collect(),
            of(4, 5).chain(of(3, 2)).collect(),
            of(2, 11).chain(of(5, 4)).collect(),
        ];
        let sequences: Vec<Sequence> = tokens
            .iter()
            .zip([4, 4, 2])
            .map(|(tokens, prompt_len)| Sequence { tokens, prompt_len })
            .collect();
        PackedBatch::pack(&sequences, shares, 0.7, (Device::Cpu, padding)).unwrap()
    }

    /// Scores of a batch, and the gradient of every weight for a given one of the scores.
    fn passes_of(decoder: &Decoder, batch: &PackedBatch) -> (Scores, Vec<Tensor>) {
        let read = |spec| whole(&Seed(5), spec, Kind::Float, Device::Cpu).unwrap();
        let weights: Vec<Vec<Tensor>> =
            decoder.units().iter().map(|unit| unit.params.iter().map(read).collect()).collect();
        let units: Vec<&[Tensor]> = weights.iter().map(Vec::as_slice).collect();
        let (scores, saved) = passes::forward(decoder, &units, batch, true).unwrap();

        let like = |values: &Tensor, by: f64| {
            (Tensor::arange(values.numel() as i64, (Kind::Float, Device::Cpu)) * by).cos()
        };
        let mut grad = Some(OutputGrad::Scores(ScoresGrad {
            logprobs: like(&scores.logprobs, 0.7),
            entropy: Some(like(&scores.entropy, 0.3)),
            divergence: scores.divergence.as_ref().map(|values| like(values, 1.9)),
        }));
        let zeros = |tensors: &Vec<Tensor>| tensors.iter().map(Tensor::zeros_like).collect::<Vec<_>>();
        let buffers: Vec<Vec<Tensor>> = weights.iter().map(zeros).collect();
        let written = buffers.iter().map(|unit| unit.iter().map(Tensor::shallow_clone).collect());
        let mut grads: Vec<UnitGrads> = written.map(UnitGrads::new).collect();
        for (block, saved) in saved.into_iter().enumerate().rev() {
            let of_block = decoder.units_of(block);
            let views: Vec<&[Tensor]> = of_block.iter().map(|&unit| units[unit]).collect();
            let mut open: Vec<Option<&mut UnitGrads>> = of_block.iter().map(|_| None).collect();
            for (unit, grads) in
                grads.iter_mut().enumerate().filter(|(unit, _)| decoder.units()[*unit].trainable)
            {
                if let Some(place) = of_block.iter().position(|&it| it == unit) {
                    open[place] = Some(grads);
                }
            }
            let output = grad.take().expect("the block above has an input");
            let below =
                decoder.backward(block, &Weights::new(&views), &mut Grads::new(open), saved, output, batch);
            grad = below.unwrap().map(OutputGrad::Hidden);
        }
        (scores, buffers.into_iter().flatten().collect())
    }

    /// Compares with the batch without padding. A strict decoder's scores have the same bits; its gradients are sums of more
    /// rows, in another order.
    fn assert_changes_nothing(name: &str, decoder: Decoder, batch: impl Fn(Padding) -> PackedBatch) {
        let decoder = decoder.strict(true);
        let (plain, padded) = (batch(Padding::NONE), batch(Padding(16)));
        assert!((padded.rows() % 16, padded.head_rows() % 16) == (0, 0) && padded.rows() > plain.rows());
        let numbers = |it: &PackedBatch| [it.sequences(), it.inputs(), it.tokens(), it.targets()];
        assert_eq!(numbers(&padded), numbers(&plain), "{name}");
        let ((scores, grads), (expected, expected_grads)) =
            (passes_of(&decoder, &padded), passes_of(&decoder, &plain));
        assert!(
            scores.logprobs.equal(&expected.logprobs) && scores.entropy.equal(&expected.entropy),
            "{name}"
        );
        if let (Some(found), Some(expected)) = (&scores.divergence, &expected.divergence) {
            assert_close(name, found, expected, 1e-6);
        }
        for (found, expected) in grads.iter().zip(&expected_grads) {
            assert_close(name, found, expected, 1e-5);
        }
        let sums = [&padded, &plain].map(|batch| batch.router().and_then(|router| router.take().unwrap()));
        if let [Some(found), Some(expected)] = sums {
            assert!(found.load.equal(&expected.load) && found.others.equal(&expected.others), "{name}");
            assert_close(name, &found.balance, &expected.balance, 1e-12);
        }
    }

    #[test]
    fn padding_changes_no_score_and_no_gradient() {
        let new = |shape: DecoderConfig| Decoder::new(shape, Device::Cpu).unwrap();
        for shares in [false, true] {
            assert_changes_nothing("plain", new(SHAPE()), |padding| batch(padding, shares));
        }
        let kept = new(SHAPE()).keeping_logits(true);
        assert_changes_nothing("kept logits and targets", kept, |padding| {
            batch(padding, true).keeping(&[0, 1, 5, 6, 13]).unwrap()
        });
        assert_changes_nothing("no targets", new(SHAPE()), |padding| {
            batch(padding, true).keeping(&[]).unwrap()
        });

        let lora = LoraConfig { dropout: 0.2, ..LoraConfig::new(2, 4.0, LoraTarget::ALL.to_vec()) };
        let adapted = Decoder::with_lora(SHAPE(), &lora, Device::Cpu).unwrap();
        assert_changes_nothing("dropout", adapted, |padding| {
            batch(padding, false).with_dropout(&[3, 1, 4]).unwrap()
        });

        let taught = new(SHAPE());
        assert_changes_nothing("a teacher", taught, |padding| {
            let values = |size: [i64; 2], by: f64| {
                (Tensor::arange(size[0] * size[1], (Kind::Float, Device::Cpu)) * by).sin().view(size)
            };
            let (rows, lm_head) = (values([14, 8], 0.9), values([12, 8], 1.7));
            let divergence = Divergence { beta: 0.5, temperature: 1.3 };
            batch(padding, true).with_teacher(Teacher { rows, lm_head, divergence }).unwrap()
        });
    }

    /// The plan of a device's memory counts rows as its batches have them.
    #[test]
    fn planned_sizes_have_the_padding_of_batches() {
        let off_host = Runs { dtype: DType::Bf16, on_host: false };
        for (count, prompt, completion) in [(3, 4, 6), (1, 40, 3), (32, 3, 2), (2, 2, 300)] {
            let tokens: Vec<i64> = vec![1; prompt + completion];
            let sequences = vec![Sequence { tokens: &tokens, prompt_len: prompt }; count];
            let packed = PackedBatch::pack(&sequences, false, 1.0, (Device::Cpu, Padding::DEVICE)).unwrap();
            let size = PackedSize::uniform(count, prompt, completion);
            let planned = size.padded(off_host);
            assert_eq!(planned, planned.padded(off_host));
            assert_eq!(size, size.padded(Runs { on_host: true, ..off_host }));
            let PackedSize { sequences, longest, tokens, copies, targets, .. } = planned;
            let made = [packed.packing.sequences(), packed.packing.max_len(), packed.rows()];
            assert_eq!([sequences, longest, tokens].map(|it| it as i64), made);
            assert_eq!([copies, targets].map(|it| it as i64), [packed.packing.tokens(), packed.head_rows()]);
        }
    }

    /// Rows of padding have experts of the router's choice, which neither the sums over the router nor its loss count.
    #[test]
    fn padding_is_not_seen_by_routers() {
        let experts = ExpertsConfig::plain(vec![true, true], 4, 2, 8);
        let shape = DecoderConfig { experts: Some(experts), ..SHAPE() };
        let decoder = || Decoder::new(shape.clone(), Device::Cpu).unwrap();
        assert_changes_nothing("router", decoder(), |padding| batch(padding, true).watching(0.3));
        let routes = decoder().route_shape().unwrap();
        // Experts 0 and 3, and then 2 and 1, of three tokens.
        let mut given = Routes::default();
        given.append(&[[0, 3, 2, 1]; 3].concat());
        assert_changes_nothing("routes", decoder(), |padding| {
            batch(padding, true).with_routes(&[&given; 3], routes).unwrap().watching(0.3)
        });
    }
}
