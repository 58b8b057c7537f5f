//! Samples of an update, dealt anew so that all ranks train on about as many tokens.

use serde::{Deserialize, Serialize};
use tch::Tensor;

use super::{Task, loss::Targets, prepare::token_counts};
use crate::{
    Error, Result,
    inference::Sample,
    train::{Exchange, Share},
};

/// A rank's samples of the policy's update, mini-batch by mini-batch.
pub struct Dealt {
    /// The samples.
    pub samples: Vec<Sample>,
    /// Numbers of the samples in the whole step.
    pub numbers: Vec<usize>,
    /// Targets of the samples' tokens.
    pub targets: Targets,
}

/// Columns of [`Targets`], in the order of its fields.
const COLUMNS: usize = 6;

/// A sample and the values of its tokens in each column that there is.
#[derive(Serialize, Deserialize)]
struct Row {
    number: usize,
    sample: Sample,
    values: [Option<Vec<f32>>; COLUMNS],
}

/// Deals the samples of all ranks, of which this rank has `samples` with `targets`. Each mini-batch keeps its samples, and
/// each rank as many as before, so that the gradient differs only by the order of its sums. Groups stay together if their
/// prompts are computed once. Every rank must call this.
pub fn dealt(task: &Task, exchange: &Exchange, samples: &[Sample], targets: &Targets) -> Result<Dealt> {
    let (share, rank) = (&task.share, exchange.rank());
    let counts = share.ordered(exchange.gather_rows(&token_counts(samples))?);
    let together = if task.packing.share_prompts { share.group_size } else { 1 };
    let numbers = deal(&counts, together, share).swap_remove(rank);
    let is_own = |row: &Row| numbers.binary_search(&row.number).is_ok();
    let rows = share.samples_of(rank).zip(samples).zip(values_of(targets)?);
    let rows = rows.map(|((number, sample), values)| Row { number, sample: sample.clone(), values });
    let (stay, leave): (Vec<Row>, Vec<Row>) = rows.partition(is_own);
    let arriving = exchange.gather_rows(&leave)?.into_iter().flatten().filter(is_own);
    let mut rows: Vec<Row> = stay.into_iter().chain(arriving).collect();
    rows.sort_unstable_by_key(|row| row.number);
    assert!(rows.iter().map(|row| row.number).eq(numbers.iter().copied()), "each sample has a rank");
    let (samples, values): (Vec<Sample>, Vec<_>) =
        rows.into_iter().map(|row| (row.sample, row.values)).unzip();
    Ok(Dealt { samples, numbers, targets: joined(&values, targets.advantages.device())? })
}

/// Numbers of each rank's samples, of which `counts` are the tokens. Of each mini-batch, units of `together` samples go to
/// the rank with the fewest tokens so far that has room, longest first.
fn deal(counts: &[usize], together: usize, share: &Share) -> Vec<Vec<usize>> {
    let mut ranks = vec![Vec::with_capacity(counts.len() / share.world_size); share.world_size];
    for mini_batch in 0..share.mini_batches {
        let range = share.range(mini_batch);
        let room = range.len() / together / share.world_size;
        let tokens = |start: usize| counts[start..start + together].iter().sum::<usize>();
        let mut units: Vec<(usize, usize)> =
            range.step_by(together).map(|start| (tokens(start), start)).collect();
        units.sort_by_key(|&(tokens, start)| (usize::MAX - tokens, start));
        let mut taken: Vec<(usize, Vec<usize>)> = vec![Default::default(); share.world_size];
        for (tokens, start) in units {
            let open = taken.iter_mut().filter(|(_, starts)| starts.len() < room);
            let (sum, starts) = open.min_by_key(|(sum, _)| *sum).expect("as much room as units");
            *sum += tokens;
            starts.push(start);
        }
        for (rank, (_, mut starts)) in ranks.iter_mut().zip(taken) {
            starts.sort_unstable();
            rank.extend(starts.into_iter().flat_map(|start| start..start + together));
        }
    }
    ranks
}

/// Values of each sample's tokens, on the host.
fn values_of(targets: &Targets) -> Result<Vec<[Option<Vec<f32>>; COLUMNS]>> {
    let Targets {
        lengths,
        rollout_logprobs,
        old_logprobs,
        advantages,
        ref_logprobs,
        policy_weights,
        token_weights,
    } = targets;
    let columns = [
        Some(rollout_logprobs),
        Some(old_logprobs),
        Some(advantages),
        ref_logprobs.as_ref(),
        policy_weights.as_ref(),
        Some(token_weights),
    ];
    let mut on_host: [Option<Vec<f32>>; COLUMNS] = Default::default();
    for (values, column) in on_host.iter_mut().zip(columns) {
        *values = column.map(|it| it.f_to_device(tch::Device::Cpu)?.try_into()).transpose()?;
    }
    let mut end = 0;
    let of_samples = lengths.iter().map(|&length| {
        let range = end..end + length as usize;
        end = range.end;
        on_host.each_ref().map(|values| values.as_ref().map(|values| values[range.clone()].to_vec()))
    });
    Ok(of_samples.collect())
}

