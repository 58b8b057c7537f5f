//! A mixture of experts in a step of decoding that is recorded: what [`super::Choice`] and [`super::Dispatch`] compute, in
//! memory that is given and without anybody waiting for the numbers of an expert's rows.

use tch::{Device, Kind, Tensor};

use super::check::{Args, Engine};
use super::decode::device_of;
use super::{Error, Result};
use crate::kernels::product::Product;
use crate::kernels::{
    self, Narrow,
    experts::{MOST_EXPERTS, Routes},
};

/// The experts that the rows of a step go to, and the order of the rows by their experts: B rows and R = B J sorted ones.
#[derive(Debug)]
pub struct Routing {
    /// int32 `[B, J]`.
    chosen: Tensor,
    /// fp32 `[B, J]`.
    weights: Tensor,
    /// int32 `[E]`.
    ends: Tensor,
    /// int32 `[R]`.
    tokens: Tensor,
    /// int32 `[B, J]`.
    places: Tensor,
    /// The first of the experts whose matrices are here, and their number.
    own: (i64, i64),
}

/// Returns an error, with the reason, if the kernels do not take weights like `like`, of `experts` experts from `hidden` to
/// `width` values.
pub fn routes_in_place(like: &Tensor, experts: i64, [hidden, width]: [i64; 2]) -> Result<(), String> {
    let product = |outputs, inputs| Product::new([std::ptr::null_mut(); 3], [1, outputs, inputs]);
    let (expand, reduce) = (product(width, hidden), product(hidden, width));
    let fits =
        |device: &dyn crate::Device, narrow| expand.fits(device, narrow) && reduce.fits(device, narrow);
    match (Engine::of(like), Narrow::of(like.kind())) {
        (Some(Engine::Device(device)), Some(narrow)) if fits(&*device, narrow) && experts <= MOST_EXPERTS => {
            Ok(())
        }
        _ => Err(format!(
            "there are no kernels for {experts} experts of {hidden} and {width} values in {:?}",
            like.kind()
        )),
    }
}

impl Routing {
    /// For up to `rows` rows that choose `per_token` of `experts` each.
    ///
    /// # Errors
    /// libtorch's error (out of memory).
    pub fn new(rows: i64, experts: i64, per_token: i64, device: Device) -> Result<Routing> {
        let ints = |size: &[i64]| Tensor::f_zeros(size, (Kind::Int, device));
        Ok(Routing {
            chosen: ints(&[rows, per_token])?,
            weights: Tensor::f_zeros([rows, per_token], (Kind::Float, device))?,
            ends: ints(&[experts])?,
            tokens: ints(&[rows * per_token])?,
            places: ints(&[rows, per_token])?,
            own: (0, experts),
        })
    }

    /// The same memory for the matrices of the `count` experts from `first` on alone: rows of others are skipped.
    #[must_use]
    pub fn of_experts(self, (first, count): (i64, i64)) -> Routing {
        Routing { own: (first, count), ..self }
    }

    /// Views for the first `rows` rows.
    ///
    /// # Errors
    /// libtorch's error (there are fewer).
    pub fn first(&self, rows: i64) -> Result<Routing> {
        Ok(Routing {
            chosen: self.chosen.f_narrow(0, 0, rows)?,
            weights: self.weights.f_narrow(0, 0, rows)?,
            ends: self.ends.shallow_clone(),
            tokens: self.tokens.f_narrow(0, 0, rows * self.per_token())?,
            places: self.places.f_narrow(0, 0, rows)?,
            own: self.own,
        })
    }

    /// The same memory, but the rows' experts go to `chosen`, int32 `[B, J]`: for a step that keeps those of every layer.
    pub fn choosing_into(&self, chosen: Tensor) -> Routing {
        Routing {
            chosen,
            weights: self.weights.shallow_clone(),
            ends: self.ends.shallow_clone(),
            tokens: self.tokens.shallow_clone(),
            places: self.places.shallow_clone(),
            own: self.own,
        }
    }

