//! Divergence of a distribution over the vocabulary from a teacher's, by the logits of both, and its gradient.

use tch::{Kind, Tensor};

use super::{Error, Result};

/// A generalised Jensen-Shannon divergence (Agarwal et al., 2024, 2306.13649, equation 1) of softmax(logits / temperature).
///
/// With p of the model, q of the teacher and m = beta q + (1 - beta) p it is beta KL(q || m) + (1 - beta) KL(p || m); at the
/// ends of beta, where that is 0, KL(q || p) at 0 and KL(p || q) at 1, as in TRL.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Divergence {
    /// From 0, which covers all that the teacher may say, to 1, which keeps to what it is likely to.
    pub beta: f64,
    /// Divisor of both logits; above 0.
    pub temperature: f64,
}

impl Divergence {
    /// Divergence of `logits` `[M, V]` from `teacher` `[M, W]`: fp32 `[M]` (fp64 for fp64), in nats. If one vocabulary is longer,
    /// its last entries are left out of its distribution: models of a family pad theirs by their size.
    ///
    /// # Errors
    /// [`Error::Argument`] for tensors of other shapes, or libtorch's error.
    pub fn of(self, logits: &Tensor, teacher: &Tensor) -> Result<Tensor> {
        let [log_p, log_q] = self.log_probs(logits, teacher)?;
        let part = |log_p: &Tensor, log_m: &Tensor| sum(&log_p.f_exp()?.f_mul(&log_p.f_sub(log_m)?)?);
        match self.log_mixture(&log_p, &log_q)? {
            Mixture::Model => part(&log_q, &log_p),
            Mixture::Teacher => part(&log_p, &log_q),
            Mixture::Both(log_m) => {
                let of_teacher = part(&log_q, &log_m)?.f_mul_scalar(self.beta)?;
                Ok(part(&log_p, &log_m)?.f_mul_scalar(1.0 - self.beta)?.f_add(&of_teacher)?)
            }
        }
    }

    /// The gradient with respect to `logits`, fp32 `[M, V]` (fp64 of fp64), from that with respect to [`Self::of`], `[M]`.
    ///
    /// It is (p - q) / temperature at beta 0, and otherwise w p (u - sum(p u)) / temperature with u = log p - log m and w = 1 -
    /// beta, at beta 1 with u = log p - log q and w = 1.
    ///
    /// # Errors
    /// The same as [`Self::of`].
    pub fn gradient(self, logits: &Tensor, teacher: &Tensor, of_divergence: &Tensor) -> Result<Tensor> {
        let [log_p, log_q] = self.log_probs(logits, teacher)?;
        let p = log_p.f_exp()?;
        let (gradient, weight) = match self.log_mixture(&log_p, &log_q)? {
            Mixture::Model => (p.f_sub(&log_q.f_exp()?)?, 1.0),
            Mixture::Teacher => (toward(&p, &log_p, &log_q)?, 1.0),
            Mixture::Both(log_m) => (toward(&p, &log_p, &log_m)?, 1.0 - self.beta),
        };
        let rows = of_divergence.f_unsqueeze(1)?.f_mul_scalar(weight / self.temperature)?;
        let behind = logits.size()[1] - gradient.size()[1];
        Ok(gradient.f_mul(&rows)?.f_constant_pad_nd([0, behind])?)
    }

    /// Log-probabilities of the model and of the teacher, over the tokens that both have.
    fn log_probs(self, logits: &Tensor, teacher: &Tensor) -> Result<[Tensor; 2]> {
        let (own, theirs) = (logits.size(), teacher.size());
        let (&[rows, own], &[others, theirs]) = (&own[..], &theirs[..]) else {
            return Err(argument(format!("has the shape {theirs:?}, for logits of the shape {own:?}")));
        };
        if rows != others {
            return Err(argument(format!("has {others} rows, for logits of {rows}")));
        }
        let vocab = own.min(theirs);
        let log_probs = |logits: &Tensor| {
            let wide = if logits.kind() == Kind::Double { Kind::Double } else { Kind::Float };
            let scaled = logits.f_narrow(1, 0, vocab)?.f_to_kind(wide)?.f_div_scalar(self.temperature)?;
            Ok::<_, Error>(scaled.f_log_softmax(1, None)?)
        };
        Ok([log_probs(logits)?, log_probs(teacher)?])
    }

