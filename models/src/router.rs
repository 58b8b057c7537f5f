//! Sums over the routers of a training batch: how evenly tokens go to experts, and the loss that evens them out.
//!
//! ```text
//! f[e] = choices of expert e / rows     P[e] = mean probability of e     loss = E sum over e of f[e] P[e]
//! ```
//!
//! Rows are those of all layers with experts together (Fedus et al., 2021; the function of `transformers`). The loss has
//! a gradient through P alone.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, PoisonError},
};

use anyroll_backends::ops::Choice;
use tch::{Kind, Tensor};

use crate::Result;

/// Sums over the routers of a batch's layers, which its passes write. Ranks that run batches together write those of all
/// batches, so that sums over ranks count rows equally often.
#[derive(Clone, Debug)]
pub struct RouterWatch {
    /// Factor of the balancing loss; 0 for none.
    pub(crate) coef: f64,
    /// The rank whose batch it is.
    pub(crate) owner: usize,
    /// Number of the first rows that count; padding follows.
    pub(crate) rows: i64,
    /// By the rank and the layer's index among those with experts. A recomputed pass writes the same again.
    layers: Arc<Mutex<BTreeMap<(usize, usize), LayerSums>>>,
}

/// Sums over the rows of a layer, fp64.
#[derive(Debug)]
struct LayerSums {
    /// Choices of each expert `[E]`.
    load: Tensor,
    /// Probabilities of each expert `[E]`.
    probs: Tensor,
    /// See [`RouterSums::others`]: `[OTHERS]`.
    others: Tensor,
}

/// Number of the sums of a layer in addition to those of each expert.
pub const OTHERS: i64 = 4;

/// Sums over the batches of ranks that run them together, on the device.
#[derive(Debug)]
pub struct RouterSums {
    /// Choices of each expert in each layer: fp64 `[layers, E]`.
    pub load: Tensor,
    /// Sums over all layers: rows, entropies in nats, rows with given experts, and those of them whose own choice differs: fp64
    /// `[OTHERS]`.
    pub others: Tensor,
    /// Balancing losses, without their factor, and the number of batches: fp64 `[2]`.
    pub balance: Tensor,
}

impl RouterWatch {
    /// Watches routers over the first `rows` rows, and adds `coef` times the balancing loss to the batch's loss.
    pub(crate) fn new(coef: f64, rows: i64) -> RouterWatch {
        RouterWatch { coef, owner: 0, rows, layers: Arc::default() }
    }

    /// Returns the watch of this rank's part of a batch that `owner` has, of which the first `rows` count. Each of `parts`
    /// has its own balancing loss.
    pub(crate) fn of_part(&self, owner: usize, rows: i64, parts: usize) -> RouterWatch {
        RouterWatch { coef: self.coef / parts as f64, owner, rows, layers: self.layers.clone() }
    }

    /// Adds a layer, whose router chose the experts `own` itself.
    pub(crate) fn see(
        &self,
        layer: usize,
        own: &Tensor,
        choice: &Choice,
        given: Option<&Tensor>,
    ) -> Result<()> {
        let first = |tensor: &Tensor| tensor.f_narrow(0, 0, self.rows);
        let (probs, chosen) = (first(&choice.probs)?, first(&choice.chosen)?);
        let at = (Kind::Int64, probs.device());
        // Integers, whose sums are the same in any order.
        let flat = chosen.f_flatten(0, 1)?;
        let mut load = Tensor::f_zeros([probs.size()[1]], at)?;
        drop(load.f_index_add_(0, &flat, &Tensor::f_ones(flat.size(), at)?)?);
        let zero = || Tensor::f_zeros([0i64; 0], (Kind::Double, probs.device()));
        let (replayed, differing) = match given {
            Some(given) => {
                let replayed = first(given)?.f_select(1, 0)?.f_ge(0)?;
                let sorted = |chosen: &Tensor| Ok::<_, crate::Error>(first(chosen)?.f_sort(-1, false)?.0);
                let differs = sorted(own)?.f_ne_tensor(&sorted(&choice.chosen)?)?.f_any_dim(1, false)?;
                (replayed.f_sum(Kind::Double)?, differs.f_sum(Kind::Double)?)
            }
            None => (zero()?, zero()?),
        };
        let rows = Tensor::f_full([0i64; 0], self.rows as f64, (Kind::Double, probs.device()))?;
        let entropy = probs.f_special_entr()?.f_sum(Kind::Double)?;
        let sums = LayerSums {
            load: load.f_to_kind(Kind::Double)?,
            probs: probs.f_sum_dim_intlist([0i64].as_slice(), false, Kind::Double)?,
            others: Tensor::f_stack(&[rows, entropy, replayed, differing], 0)?,
        };
        self.locked().insert((self.owner, layer), sums);
        Ok(())
    }

    /// Adds the gradient of the balancing loss to that of a layer's logits, fp32 `[N, E]`.
    pub(crate) fn add_gradient_(&self, choice: &Choice, dlogits: &mut Tensor) -> Result<()> {
        if self.coef == 0.0 {
            return Ok(());
        }
        let (load, rows) = {
            let layers = self.locked();
            let own = layers.iter().filter(|((owner, _), _)| *owner == self.owner);
            let (load, others): (Vec<_>, Vec<_>) = own.map(|(_, sums)| (&sums.load, &sums.others)).unzip();
            (sum(&load)?, sum(&others)?.f_get(0)?)
        };
        let probs = choice.probs.f_narrow(0, 0, self.rows)?;
        // f / rows, times E and the factor: the gradient of each probability.
        let of_probs = load.f_div(&rows.f_square()?)?.f_mul_scalar(self.coef * load.size()[0] as f64)?;
        let of_probs = of_probs.f_to_kind(probs.kind())?;
        let common = probs.f_mv(&of_probs)?.f_unsqueeze(1)?;
        let gradient = of_probs.f_sub(&common)?.f_mul_(&probs)?;
        drop(dlogits.f_narrow(0, 0, self.rows)?.f_add_(&gradient)?);
        Ok(())
    }

