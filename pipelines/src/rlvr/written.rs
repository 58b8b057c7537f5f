//! Lines of `samples.jsonl`: completions of training steps.

use std::{collections::HashMap, ops::Range, sync::Arc};

use anyroll_config::SamplesConfig;
use anyroll_data::{Dataset, Draw, Record, Tokenizer, shuffled, stream};

use super::{
    Task,
    grader::Grader,
    rows::{Row, Scored},
};
use crate::{
    Result,
    inference::Sample,
    samples::{Columns, Phase, Sample as SampleLine, Training, Turn},
    train::Exchange,
};

/// Constant of the random stream that chooses groups.
const PURPOSE: u64 = u64::from_le_bytes(*b"written!");

/// A step whose completions may be written.
pub struct Written<'a> {
    /// The run's options.
    pub task: &'a Task,
    /// Source of the records.
    pub dataset: &'a Arc<Dataset>,
    /// The scoring, which knows the tokenizer and the terms.
    pub grader: &'a Grader,
    /// The ranks.
    pub exchange: &'a Exchange,
    /// The step, from 1.
    pub step: u64,
}

impl Written<'_> {
    /// Returns the completions of the chosen groups, in the order of [`chosen`], on all ranks; none in other steps.
    /// `advantages` are those of this rank's tokens. Every rank must call this.
    pub fn lines(&self, scored: &Scored, advantages: &[f64]) -> Result<Vec<SampleLine>> {
        let SamplesConfig { every, groups } = self.task.config.samples;
        if every == 0 || !(self.step == 1 || self.step.is_multiple_of(every)) {
            return Ok(Vec::new());
        }
        let order = shuffled(self.task.share.prompts, &mut stream(PURPOSE, self.task.seed, self.step));
        let chosen = chosen(&scored.rows, self.task.share.group_size, groups, &order);
        // As JSON, since postcard cannot leave out fields.
        let own = serde_json::to_string(&self.own(&chosen, scored, advantages)).expect("plain data");
        let mut lines: Vec<(usize, usize, SampleLine)> = Vec::new();
        for text in self.exchange.gather(&own)? {
            let of_rank: Vec<_> = serde_json::from_str(&text).expect("what a rank has written");
            lines.extend(of_rank);
        }
        lines.sort_by_key(|(place, row, _)| (*place, *row));
        Ok(lines.into_iter().map(|(_, _, line)| line).collect())
    }

    /// This rank's lines, each with the place of its group among the chosen ones and its row.
    fn own(&self, chosen: &[usize], scored: &Scored, advantages: &[f64]) -> Vec<(usize, usize, SampleLine)> {
        let share = &self.task.share;
        let mut batches: HashMap<u64, Vec<Record>> = HashMap::new();
        let (mut lines, mut end) = (Vec::new(), 0);
        for ((row, sample), columns) in scored.of_rank(share, self.exchange.rank()).zip(&scored.columns) {
            let start = end;
            end += sample.completion_len();
            let Some(place) = chosen.iter().position(|group| *group == row / share.group_size) else {
                continue;
            };
            let (batch, number) = scored.rows[row].prompt;
            let records = batches.entry(batch).or_insert_with(|| {
                self.dataset.train_batch(Draw::Rollout, self.task.seed, batch, share.prompts)
            });
            let of_row = (row, &scored.rows[row]);
            let line = self.line(&records[number], sample, columns, of_row, &advantages[start..end]);
            lines.push((place, row, line));
        }
        lines
    }

    fn line(
        &self,
        record: &Record,
        sample: &Sample,
        columns: &Columns,
        (index, row): (usize, &Row),
        advantages: &[f64],
    ) -> SampleLine {
        let tokenizer = &self.grader.tokenizer;
        let is_scored = row.terms.iter().any(Option::is_some);
        SampleLine {
            step: self.step,
            phase: Phase::Train,
            prompt: record.prompt.clone(),
            completion: sample.transcript(tokenizer),
            turns: turns(tokenizer, sample),
            answer: record.answer.clone(),
            reward: if is_scored { row.reward } else { f64::NAN },
            columns: columns.clone(),
            training: Some(Training {
                group: index / self.task.share.group_size,
                terms: self.grader.sum.names().map(str::to_owned).zip(row.terms.iter().copied()).collect(),
                advantage: advantages.iter().sum::<f64>() / advantages.len().max(1) as f64,
                tokens: row.tokens,
                cut: !row.finished,
                trained: row.trained,
            }),
        }
    }
}

/// Indices of the groups whose completions are written, at most `count`: the one with the highest mean reward, the one
/// with the lowest, then others in `order`, a permutation of all groups. Of equal groups the first is taken.
fn chosen(rows: &[Row], group_size: usize, count: usize, order: &[usize]) -> Vec<usize> {
    let means: Vec<f64> = rows
        .chunks(group_size)
        .map(|group| group.iter().map(|row| row.reward).sum::<f64>() / group_size as f64)
        .collect();
    let first = |better: fn(f64, f64) -> bool| {
        (1..means.len()).fold(0, |best, group| if better(means[group], means[best]) { group } else { best })
    };
    let mut chosen = Vec::with_capacity(count);
    for group in [first(|a, b| a > b), first(|a, b| a < b)].into_iter().chain(order.iter().copied()) {
        if chosen.len() < count && !chosen.contains(&group) {
            chosen.push(group);
        }
    }
    chosen
}

/// Turns of a completion; none without an environment.
pub fn turns(tokenizer: &Tokenizer, sample: &Sample) -> Vec<Turn> {
    let Some(episode) = &sample.episode else { return Vec::new() };
    let text = |range: Range<usize>| tokenizer.decode(&sample.tokens[range]);
    let turn = |(number, range): (usize, Range<usize>)| Turn {
        text: text(range),
        reward: episode.rewards.get(number).copied().flatten(),
        observation: episode.observations.get(number).cloned().map(text),
    };
    sample.turns().into_iter().enumerate().map(turn).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_best_and_the_worst_group_come_first() {
        let rows: Vec<Row> = [0.5, 0.5, 1.0, 0.0, 0.0, 0.0, 1.0, 1.0, 1.0, 1.0]
            .map(|reward| Row { reward, ..Row::default() })
            .to_vec();
        let order = [4, 3, 2, 1, 0];
        let check = |count, expected: &[usize]| assert_eq!(chosen(&rows, 2, count, &order), expected);
        check(1, &[3]);
        check(2, &[3, 2]);
        check(4, &[3, 2, 4, 1]);
        check(9, &[3, 2, 4, 1, 0]);
        // All alike: the first, and another one at random.
        let alike = vec![Row::default(); 10];
        assert_eq!(chosen(&alike, 2, 2, &order), [0, 4]);
        assert_eq!(chosen(&alike, 10, 2, &[0]), [0]);
    }
}
