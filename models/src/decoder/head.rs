//! The last block: final norm, projection to the vocabulary, and the log-probability and entropy of each
//! target token. Only rows that predict a target are normed and projected.
//!
//! Logits are computed for one chunk of rows at a time, and recomputed in backward unless they are kept. For
//! large models they are the largest tensor (8 k targets x 152 k tokens x 4 bytes = 5 GB). The second product
//! costs less than a tenth of a step.

use anyroll_backends::ops::{self, LogProbs, Normed, Store};
use tch::Tensor;

use super::{DecoderConfig, math::Math, matrix_spec, multipliers::divide_, norm_spec, split::Split};
use crate::batch::Teacher;
use crate::model::{Grads, Saved, Scores, ScoresGrad, Unit, Weights};
use crate::slice::padded;
use crate::{PackedBatch, Result};

/// Peak memory of logits, in bytes. For large models the products are then large enough to run at full speed,
/// and the matrix is read rarely enough.
const MAX_LOGITS_BYTES: usize = 512 << 20;
/// Chunks have a multiple of this many rows, so that only the last one leaves part of a tile unused.
const CHUNK_ROWS: usize = 256;
/// With a teacher, a chunk has this fraction of the rows. The log-probs of both models and their intermediate
/// results take several times as much memory.
const TAUGHT_PART: usize = 4;

/// Index of the normed rows among the saved tensors.
const NORMED: usize = 2;

/// Indices of the head's parameters: `(unit, param)`.
#[derive(Clone, Copy, Debug)]
pub(super) struct Head {
    norm: (usize, usize),
    lm_head: (usize, usize),
    pub eps: f64,
    /// Divisor of the logits.
    pub logits_scaling: f64,
    /// Order of sums in the logits of a forward pass.
    pub math: Math,
    /// True if a forward pass that saves keeps its logits.
    pub keeps_logits: bool,
}

/// Returns the head's own unit, and the head.
pub(super) fn layout(config: &DecoderConfig) -> (Unit, Head) {
    let mut params = vec![norm_spec("model.norm.weight".to_owned(), config.hidden_size, config.norm_offset)];
    if !config.tie_word_embeddings {
        let (rows, columns) = (config.vocab_size, config.hidden_size);
        let std = config.initializer_range;
        params.push(matrix_spec("lm_head.weight".to_owned(), rows, columns, std));
    }
    let lm_head = if config.tie_word_embeddings { (1, 0) } else { (0, 1) };
    let unit = Unit { name: "lm_head".to_owned(), params, trainable: true };
    let head = Head {
        norm: (0, 0),
        lm_head,
        eps: config.rms_norm_eps,
        logits_scaling: config.multipliers.logits_scaling,
        math: Math::Fast,
        keeps_logits: false,
    };
    (unit, head)
}

impl Head {
    /// Maps `x` `[N, C]` to a log-probability and an entropy per target. With `split` this rank has the logits of some
    /// tokens.
    pub fn forward(
        &self,
        weights: &Weights,
        x: &Tensor,
        batch: &PackedBatch,
        save: bool,
        split: Option<&Split>,
    ) -> Result<(Scores, Saved)> {
        let x_rows = x.f_index_select(0, &batch.target_rows)?;
        let (h, rstd) = ops::rms_norm(&x_rows, self.norm(weights), self.eps)?;
        let (mut chunks, mut divergences, mut kept) = (Vec::new(), Vec::new(), Vec::new());
        for (start, length) in chunks_of(batch, batch.head_rows(), self.lm_head(weights)) {
            let logits = self.project(weights, &h.f_narrow(0, start, length)?, self.math)?;
            let targets = batch.targets.f_narrow(0, start, length)?;
            chunks.push(match split {
                None => ops::logprobs(&logits, &targets, batch.temperature)?,
                Some(split) => split.logprobs(&logits, &targets, batch.temperature)?,
            });
            if let Some(teacher) = &batch.teacher {
                divergences.push(teacher.divergence.of(&logits, &teacher.logits(start, length)?)?);
            }
            if save && self.keeps_logits {
                kept.push(logits);
            }
        }
        let LogProbs { logprobs, entropy, lse } = join(chunks)?;
        let divergence = batch.teacher.is_some().then(|| Tensor::f_cat(&divergences, 0)).transpose()?;
        let saved = match save {
            true => Saved([x_rows, rstd, h, lse, entropy.shallow_clone()].into_iter().chain(kept).collect()),
            false => Saved::default(),
        };
        let of_targets = |scores: Tensor| scores.f_narrow(0, 0, batch.targets());
        let scores = Scores {
            logprobs: of_targets(logprobs)?,
            entropy: of_targets(entropy)?,
            divergence: divergence.map(of_targets).transpose()?,
        };
        Ok((scores, saved))
    }