    fn log_mixture(self, log_p: &Tensor, log_q: &Tensor) -> Result<Mixture> {
        if self.beta == 0.0 {
            return Ok(Mixture::Model);
        }
        if self.beta == 1.0 {
            return Ok(Mixture::Teacher);
        }
        let weighted = |log: &Tensor, weight: f64| log.f_add_scalar(weight.ln());
        Ok(Mixture::Both(weighted(log_p, 1.0 - self.beta)?.f_logaddexp(&weighted(log_q, self.beta)?)?))
    }
}

/// The log-probs of what is compared with.
enum Mixture {
    /// The model's own alone.
    Model,
    /// The teacher's alone.
    Teacher,
    Both(Tensor),
}

/// p (u - sum(p u)), with u = log p - log m.
fn toward(p: &Tensor, log_p: &Tensor, log_m: &Tensor) -> Result<Tensor> {
    let apart = log_p.f_sub(log_m)?;
    let mean = sum(&p.f_mul(&apart)?)?.f_unsqueeze(1)?;
    Ok(apart.f_sub(&mean)?.f_mul(p)?)
}

/// Over each row.
fn sum(values: &Tensor) -> Result<Tensor> {
    Ok(values.f_sum_dim_intlist([1i64].as_slice(), false, None)?)
}

fn argument(problem: String) -> Error {
    Error::Argument { op: "divergence", argument: "teacher", problem }
}

#[cfg(test)]
mod tests {
    use anyroll_close::assert_close;
    use serde_json::Value;

    use super::*;

    fn numbers(value: &Value) -> Tensor {
        let numbers = value.as_array().unwrap().iter().map(|it| it.as_f64().unwrap());
        Tensor::from_slice(&numbers.collect::<Vec<f64>>())
    }

    /// `[tokens, columns]` with numbers behind them that no distribution has.
    fn padded(logits: &Tensor, columns: i64) -> Tensor {
        Tensor::cat(&[logits, &logits.narrow(1, 0, columns).full_like(3.0)], 1)
    }

    /// TRL's own loss and gradient, from tests/python/make_distillation_golden.py.
    #[test]
    fn divergences_are_those_of_trl_whatever_a_vocabulary_is_filled_up_with() {
        let golden: Value =
            serde_json::from_str(include_str!("../../../tests/golden/distillation.json")).unwrap();
        let tokens = golden["tokens"].as_i64().unwrap();
        let [student, teacher] = ["student", "teacher"].map(|it| numbers(&golden[it]).view([tokens, -1]));
        let vocab = student.size()[1];
        let of_mean = Tensor::full([tokens], 1.0 / tokens as f64, (Kind::Double, tch::Device::Cpu));
        for case in golden["cases"].as_array().unwrap() {
            let how = Divergence {
                beta: case["beta"].as_f64().unwrap(),
                temperature: case["temperature"].as_f64().unwrap(),
            };
            for (own, theirs) in [(0, 0), (3, 0), (0, 2)] {
                let what = format!("{how:?}, {own} and {theirs} more");
                let (logits, teacher) = (padded(&student, own), padded(&teacher, theirs));
                let loss = how.of(&logits, &teacher).unwrap().mean(Kind::Double);
                assert_close(&what, &loss, &Tensor::from(case["loss"].as_f64().unwrap()), 1e-12);
                let gradient = how.gradient(&logits, &teacher, &of_mean).unwrap();
                let expected = numbers(&case["gradient"]).view([tokens, -1]);
                assert_close(&what, &gradient.narrow(1, 0, vocab), &expected, 1e-12);
                assert_eq!(gradient.narrow(1, vocab, own).abs().sum(Kind::Double).double_value(&[]), 0.0);
                // In fp32 to its rounding.
                let [logits, teacher] = [&logits, &teacher].map(|it| it.to_kind(Kind::Float));
                let gradient = how.gradient(&logits, &teacher, &of_mean.to_kind(Kind::Float)).unwrap();
                assert_eq!(gradient.kind(), Kind::Float);
                assert_close(&what, &gradient.narrow(1, 0, vocab), &expected, 1e-5);
            }
        }
        assert_eq!(golden["cases"].as_array().unwrap().len(), 10);
    }

    #[test]
    fn other_rows_are_refused() {
        let zeros = |rows| Tensor::zeros([rows, 4], (Kind::Float, tch::Device::Cpu));
        let error = Divergence { beta: 0.5, temperature: 1.0 }.of(&zeros(2), &zeros(3)).unwrap_err();
        assert_eq!(error.to_string(), "divergence: argument `teacher` has 3 rows, for logits of 2");
    }
}
