//! Mixtures of experts (Shazeer et al., 2017): each token goes to J of E experts, whose results are summed with weights.
//!
//! ```text
//! p = softmax(logits)      the J largest of p are chosen; w = p of these, or w = p / sum of them all
//! y[n] = sum over j of w[n, j] * expert[chosen[n, j]](x[n])
//! ```
//!
//! Rows of tokens that go to the same expert are stored together, so that each expert is one product. The order depends on the
//! choices alone, so results repeat to the bit.

use tch::{Kind, Tensor};

use super::composite::accumulator;
use super::{Groups, Result, check::Args};

/// The experts that tokens choose.
#[derive(Debug)]
pub struct Choice {
    /// The softmax over all experts: fp32 `[N, E]`.
    pub probs: Tensor,
    /// The experts with the largest probabilities, in descending order, and among equals in ascending order: int64 `[N, J]`.
    pub chosen: Tensor,
    /// The weights of a token's experts are scaled to add up to 1.
    pub is_normalized: bool,
}

impl Choice {
    /// The choice of `per_token` experts by the logits `[N, E]`. A token's choice depends on its own logits alone.
    ///
    /// # Errors
    /// [`super::Error::Argument`] if there are fewer experts, or libtorch's error; the same for all below.
    pub fn new(logits: &Tensor, per_token: i64, is_normalized: bool) -> Result<Choice> {
        let args = Args::new("Choice::new", logits);
        let [_, experts] = args.dims("logits", logits)?;
        if !(1..=experts).contains(&per_token) {
            return Err(args.refuse("per_token", format!("is {per_token}, expected 1 to {experts}")));
        }
        let probs = logits.f_softmax(-1, accumulator(logits))?;
        // libtorch's `topk` says nothing of equals, of which there are many in 16 bits.
        let (_, order) = probs.f_sort_stable(true, -1, true)?;
        let chosen = order.f_narrow(1, 0, per_token)?.f_contiguous()?;
        Ok(Choice { probs, chosen, is_normalized })
    }

    /// The same probabilities, and in the place of the largest the experts `given`, integers `[N, J]`. A row of -1 keeps its
    /// own. Weights and gradients are then those of the given experts.
    pub fn replayed(self, given: &Tensor) -> Result<Choice> {
        let given = given.f_to_kind(Kind::Int64)?;
        let chosen = self.chosen.f_where_self(&given.f_lt(0)?, &given)?;
        Ok(Choice { chosen, ..self })
    }

    /// Weights of each token's experts: fp32 `[N, J]`.
    pub fn weights(&self) -> Result<Tensor> {
        let mut weights = self.probs.f_gather(1, &self.chosen, false)?;
        if self.is_normalized {
            drop(weights.f_divide_(&sum_of_row(&weights)?)?);
        }
        Ok(weights)
    }

    /// Returns the gradient of the logits, fp32 `[N, E]`, from that of [`Self::weights`], fp32 `[N, J]`. The choice of experts
    /// has no gradient.
    pub fn backward(&self, dweights: &Tensor) -> Result<Tensor> {
        let dchosen = match self.is_normalized {
            true => {
                let common = sum_of_row(&dweights.f_mul(&self.weights()?)?)?;
                let total = sum_of_row(&self.probs.f_gather(1, &self.chosen, false)?)?;
                dweights.f_sub(&common)?.f_divide(&total)?
            }
            false => dweights.shallow_clone(),
        };
        let mut dprobs = self.probs.f_zeros_like()?;
        drop(dprobs.f_scatter_(1, &self.chosen, &dchosen)?);
        let common = sum_of_row(&self.probs.f_mul(&dprobs)?)?;
        Ok(dprobs.f_sub_(&common)?.f_mul_(&self.probs)?)
    }
}