    /// Turns the gradients of scores `[M]` into the gradient of `x` `[N, C]`. Other heads that read the normed rows
    /// add their gradient of these, `others` `[M, C]`.
    pub fn backward(
        &self,
        weights: &Weights,
        grads: &mut Grads,
        saved: Saved,
        (grad, others): (&ScoresGrad, Option<&Tensor>),
        batch: &PackedBatch,
        split: Option<&Split>,
    ) -> Result<Tensor> {
        let ([x_rows, rstd, h, lse, entropy], kept) = saved.unpack_first();
        let (mut kept, lm_head) = (kept.into_iter(), self.lm_head(weights));
        let mut dh = h.f_empty_like()?;
        let with_padding = |grad: &Tensor| padded(grad, batch.head_rows());
        let dlogprobs = with_padding(&grad.logprobs)?;
        let dentropy = grad.entropy.as_ref().map(with_padding).transpose()?;
        let ddivergence = grad.divergence.as_ref().map(with_padding).transpose()?;
        let targets = match split {
            None => batch.targets.shallow_clone(),
            Some(split) => split.places_of(&batch.targets)?,
        };
        for (start, length) in chunks_of(batch, batch.head_rows(), lm_head) {
            let rows = |tensor: &Tensor| tensor.f_narrow(0, start, length);
            let mut dlogits = match kept.next() {
                Some(logits) => logits,
                None => self.project(weights, &rows(&h)?, Math::Fast)?,
            };
            let toward_teacher = match (&batch.teacher, &ddivergence) {
                (Some(teacher), Some(of)) => {
                    let logits = teacher.logits(start, length)?;
                    Some(teacher.divergence.gradient(&dlogits, &logits, &rows(of)?)?)
                }
                _ => None,
            };
            let dentropy = dentropy.as_ref().map(rows).transpose()?;
            ops::logprobs_backward_(
                &mut dlogits,
                &rows(&targets)?,
                batch.temperature,
                (&rows(&lse)?, &rows(&entropy)?),
                &rows(&dlogprobs)?,
                dentropy.as_ref(),
            )?;
            if let Some(toward_teacher) = toward_teacher {
                drop(dlogits.f_add_(&toward_teacher)?);
            }
            if let Some(split) = split {
                split.clear_padding(&dlogits)?;
            }
            divide_(&mut dlogits, self.logits_scaling)?;
            drop(dlogits.f_mm_out(&rows(&dh)?, lm_head)?);
            grads.put_linear(self.lm_head.0, self.lm_head.1, &dlogits, &rows(&h)?)?;
        }
        if let Some(split) = split {
            split.peers().sum_(&mut dh)?;
        }
        if let Some(others) = others {
            drop(dh.f_narrow(0, 0, batch.targets())?.f_add_(others)?);
        }
        let mut dx_rows = x_rows.f_zeros_like()?;
        let norm = self.norm(weights);
        grads.put_beside(self.norm.0, self.norm.1, norm, |dweight, how| {
            ops::rms_norm_backward_(&mut dh, &x_rows, &rstd, norm, &mut dx_rows, dweight, how)
        })?;
        let size = [batch.rows(), norm.size()[0]];
        let mut dx = Tensor::f_empty(size, (dx_rows.kind(), dx_rows.device()))?;
        // If sequences share rows, several targets may follow one row.
        ops::embedding_backward(&dx_rows, &batch.target_rows, &mut dx, Store::Write)?;
        Ok(dx)
    }

    /// Returns the normed rows of `targets` targets `[M, C]` that a forward pass saved.
    pub fn normed_rows(saved: &Saved, targets: i64) -> Result<Tensor> {
        Ok(saved.0[NORMED].f_narrow(0, 0, targets)?)
    }