/// Targets of samples with these values, on `device`.
fn joined(of_samples: &[[Option<Vec<f32>>; COLUMNS]], device: tch::Device) -> Result<Targets> {
    let column = |index: usize| -> Result<Option<Tensor>> {
        let values: Option<Vec<&[f32]>> = of_samples.iter().map(|values| values[index].as_deref()).collect();
        values.map(|it| Ok(Tensor::f_from_slice(&it.concat())?.f_to_device(device)?)).transpose()
    };
    let always = |index: usize| Ok::<_, Error>(column(index)?.expect("all targets have this column"));
    let length = |values: &[Option<Vec<f32>>; COLUMNS]| values[0].as_ref().map_or(0, Vec::len) as i64;
    Ok(Targets {
        lengths: of_samples.iter().map(length).collect(),
        rollout_logprobs: always(0)?,
        old_logprobs: always(1)?,
        advantages: always(2)?,
        ref_logprobs: column(3)?,
        policy_weights: column(4)?,
        token_weights: always(5)?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sums(counts: &[usize], ranks: &[Vec<usize>]) -> Vec<usize> {
        ranks.iter().map(|numbers| numbers.iter().map(|&number| counts[number]).sum()).collect()
    }

    #[test]
    fn groups_go_to_the_rank_with_the_fewest_tokens() {
        let share = Share { prompts: 4, group_size: 2, mini_batches: 1, world_size: 2 };
        let counts = [9, 9, 8, 8, 1, 1, 2, 2];
        let ranks = deal(&counts, 2, &share);
        assert_eq!(ranks, [vec![0, 1, 4, 5], vec![2, 3, 6, 7]]);
        assert_eq!(sums(&counts, &ranks), [20, 20]);
        // Samples apart from each other are dealt more evenly.
        let counts = [9, 1, 1, 1, 1, 1, 1, 1];
        assert_eq!(sums(&counts, &deal(&counts, 2, &share)), [12, 4]);
        assert_eq!(deal(&counts, 1, &share), [vec![0, 5, 6, 7], vec![1, 2, 3, 4]]);
    }

    /// At any lengths each mini-batch has its samples, and each rank as many of them as before.
    #[test]
    fn mini_batches_keep_their_samples() {
        let share = Share { prompts: 24, group_size: 4, mini_batches: 2, world_size: 3 };
        let counts: Vec<usize> = (0..share.samples()).map(|number| 1 + number * number * 31 % 97).collect();
        for together in [1, 4] {
            let ranks = deal(&counts, together, &share);
            let before: Vec<Vec<usize>> = (0..3).map(|rank| share.samples_of(rank).collect()).collect();
            for mini_batch in 0..2 {
                let own = share.own_range(mini_batch);
                let mut all: Vec<usize> =
                    ranks.iter().flat_map(|numbers| numbers[own.clone()].to_vec()).collect();
                all.sort_unstable();
                assert!(all.into_iter().eq(share.range(mini_batch)));
                let most = |ranks: &[Vec<usize>]| {
                    let parts: Vec<Vec<usize>> =
                        ranks.iter().map(|numbers| numbers[own.clone()].to_vec()).collect();
                    sums(&counts, &parts).into_iter().max()
                };
                assert!(most(&ranks) <= most(&before));
            }
        }
    }

    #[test]
    fn values_come_back_as_they_were() {
        let row = |values: [f32; 5]| Tensor::from_slice(&values);
        let targets = Targets {
            lengths: vec![2, 0, 3],
            rollout_logprobs: row([0.1, 0.2, 0.3, 0.4, 0.5]),
            old_logprobs: row([1.1, 1.2, 1.3, 1.4, 1.5]),
            advantages: row([-1.0, f32::MIN_POSITIVE, 0.0, -0.0, 2.0]),
            ref_logprobs: None,
            policy_weights: Some(row([1.0, 2.0, 3.0, 4.0, 5.0])),
            token_weights: row([0.5; 5]),
        };
        let values = values_of(&targets).unwrap();
        assert_eq!(values[2][1], Some(vec![1.3, 1.4, 1.5]));
        let again = joined(&values, tch::Device::Cpu).unwrap();
        assert_eq!((again.lengths.clone(), again.ref_logprobs.is_none()), (targets.lengths, true));
        assert_eq!(values_of(&again).unwrap(), values);
    }
}