/// Order of the R = N J choices of tokens, which lie token by token, when sorted by expert, and for one expert by token.
#[derive(Debug)]
pub struct ExpertOrder {
    /// The choice of each sorted row: int64 `[R]`.
    pub order: Tensor,
    /// The sorted row of each choice: int64 `[R]`.
    pub places: Tensor,
    /// Ends of the experts' rows, see [`Groups::new`]: int32 `[E]`.
    pub ends: Tensor,
}

impl ExpertOrder {
    /// Sorts the tokens' chosen experts, `[N, J]`, of `experts`.
    ///
    /// # Errors
    /// libtorch's (out of memory).
    pub fn new(chosen: &Tensor, experts: i64) -> Result<ExpertOrder> {
        let options = (Kind::Int64, chosen.device());
        let (sorted, order) = chosen.f_flatten(0, 1)?.f_sort_stable(true, 0, false)?;
        let mut places = order.f_empty_like()?;
        drop(places.f_scatter_(0, &order, &Tensor::f_arange(order.size()[0], options)?)?);
        let numbers = Tensor::f_arange(experts, options)?;
        let ends = numbers.f_searchsorted(&sorted, true, true, "right", None::<&Tensor>)?;
        Ok(ExpertOrder { order, places, ends })
    }
}

/// Rows of tokens sorted by expert: see [`ExpertOrder`].
#[derive(Debug)]
pub struct Dispatch {
    /// The rows of each expert.
    pub groups: Groups,
    /// The token of each sorted row: int64 `[R]`.
    tokens: Tensor,
    /// The sorted row of each token's choices: int64 `[N, J]`.
    places: Tensor,
}

impl Dispatch {
    /// The order for the tokens' chosen experts, `[N, J]`, of `experts`.
    ///
    /// # Errors
    /// The same as [`Choice::new`].
    pub fn new(chosen: &Tensor, experts: i64) -> Result<Dispatch> {
        let [_, per_token] = Args::new("Dispatch::new", chosen).dims("chosen", chosen)?;
        let ExpertOrder { order, places, ends } = ExpertOrder::new(chosen, experts)?;
        Ok(Dispatch {
            groups: Groups::new(ends)?,
            tokens: order.f_div_scalar_mode(per_token, "floor")?,
            places: places.f_view([-1, per_token])?,
        })
    }

    /// The rows of `x` `[N, C]`, sorted: `[R, C]`.
    ///
    /// # Errors
    /// libtorch's (out of memory); so for all below.
    pub fn spread(&self, x: &Tensor) -> Result<Tensor> {
        Ok(x.f_index_select(0, &self.tokens)?)
    }

    /// Numbers of each token's choices `[N, J]` in the order of the sorted rows: `[R, 1]`.
    pub fn sorted(&self, of_choices: &Tensor) -> Result<Tensor> {
        let mut sorted = of_choices.f_empty_like()?.f_view([-1])?;
        drop(sorted.f_scatter_(0, &self.places.f_view([-1])?, &of_choices.f_contiguous()?.f_view([-1])?)?);
        Ok(sorted.f_unsqueeze(1)?)
    }

    /// The scalar products of the sorted rows `[R, F]` of `a` and of `b`, as those of each token's choices: fp32 `[N, J]`.
    pub fn dots(&self, a: &Tensor, b: &Tensor) -> Result<Tensor> {
        self.of_choices(&row_dots(a, b)?)
    }

    /// Numbers of the sorted rows `[R]` as those of each token's choices: `[N, J]`; the inverse of [`Self::sorted`].
    pub fn of_choices(&self, of_rows: &Tensor) -> Result<Tensor> {
        Ok(self.unsorted(of_rows)?.f_view_as(&self.places)?)
    }

    /// Sorted rows `[R, ...]` in the order of the tokens' choices.
    pub fn unsorted(&self, rows: &Tensor) -> Result<Tensor> {
        Ok(rows.f_index_select(0, &self.places.f_view([-1])?)?)
    }