    /// Returns the position of the head's matrix: the index of its unit among those the block reads, and its
    /// parameter index.
    pub fn lm_head_place(&self) -> (usize, usize) {
        self.lm_head
    }

    /// Returns the logits `[B, V]` of the rows of `x` `[B, C]`.
    pub fn logits(&self, weights: &Weights, x: &Tensor) -> Result<Tensor> {
        self.project(weights, &self.normed(weights, x)?, self.math)
    }

    /// Returns the normed rows of `x`.
    pub fn normed(&self, weights: &Weights, x: &Tensor) -> Result<Tensor> {
        Ok(ops::rms_norm(x, self.norm(weights), self.eps)?.0)
    }

    /// Computes the logits of normed rows `h` into existing memory.
    pub fn logits_into(&self, weights: &Weights, h: &mut Normed, logits: &mut Tensor) -> Result<()> {
        self.math.linear_into(h, self.lm_head(weights), None, logits, None)?;
        divide_(logits, self.logits_scaling)
    }

    /// Returns the logits of normed rows.
    fn project(&self, weights: &Weights, h: &Tensor, math: Math) -> Result<Tensor> {
        let mut logits = math.linear(h, self.lm_head(weights), None)?;
        divide_(&mut logits, self.logits_scaling)?;
        Ok(logits)
    }

    pub fn norm<'a>(&self, weights: &Weights<'a>) -> &'a Tensor {
        weights.get(self.norm.0, self.norm.1)
    }

    pub fn lm_head<'a>(&self, weights: &Weights<'a>) -> &'a Tensor {
        weights.get(self.lm_head.0, self.lm_head.1)
    }
}

/// Returns the largest number of rows of logits per chunk, for elements of `element_bytes` bytes.
pub(super) fn chunk_rows(vocab_size: usize, element_bytes: usize) -> usize {
    let most = (MAX_LOGITS_BYTES / (vocab_size * element_bytes)).max(1);
    if most > CHUNK_ROWS { most / CHUNK_ROWS * CHUNK_ROWS } else { most }
}

/// Like [`chunk_rows`], for logits of a student and a teacher and their fp32 intermediate results.
pub(super) fn taught_chunk_rows(vocab_size: usize, element_bytes: usize) -> usize {
    (chunk_rows(vocab_size, element_bytes) / TAUGHT_PART).max(1)
}

/// Splits `rows` rows of a batch's head into chunks for the logits of `lm_head`: `(start, length)` of each. There is
/// always at least one, possibly empty chunk, so that a batch without targets still writes its gradients.
pub(super) fn chunks_of(
    batch: &PackedBatch,
    rows: i64,
    lm_head: &Tensor,
) -> impl Iterator<Item = (i64, i64)> + use<> {
    let (vocab_size, element_bytes) = (lm_head.size()[0] as usize, lm_head.kind().elt_size_in_bytes());
    let chunk = match batch.teacher {
        Some(_) => taught_chunk_rows(vocab_size, element_bytes) as i64,
        None => chunk_rows(vocab_size, element_bytes) as i64,
    };
    let count = ((rows + chunk - 1) / chunk).max(1);
    (0..count).map(move |index| (index * chunk, chunk.min(rows - index * chunk)))
}

impl Teacher {
    /// Returns the teacher's logits of some targets; padding has rows of zeros.
    fn logits(&self, start: i64, length: i64) -> Result<Tensor> {
        let targets = self.rows.size()[0];
        let start = start.min(targets);
        let rows = self.rows.f_narrow(0, start, length.min(targets - start))?;
        Ok(padded(&rows, length)?.f_linear(&self.lm_head, None::<&Tensor>)?)
    }
}

/// Joins the rows of all chunks.
fn join(mut chunks: Vec<LogProbs>) -> Result<LogProbs> {
    if chunks.len() == 1 {
        return Ok(chunks.remove(0));
    }
    let cat = |of: fn(&LogProbs) -> &Tensor| Tensor::f_cat(&chunks.iter().map(of).collect::<Vec<_>>(), 0);
    Ok(LogProbs { logprobs: cat(|c| &c.logprobs)?, entropy: cat(|c| &c.entropy)?, lse: cat(|c| &c.lse)? })
}
