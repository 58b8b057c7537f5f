//! Text embeddings computed by encoders.

use tch::Tensor;

use super::Shared;
use crate::{Error, Result};

/// Widths of a text's embeddings.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TextWidths {
    /// Width D of a token.
    pub token: i64,
    /// Width E of the pooled text, for models that read it.
    pub pooled: Option<i64>,
}

/// Embeddings of several texts, on a device. Labels are indices into them.
#[derive(Debug)]
pub struct Texts {
    context: Shared,
    pooled: Option<Shared>,
    count: i64,
    tokens: i64,
    widths: TextWidths,
}

impl Texts {
    /// Takes each text's tokens, `[P, S, D]`, and for models that read it the pooled text, `[P, E]`.
    ///
    /// # Errors
    /// [`Error::Input`] for tensors of other shapes.
    pub fn new(context: Tensor, pooled: Option<Tensor>) -> Result<Texts> {
        let (tokens, whole) = (context.size(), pooled.as_ref().map(Tensor::size));
        let fits = tokens.len() == 3 && whole.as_ref().is_none_or(|it| it.len() == 2 && it[0] == tokens[0]);
        let problem = format!("are {tokens:?} and {whole:?}, must be [P, S, D] and [P, E]");
        let wrong = || Error::Input { what: "texts", problem };
        let &[count, length, width] = &tokens[..] else { return Err(wrong()) };
        if !fits {
            return Err(wrong());
        }
        let widths = TextWidths { token: width, pooled: whole.map(|it| it[1]) };
        let (context, pooled) = (Shared::new(context), pooled.map(Shared::new));
        Ok(Texts { context, pooled, count, tokens: length, widths })
    }

    /// Returns the number of texts P.
    pub fn len(&self) -> i64 {
        self.count
    }

    /// Returns true if there are no texts.
    pub fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// Returns the number of tokens S per text.
    pub(super) fn tokens(&self) -> i64 {
        self.tokens
    }

    /// Returns the texts of a model, or an error if it has none.
    pub(super) fn of_model(texts: &Option<Texts>) -> Result<&Texts> {
        let problem = || "are indices of texts, but the model has no texts".to_owned();
        texts.as_ref().ok_or_else(|| Error::Input { what: "labels", problem: problem() })
    }

    /// Checks that the widths are those that a model reads.
    pub(super) fn check(&self, wanted: TextWidths) -> Result<()> {
        let found = self.widths;
        let fits =
            found.token == wanted.token && wanted.pooled.is_none_or(|pooled| found.pooled == Some(pooled));
        let [is, must_be] = [found, wanted].map(|it| (it.token, it.pooled));
        let problem = format!("have widths {is:?} of tokens and pooled texts, must have {must_be:?}");
        if fits { Ok(()) } else { Err(Error::Input { what: "texts", problem }) }
    }

    /// Returns the texts with the indices `labels`, int64 `[B]`: `[B, S, D]`, and `[B, E]`.
    pub(super) fn of(&self, labels: &Tensor) -> Result<(Tensor, Option<Tensor>)> {
        let select = |table: &Shared| table.get().f_index_select(0, labels);
        Ok((select(&self.context)?, self.pooled.as_ref().map(select).transpose()?))
    }
}