    /// `base` `[N, C]` plus the sum of each token's sorted rows `[R, C]`, weighted by `weights` `[N, J]` if there are any:
    /// `[N, C]`. Sums run in the order of a token's choices and are rounded once.
    pub fn add_up(&self, base: &Tensor, rows: &Tensor, weights: Option<&Tensor>) -> Result<Tensor> {
        let kind = accumulator(rows);
        let mut sum = base.f_to_dtype(kind, false, true)?;
        for choice in 0..self.places.size()[1] {
            let mut rows = rows.f_index_select(0, &self.places.f_select(1, choice)?)?.f_to_kind(kind)?;
            if let Some(weights) = weights {
                drop(rows.f_mul_(&weights.f_narrow(1, choice, 1)?)?);
            }
            drop(sum.f_add_(&rows)?);
        }
        Ok(sum.f_to_kind(rows.kind())?)
    }
}

/// The scalar products of the rows `[R, F]` of `a` and of `b`: fp32 `[R]`.
///
/// # Errors
/// libtorch's (out of memory).
pub fn row_dots(a: &Tensor, b: &Tensor) -> Result<Tensor> {
    Ok(a.f_mul(b)?.f_sum_dim_intlist([-1i64].as_slice(), false, accumulator(a))?)
}

fn sum_of_row(rows: &Tensor) -> Result<Tensor> {
    Ok(rows.f_sum_dim_intlist([-1i64].as_slice(), true, None)?)
}

#[cfg(test)]
mod tests {
    use anyroll_close::assert_close;

    use super::*;
    use crate::ops::{
        Store, grouped_input_backward, grouped_linear, grouped_linear_by_rows, grouped_weight_backward,
        tests::*,
    };
    use tch::Device;

    const DOUBLE: (Kind, Device) = (Kind::Double, Device::Cpu);

    /// A choice and its gradient against libtorch's own autograd, of logits without equals.
    #[test]
    fn choices_equal_libtorch() {
        for is_normalized in [false, true] {
            let logits = (random(&[9, 6], DOUBLE) * 2.0).set_requires_grad(true);
            let doutput = random(&[9, 3], DOUBLE);
            let (largest, indices) = logits.softmax(-1, None).topk(3, -1, true, true);
            let total = largest.sum_dim_intlist([-1i64].as_slice(), true, None);
            let expected = if is_normalized { &largest / total } else { largest };
            let gradient = autograd_of(&(&expected * &doutput).sum(None), &[logits.shallow_clone()]);
            let _guard = tch::no_grad_guard();
            let choice = Choice::new(&logits, 3, is_normalized).unwrap();
            assert_eq!(choice.chosen, indices);
            assert_close("weights", &choice.weights().unwrap(), &expected, 1e-12);
            assert_close("dlogits", &choice.backward(&doutput).unwrap(), &gradient[0], 1e-12);
        }
    }

    /// Given experts against libtorch's own autograd; one row keeps its own.
    #[test]
    fn given_experts_have_the_routers_weights_and_gradients() {
        for is_normalized in [false, true] {
            let logits = (random(&[3, 6], DOUBLE) * 2.0).set_requires_grad(true);
            let own = Choice::new(&logits.detach(), 2, is_normalized).unwrap();
            let given = Tensor::from_slice(&[5i16, 1, -1, -1, 0, 4]).view([3, 2]);
            let rows =
                [given.get(0).to_kind(Kind::Int64), own.chosen.get(1), given.get(2).to_kind(Kind::Int64)];
            let expected = Tensor::stack(&rows, 0);
            let picked = logits.softmax(-1, None).gather(1, &expected, false);
            let total = picked.sum_dim_intlist([-1i64].as_slice(), true, None);
            let weights = if is_normalized { &picked / total } else { picked };
            let doutput = random(&[3, 2], DOUBLE);
            let gradient = autograd_of(&(&weights * &doutput).sum(None), &[logits.shallow_clone()]);
            let _guard = tch::no_grad_guard();
            let choice = own.replayed(&given).unwrap();
            assert_eq!(choice.chosen, expected);
            assert_close("weights", &choice.weights().unwrap(), &weights, 1e-12);
            assert_close("dlogits", &choice.backward(&doutput).unwrap(), &gradient[0], 1e-12);
        }
    }