    /// Takes the sums; `None` if no layer has experts, or no pass has run. Does not wait for the device.
    ///
    /// # Errors
    /// libtorch's (out of memory).
    pub fn take(&self) -> Result<Option<RouterSums>> {
        let layers = std::mem::take(&mut *self.locked());
        let Some(((first, _), _)) = layers.first_key_value() else { return Ok(None) };
        let per_owner = layers.keys().filter(|(owner, _)| owner == first).count();
        let all: Vec<&LayerSums> = layers.values().collect();
        let (mut loads, mut others, mut losses) = (Vec::new(), Vec::new(), Vec::new());
        for of_owner in all.chunks(per_owner) {
            let load: Vec<&Tensor> = of_owner.iter().map(|sums| &sums.load).collect();
            let probs: Vec<&Tensor> = of_owner.iter().map(|sums| &sums.probs).collect();
            let of_layers = sum(&of_owner.iter().map(|sums| &sums.others).collect::<Vec<_>>())?;
            let (f, p) = (sum(&load)?, sum(&probs)?);
            let rows = of_layers.f_get(0)?;
            let product = f.f_dot(&p)?.f_mul_scalar(f.size()[0] as f64)?;
            // A part without rows has no loss.
            losses.push(product.f_div(&rows.f_square()?)?.f_nan_to_num(0.0, None, None)?);
            loads.push(Tensor::f_stack(&load, 0)?);
            others.push(of_layers);
        }
        let batches = Tensor::f_full([0i64; 0], losses.len() as f64, (Kind::Double, losses[0].device()))?;
        let balance = Tensor::f_stack(&[sum(&losses.iter().collect::<Vec<_>>())?, batches], 0)?;
        let [load, others] = [loads, others].map(|all| sum(&all.iter().collect::<Vec<_>>()));
        Ok(Some(RouterSums { load: load?, others: others?, balance }))
    }

    fn locked(&self) -> std::sync::MutexGuard<'_, BTreeMap<(usize, usize), LayerSums>> {
        self.layers.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Sum of tensors of a shape.
fn sum(tensors: &[&Tensor]) -> Result<Tensor> {
    Ok(Tensor::f_stack(tensors, 0)?.f_sum_dim_intlist([0i64].as_slice(), false, None)?)
}

#[cfg(test)]
mod tests {
    use anyroll_close::assert_close;
    use tch::Device;

    use super::*;

    /// The loss as `load_balancing_loss_func` of `transformers` writes it, without a mask, from all layers' logits.
    fn expected(logits: &[Tensor], per_token: i64) -> Tensor {
        let all = Tensor::cat(logits, 0);
        let experts = all.size()[1];
        let weights = all.softmax(-1, None);
        let (_, selected) = weights.topk(per_token, -1, true, true);
        let mask = selected.one_hot(experts).to_kind(Kind::Double);
        let tokens_per_expert = mask.mean_dim([0i64].as_slice(), false, None);
        let probs_per_expert = weights.mean_dim([0i64].as_slice(), false, None);
        (tokens_per_expert * probs_per_expert.unsqueeze(0)).sum(None) * experts
    }

    /// Two layers against libtorch's own autograd; of a part with padding the first rows count.
    #[test]
    fn the_balancing_loss_is_that_of_transformers() {
        let at = (Kind::Double, Device::Cpu);
        for (rows, padding) in [(9, 0), (6, 3)] {
            let logits = [0.3, 1.1].map(|by| {
                let values = (Tensor::arange((rows + padding) * 5, at) * by).sin() * 2.0;
                values.view([-1, 5]).set_requires_grad(true)
            });
            let loss = expected(&logits.each_ref().map(|it| it.narrow(0, 0, rows)), 2);
            let gradients = Tensor::run_backward(&[&loss * 0.6], &logits, false, false);
            let _guard = tch::no_grad_guard();
            let watch = RouterWatch::new(1.2, rows + padding).of_part(3, rows, 2);
            let choices = logits.each_ref().map(|it| Choice::new(it, 2, true).unwrap());
            for (layer, choice) in choices.iter().enumerate() {
                // A recomputed pass does not count twice.
                (0..2).for_each(|_| watch.see(layer, &choice.chosen, choice, None).unwrap());
            }
            for (choice, gradient) in choices.iter().zip(&gradients) {
                let mut found = gradient.zeros_like();
                watch.add_gradient_(choice, &mut found).unwrap();
                assert_close("gradient", &found, gradient, 1e-12);
            }
            let sums = watch.take().unwrap().unwrap();
            assert_close("loss", &sums.balance.get(0), &loss, 1e-12);
            assert_eq!(sums.balance.double_value(&[1]), 1.0);
            assert_eq!(
                (sums.load.size(), sums.load.sum(None).double_value(&[])),
                (vec![2, 5], 4.0 * rows as f64)
            );
            assert_eq!(sums.others.double_value(&[0]), 2.0 * rows as f64);
            assert!(watch.take().unwrap().is_none());
        }
    }
}
