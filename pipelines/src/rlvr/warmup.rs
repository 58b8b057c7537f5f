//! The supervised warm-up: the task's own answers, so that some completions earn a reward.

use anyroll_models::{PackedBatch, ScoresGrad, Sequence};
use anyroll_strategy::Zero;
use tch::Tensor;

use super::{Decoder, Setup};
use crate::{
    Result,
    config::WarmupConfig,
    data::{Draw, Record},
    train::{Exchange, Purpose, schedule},
};

impl Setup {
    /// One step: the mean negative log-likelihood of the answers' tokens, which is returned.
    pub fn warmup_step(
        &self,
        policy: &mut Zero<Decoder>,
        exchange: &Exchange,
        warmup: &WarmupConfig,
        step: u64,
    ) -> Result<f64> {
        let records = self.dataset.train_batch(Draw::Warmup, self.seed, step, warmup.batch_size);
        let mut sequences = Vec::with_capacity(records.len());
        for record in &records {
            sequences.push(self.gold_sequence(record)?);
        }
        let tokens: usize = sequences.iter().map(|(tokens, prompt_len)| tokens.len() - prompt_len).sum();
        let per_rank = records.len() / exchange.world_size();
        let own = &sequences[exchange.rank() * per_rank..(exchange.rank() + 1) * per_rank];
        let mut loss = 0.0;
        let mut number = exchange.rank() * per_rank;
        for part in own.chunks(warmup.micro_batch_size.unwrap_or(self.micro_batch_size)) {
            let part: Vec<Sequence> = part
                .iter()
                .map(|(tokens, prompt_len)| Sequence { tokens, prompt_len: *prompt_len })
                .collect();
            let batch = PackedBatch::new(&part, 1.0, self.device)?;
            let numbers = number..number + part.len();
            number = numbers.end;
            let batch = self.to_train(batch, Purpose::WarmupDropout, step, numbers)?;
            policy.accumulate(&batch, |scores| {
                loss -= scores.logprobs.f_sum(tch::Kind::Double)?.f_double_value(&[])?;
                let logprobs: Tensor = scores.logprobs.f_full_like(-1.0 / tokens as f64)?;
                Ok(ScoresGrad { logprobs, entropy: None })
            })?;
        }
        let optimizer = &warmup.optimizer;
        let learning_rate =
            optimizer.adamw.learning_rate * schedule(&optimizer.schedule).factor(step, warmup.steps);
        let stats = policy.step(learning_rate)?;
        policy.finish_step(&stats)?;
        Ok(exchange.sum(&[loss])?[0] / tokens as f64)
    }

    /// Prompt, answer and end, and the prompt's length.
    fn gold_sequence(&self, record: &Record) -> Result<(Vec<i64>, usize)> {
        let mut tokens = self.tokenizer.encode_prompt(record)?;
        let prompt_len = tokens.len();
        tokens.extend(self.tokenizer.encode_answer(record)?);
        Ok((tokens, prompt_len))
    }
}