    #[test]
    fn of_equals_the_first_are_chosen() {
        let logits = Tensor::from_slice(&[1.0f32, 3.0, 1.0, 3.0, 1.0, 0.0]).view([1, 6]);
        let chosen = Choice::new(&logits, 4, true).unwrap().chosen;
        assert_eq!(chosen, Tensor::from_slice(&[1i64, 3, 0, 2]).view([1, 4]));
        for refused in [0, 7] {
            let error = Choice::new(&logits, refused, true).unwrap_err().to_string();
            assert!(error.contains("`per_token`"), "{error}");
        }
    }

    /// Every product against matrices picked row by row, with an expert that nobody chose.
    #[test]
    fn grouped_products_equal_products_of_rows() {
        for &place in PLACES.iter() {
            let (experts, inputs, outputs) = (5, 16, 24);
            let chosen =
                Tensor::from_slice(&[4i64, 1, 0, 1, 3, 1, 1, 0, 4, 3]).view([5, 2]).to_device(place.1);
            let dispatch = Dispatch::new(&chosen, experts).unwrap();
            let (x, weight) = (random(&[5, inputs], place), random(&[experts * outputs, inputs], place));
            let sorted = dispatch.spread(&x).unwrap();
            let order = chosen.flatten(0, 1).sort_stable(true, 0, false).0;
            let [wide_x, wide_weight] = [&sorted, &weight].map(|it| it.to_kind(Kind::Double));
            let matrices = wide_weight.view([experts, outputs, inputs]).index_select(0, &order);
            let expected = matrices.bmm(&wide_x.unsqueeze(2)).squeeze_dim(2);
            let y = grouped_linear(&sorted, &weight, &dispatch.groups).unwrap();
            let near = tolerance(place.0, 2.0);
            assert_close("y", &y, &expected, near);
            assert_close(
                "by rows",
                &grouped_linear_by_rows(&sorted, &weight, &dispatch.groups).unwrap(),
                &expected,
                near,
            );
            let dy = random(&[10, outputs], place);
            let wide_dy = dy.to_kind(Kind::Double);
            let dx = wide_dy.unsqueeze(1).bmm(&matrices).squeeze_dim(1);
            assert_close("dx", &grouped_input_backward(&dy, &weight, &dispatch.groups).unwrap(), &dx, near);
            let outer = wide_dy.unsqueeze(2).bmm(&wide_x.unsqueeze(1));
            let mut dweight = Tensor::zeros([experts, outputs, inputs], (Kind::Double, place.1));
            drop(dweight.index_add_(0, &order, &outer));
            let dweight = dweight.view([experts * outputs, inputs]);
            let mut found = weight.full_like(f64::NAN);
            grouped_weight_backward(&dy, &sorted, &dispatch.groups, &mut found, Store::Write).unwrap();
            assert_close("dweight", &found, &dweight, near);
            grouped_weight_backward(&dy, &sorted, &dispatch.groups, &mut found, Store::Add).unwrap();
            assert_close("twice dweight", &found, &(&dweight * 2.0), 2.0 * near);
            // Numbers of choices go to their rows, and rows add up where they came from.
            let weights = random(&[5, 2], (Kind::Float, place.1));
            let column = dispatch.sorted(&weights).unwrap();
            let sum = dispatch.add_up(&x, &sorted, Some(&weights)).unwrap();
            let total = weights.sum_dim_intlist([-1i64].as_slice(), true, None).to_kind(Kind::Double);
            let wide = x.to_kind(Kind::Double);
            assert_close("sum", &sum, &(&wide + &wide * total), near);
            let weighted = (&sorted * &column).to_kind(place.0);
            assert_close(
                "weighted",
                &dispatch.add_up(&x, &weighted, None).unwrap(),
                &sum.to_kind(Kind::Double),
                2.0 * near,
            );
        }
    }
}