    /// Routes rows by their logits `[B, E]`; whether the weights of a row's experts add up to 1.
    ///
    /// # Errors
    /// [`super::Error::Argument`] for tensors that do not fit, or the device's error; so for all below.
    pub fn become_of(&mut self, logits: &Tensor, is_normalized: bool) -> Result<()> {
        let args = Args::new("Routing::become_of", logits);
        let (device, narrow) = (device_of(args, logits)?, narrow_of(args, "logits")?);
        let logits = args.values("logits", logits, &[self.rows(), self.ends.size()[0]])?;
        // SAFETY: the sizes of all tensors were checked, and what is written is borrowed mutably; libtorch takes memory back
        // in the order of its stream.
        args.launched(unsafe {
            kernels::experts::route(&*device, narrow, logits, is_normalized, self.routes(args)?)
        })
    }

    /// [`super::glu()`] with SiLU of each row of `x` `[B, C]` times the matrices of its experts, of all own ones `[E 2 F, C]`, into
    /// the sorted rows `y` `[R, F]`.
    pub fn swiglu_linear_into(&self, x: &Tensor, weight: &Tensor, y: &mut Tensor) -> Result<()> {
        let args = Args::new("Routing::swiglu_linear_into", x);
        let (narrow, product) = self.product(args, (x, self.rows()), weight, y, 2)?;
        let (device, product) = (device_of(args, x)?, Product { is_gated: 1, ..product });
        // SAFETY: as in `become_of`; weights are not what a step of decoding writes.
        args.launched(unsafe {
            kernels::experts::multiply(&*device, narrow, product, true, self.routes(args)?)
        })
    }

    /// Sorted rows `x` `[R, F]` times the matrices of their experts, of all own ones `[E C, F]`, into `made` `[R, C]`, whose sum for
    /// each row, by what its experts count, is added to `y` `[B, C]`.
    pub fn add_linear_(&self, y: &mut Tensor, x: &Tensor, weight: &Tensor, made: &mut Tensor) -> Result<()> {
        let args = Args::new("Routing::add_linear_", x);
        let (narrow, product) = self.product(args, (x, self.tokens.size()[0]), weight, made, 1)?;
        let columns = made.size()[1];
        let y = args.values("y", y, &[self.rows(), columns])?;
        let (device, routes) = (device_of(args, x)?, self.routes(args)?);
        // SAFETY: as in `become_of`; weights are not what a step of decoding writes.
        args.launched(unsafe {
            kernels::experts::multiply(&*device, narrow, product, false, routes)
                .and_then(|()| kernels::experts::add_up(&*device, narrow, y, product.y, columns, routes))
        })
    }

    fn rows(&self) -> i64 {
        self.chosen.size()[0]
    }

    fn per_token(&self) -> i64 {
        self.chosen.size()[1]
    }

    fn routes(&self, args: Args) -> Result<Routes> {
        let of_rows = [self.rows(), self.per_token()];
        let (experts, ints) = (self.ends.size()[0], Kind::Int);
        Ok(Routes {
            chosen: args.dense("chosen", &self.chosen, &of_rows, ints)?,
            weights: args.floats("weights", &self.weights, &of_rows)?.cast(),
            ends: args.dense("ends", &self.ends, &[experts], ints)?,
            tokens: args.dense("tokens", &self.tokens, &[of_rows[0] * of_rows[1]], ints)?,
            places: args.dense("places", &self.places, &of_rows, ints)?,
            rows: of_rows[0] as i32,
            experts: experts as i32,
            own: [self.own.0 as i32, self.own.1 as i32],
            per_token: of_rows[1] as i32,
        })
    }

    /// The product of sorted rows with their experts' matrices into `y`, where there are so many rows of weights for a column.
    fn product(
        &self,
        args: Args,
        (x, rows): (&Tensor, i64),
        weight: &Tensor,
        y: &mut Tensor,
        halves: i64,
    ) -> Result<(Narrow, Product)> {
        let ([_, inputs], [_, outputs]) = (args.dims("x", x)?, args.dims("y", y)?);
        let sorted = self.tokens.size()[0];
        let addresses = [
            args.values("x", x, &[rows, inputs])?,
            args.values("weight", weight, &[self.own.1 * halves * outputs, inputs])?,
            args.values("y", y, &[sorted, outputs])?,
        ];
        let product = Product::new(addresses, [sorted, outputs, inputs]);
        let (device, narrow) = (device_of(args, x)?, narrow_of(args, "weight")?);
        if !product.is_aligned() || !product.fits(&*device, narrow) {
            return Err(no_kernels(args, "weight"));
        }
        Ok((narrow, product))
    }
}

/// The float of the values, for which there are kernels.
fn narrow_of(args: Args, argument: &'static str) -> Result<Narrow> {
    args.narrow().ok_or_else(|| no_kernels(args, argument))
}

fn no_kernels(args: Args, argument: &'static str) -> Error {
    args.refuse(argument, "is none that there are kernels for (`routes_in_place`)")
}

#[cfg(test)]
mod tests {
    use anyroll_close::assert_close;

    use super::*;
    use crate::ops::{Activation, Choice, Dispatch, glu, grouped_linear, tests::*};

    /// Against the operations of training: experts without rows, with more than a block takes at once, and equals.
    #[test]
    fn a_step_is_choice_dispatch_and_products() {
        for &place in PLACES.iter().filter(|(kind, _)| Narrow::of(*kind).is_some()) {
            for (rows, experts, per_token, hidden, width) in
                [(1, 8, 2, 128, 64), (64, 128, 8, 256, 192), (150, 4, 2, 64, 128), (7, 60, 4, 320, 64)]
            {
                let [x, before] = [(); 2].map(|()| random(&[rows, hidden], place));
                if let Err(reason) = routes_in_place(&x, experts, [hidden, width]) {
                    eprintln!("SKIPPED in {place:?}: {reason}");
                    continue;
                }
                let router = random(&[experts, hidden], place) * 0.1;
                let expand = random(&[experts * 2 * width, hidden], place) * 0.1;
                let reduce = random(&[experts * hidden, width], place) * 0.1;
                for is_normalized in [false, true] {
                    let what = format!("{rows} rows, {per_token} of {experts}, {hidden} and {width}");
                    let logits = x.mm(&router.tr());
                    let choice = Choice::new(&logits, per_token, is_normalized).unwrap();
                    let dispatch = Dispatch::new(&choice.chosen, experts).unwrap();
                    let sorted = dispatch.spread(&x).unwrap();
                    let expanded = grouped_linear(&sorted, &expand, &dispatch.groups).unwrap();
                    let activated = glu(&expanded, Activation::Silu).unwrap();
                    let product = grouped_linear(&activated, &reduce, &dispatch.groups).unwrap();
                    let weights = choice.weights().unwrap();
                    let expected = dispatch.add_up(&before, &product, Some(&weights)).unwrap();

                    let all = Routing::new(rows + 3, experts, per_token, place.1).unwrap();
                    let mut routing = all.first(rows).unwrap();
                    routing.become_of(&logits, is_normalized).unwrap();
                    assert_eq!(routing.chosen.to_kind(Kind::Int64), choice.chosen, "{what}");
                    assert_close(&what, &routing.weights, &weights, 1e-5);
                    let mut found = Tensor::full([rows * per_token, width], f64::NAN, place);
                    routing.swiglu_linear_into(&x, &expand, &mut found).unwrap();
                    assert_close(&what, &found, &activated, 0.02);
                    let mut made = Tensor::full([rows * per_token, hidden], f64::NAN, place);
                    let mut y = before.copy();
                    routing.add_linear_(&mut y, &found, &reduce, &mut made).unwrap();
                    assert_close(&what, &y, &expected, 0.02);
                    // Two halves of the experts, each of which skips the other's rows.
                    let mut y = before.copy();
                    for half in 0..2 {
                        let own = experts / 2;
                        let matrices = |all: &Tensor| {
                            let rows = all.size()[0] / 2;
                            all.narrow(0, half * rows, rows)
                        };
                        let routing = routing.first(rows).unwrap().of_experts((half * own, own));
                        drop((found.fill_(f64::NAN), made.fill_(f64::NAN)));
                        routing.swiglu_linear_into(&x, &matrices(&expand), &mut found).unwrap();
                        routing.add_linear_(&mut y, &found, &matrices(&reduce), &mut made).unwrap();
                    }
                    assert_close(&what, &y, &expected, 0.02);
                }
            }
        }
    }
}
