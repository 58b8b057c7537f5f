//! The optimizer's passes over flat fp32 buffers: AdamW, and the sum of squares behind the gradient norm.

use tch::{Kind, Tensor};

use super::{
    Result,
    check::{Args, Engine},
};
use crate::kernels::{self, Narrow};

unsafe extern "C" {
    // shim/optimizer.cpp
    fn anyroll_adamw(
        weights: *mut f32,
        exp_avg: *mut f32,
        exp_avg_sq: *mut f32,
        gradient: *const f32,
        factors: *const f32,
        len: i64,
        learning_rate: f32,
        beta1: f32,
        beta2: f32,
        eps: f32,
        weight_decay: f32,
    );
    fn anyroll_sum_of_squares(x: *const f32, len: i64, sum: *mut f64);
}

/// Hyperparameters of one AdamW step, which the host knows.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AdamW {
    /// Learning rate of this step.
    pub learning_rate: f64,
    /// Decay of the first and second moment.
    pub betas: (f64, f64),
    /// Added to the root of the second moment.
    pub eps: f64,
    /// Decoupled weight decay.
    pub weight_decay: f64,
}

impl AdamW {
    /// The numbers as kernels take them.
    pub(crate) fn numbers(&self) -> kernels::strategy::AdamW {
        let learning_rate = self.learning_rate as f32;
        kernels::strategy::AdamW {
            learning_rate,
            beta1: self.betas.0 as f32,
            beta2: self.betas.1 as f32,
            eps: self.eps as f32,
            keep: 1.0 - learning_rate * self.weight_decay as f32,
        }
    }

    /// The numbers of a step that only the device knows, since it may skip one: fp32 `[3]`. `scale` (one element)
    /// multiplies the gradient; by the others the first moment, and the root of the second, are divided in step
    /// `step` (one element, from 1).
    ///
    /// # Errors
    /// libtorch's.
    pub fn factors(&self, scale: &Tensor, step: &Tensor) -> Result<Tensor> {
        let step = step.f_reshape([1])?.f_to_kind(Kind::Double)?;
        let correction = |beta: f64| Tensor::f_pow_scalar(beta, &step)?.f_neg()?.f_add_scalar(1.0);
        let (bias1, bias2_root) = (correction(self.betas.0)?, correction(self.betas.1)?.f_sqrt()?);
        let scale = scale.f_reshape([1])?.f_to_kind(Kind::Double)?;
        Ok(Tensor::f_cat(&[scale, bias1, bias2_root], 0)?.f_to_kind(Kind::Float)?)
    }
}

/// One step of AdamW in place (Loshchilov and Hutter 2019; PyTorch's `torch.optim.AdamW`): all fp32 `[N]`, but that
/// the gradient may be bf16 or fp16.
///
/// `factors`, on the same device, is from [`AdamW::factors`]. Where its scale is not finite nothing is written, so
/// that a step with a NaN in its gradient leaves weights and moments as they were.
///
/// # Errors
/// [`super::Error::Argument`] for other shapes, dtypes or strides, or libtorch's error.
pub fn adamw_(
    weights: &mut Tensor,
    exp_avg: &mut Tensor,
    exp_avg_sq: &mut Tensor,
    gradient: &Tensor,
    factors: &Tensor,
    adamw: &AdamW,
) -> Result<()> {
    let engine = match Engine::of(weights) {
        Some(engine) if weights.kind() == Kind::Float => engine,
        _ => {
            let gradient = gradient.f_to_kind(weights.kind())?;
            return composite_adamw_(weights, exp_avg, exp_avg_sq, &gradient, factors, adamw);
        }
    };
    let args = Args::new("adamw", weights);
    let [len] = args.dims("weights", weights)?;
    let widened; // exact
    let gradient = match engine {
        Engine::Cpu if Narrow::of(gradient.kind()).is_some() => {
            widened = gradient.f_to_kind(Kind::Float)?;
            &widened
        }
        _ => gradient,
    };
    let w = args.floats("weights", weights, &[len])?;
    let m = args.floats("exp_avg", exp_avg, &[len])?;
    let v = args.floats("exp_avg_sq", exp_avg_sq, &[len])?;
    let kind = gradient_kind(gradient);
    let g = args.dense("gradient", gradient, &[len], kind)?;
    let factors = args.floats("factors", factors, &[3])?;
    let numbers = adamw.numbers();
    // SAFETY: `floats` has checked that each holds `len` dense floats where the weights are (three for `factors`), and
    // the mutable borrows keep the three that are written apart from each other and from the gradient.
    unsafe {
        match engine {
            Engine::Cpu => anyroll_adamw(
                w,
                m,
                v,
                g.cast(),
                factors,
                len,
                numbers.learning_rate,
                numbers.beta1,
                numbers.beta2,
                numbers.eps,
                adamw.weight_decay as f32,
            ),
            Engine::Device(device) => {
                let states = [w, m, v].map(|address| address.cast());
                let (gradient, factors) = ((g, kind), factors.cast());
                let len = weights.numel();
                let launched = device.torch_stream().and_then(|stream| {
                    kernels::strategy::adamw(&*device, states, gradient, factors, len, numbers, stream)
                });
                args.launched(launched)?;
            }
        }
    }
    Ok(())
}

/// The dtype that a gradient must have: its own if that has 16 bits, and otherwise fp32.
fn gradient_kind(gradient: &Tensor) -> Kind {
    if Narrow::of(gradient.kind()).is_some() { gradient.kind() } else { Kind::Float }
}

/// The sum of the squares of an fp32 `[N]`, as one fp64 element on the same device. Summed in fp64, in an order
/// that depends on N alone.
///
/// # Errors
/// [`super::Error::Argument`] for other shapes, or libtorch's error.
pub fn sum_of_squares(x: &Tensor) -> Result<Tensor> {
    let engine = match Engine::of(x) {
        Some(engine) if x.kind() == Kind::Float => engine,
        _ => return composite_sum_of_squares(x),
    };
    let args = Args::new("sum_of_squares", x);
    let [len] = args.dims("x", x)?;
    let data = args.floats("x", x, &[len])?;
    let empty = |size: &[i64]| Tensor::f_empty(size, (Kind::Double, x.device()));
    let sum = empty(&[])?;
    // SAFETY: `floats` has checked `x`; the others are ours, and as long as the kernels ask.
    unsafe {
        match engine {
            Engine::Cpu => anyroll_sum_of_squares(data, len, sum.data_ptr().cast()),
            Engine::Device(device) => {
                let partial = empty(&[kernels::strategy::partial_sums(x.numel()) as i64])?;
                let (data, partial) = (data.cast(), partial.data_ptr());
                let (len, total) = (x.numel(), sum.data_ptr());
                let launched = device.torch_stream().and_then(|stream| {
                    kernels::strategy::sum_of_squares(&*device, data, len, partial, total, stream)
                });
                args.launched(launched)?;
            }
        }
    }
    Ok(sum)
}

/// [`adamw_`] in plain ATen calls.
fn composite_adamw_(
    weights: &mut Tensor,
    exp_avg: &mut Tensor,
    exp_avg_sq: &mut Tensor,
    gradient: &Tensor,
    factors: &Tensor,
    adamw: &AdamW,
) -> Result<()> {
    let (beta1, beta2) = adamw.betas;
    let factor = |index: i64| factors.f_select(0, index);
    let (scale, bias1, bias2_root) = (factor(0)?, factor(1)?, factor(2)?);
    let finite = scale.f_isfinite()?;
    let gradient = gradient.f_mul(&scale)?;
    let m = exp_avg.f_mul_scalar(beta1)?.f_add(&gradient.f_mul_scalar(1.0 - beta1)?)?;
    let v = exp_avg_sq.f_mul_scalar(beta2)?.f_add(&gradient.f_square()?.f_mul_scalar(1.0 - beta2)?)?;
    let root = v.f_sqrt()?.f_div(&bias2_root)?.f_add_scalar(adamw.eps)?;
    let update = m.f_div(&root)?.f_mul_scalar(adamw.learning_rate)?.f_div(&bias1)?;
    let w = weights.f_mul_scalar(1.0 - adamw.learning_rate * adamw.weight_decay)?.f_sub(&update)?;
    for (state, new) in [(weights, w), (exp_avg, m), (exp_avg_sq, v)] {
        state.f_copy_(&new.f_where_self(&finite, state)?)?;
    }
    Ok(())
}

/// [`sum_of_squares`] in plain ATen calls.
fn composite_sum_of_squares(x: &Tensor) -> Result<Tensor> {
    Ok(x.f_to_kind(Kind::Double)?.f_square()?.f_sum(Kind::Double)?)
}

#[cfg(test)]
mod tests {
    use tch::{Device, Kind, Tensor};

    use super::{AdamW, Result, adamw_, composite_adamw_, composite_sum_of_squares, sum_of_squares};

    const FLOAT: (Kind, Device) = (Kind::Float, Device::Cpu);

    /// Ten steps of the kernel, of the composite and of the textbook formula in fp64, at sizes around the
    /// kernel's chunks.
    #[test]
    fn adamw_follows_the_formula() {
        for len in [0, 1, 7, 4096, 40_001] {
            let mut kernel =
                [Tensor::randn([len], FLOAT), Tensor::zeros([len], FLOAT), Tensor::zeros([len], FLOAT)];
            let mut composite = kernel.each_ref().map(Tensor::copy);
            let mut exact = kernel.each_ref().map(|t| t.to_kind(Kind::Double));
            let hyper = AdamW { learning_rate: 1e-2, betas: (0.9, 0.98), eps: 1e-8, weight_decay: 0.1 };
            for step in 1..=10 {
                let factors = hyper.factors(&Tensor::from(0.5f32), &Tensor::from(step)).unwrap();
                let gradient = Tensor::randn([len], FLOAT);
                let [w, m, v] = &mut kernel;
                adamw_(w, m, v, &gradient, &factors, &hyper).unwrap();
                let [w, m, v] = &mut composite;
                composite_adamw_(w, m, v, &gradient, &factors, &hyper).unwrap();
                let [w, m, v] = &mut exact;
                let g = gradient.to_kind(Kind::Double) * 0.5;
                *m = &*m * 0.9 + &g * 0.1;
                *v = &*v * 0.98 + &g * &g * 0.02;
                let corrected = (&*v / (1.0 - 0.98f64.powi(step))).sqrt() + 1e-8;
                *w = &*w * (1.0 - 1e-2 * 0.1) - (&*m / (1.0 - 0.9f64.powi(step))) / corrected * 1e-2;
            }
            for (name, states) in [("kernel", &kernel), ("composite", &composite)] {
                for (state, exact) in states.iter().zip(&exact) {
                    let error =
                        (state.to_kind(Kind::Double) - exact).abs().sum(Kind::Double).double_value(&[]);
                    assert!(error <= 2e-6 * len as f64, "{name}, {len} elements: mean error {error}");
                }
            }
        }
    }

    #[test]
    fn a_gradient_of_16_bits_counts_as_its_values() {
        let hyper = AdamW { learning_rate: 1e-2, betas: (0.9, 0.98), eps: 1e-8, weight_decay: 0.1 };
        let factors = hyper.factors(&Tensor::from(0.5f32), &Tensor::from(1)).unwrap();
        let step = |gradient: &Tensor| {
            let [mut w, mut m, mut v] = [1.0, 0.5, 0.25].map(|value| Tensor::full([1000], value, FLOAT));
            adamw_(&mut w, &mut m, &mut v, gradient, &factors, &hyper).unwrap();
            w
        };
        for kind in [Kind::BFloat16, Kind::Half] {
            let gradient = Tensor::randn([1000], (kind, Device::Cpu));
            assert!(step(&gradient).equal(&step(&gradient.to_kind(Kind::Float))), "{kind:?}");
        }
    }

    #[test]
    fn a_scale_that_is_not_finite_changes_nothing() {
        let hyper = AdamW { learning_rate: 1.0, betas: (0.9, 0.9), eps: 1e-8, weight_decay: 0.1 };
        let factors = hyper.factors(&Tensor::from(f32::NAN), &Tensor::from(1)).unwrap();
        type Step = fn(&mut Tensor, &mut Tensor, &mut Tensor, &Tensor, &Tensor, &AdamW) -> Result<()>;
        for (step, name) in [(adamw_ as Step, "kernel"), (composite_adamw_, "composite")] {
            let before = [1.0f32, 2.0, 3.0].map(|value| Tensor::full([5], f64::from(value), FLOAT));
            let mut after = before.each_ref().map(Tensor::copy);
            let [w, m, v] = &mut after;
            let gradient = Tensor::full([5], f64::NAN, FLOAT);
            step(w, m, v, &gradient, &factors, &hyper).unwrap();
            assert!(before.iter().zip(&after).all(|(a, b)| a.equal(b)), "{name}");
        }
    }

    #[test]
    fn sums_of_squares_are_fp64() {
        for len in [0, 1, 1000, 4097, 100_000] {
            let x = Tensor::randn([len], FLOAT);
            let exact = x.to_kind(Kind::Double).square().sum(Kind::Double).double_value(&[]);
            for sum in [sum_of_squares(&x).unwrap(), composite_sum_of_squares(&x).unwrap()] {
                assert!((sum.double_value(&[]) - exact).abs() <= 1e-12 * exact, "{len} elements");
            }
        }
    }
}

#[cfg(test)]
mod tests_on_a_gpu {
    use std::sync::Arc;

    use half::{bf16, f16};
    use tch::{Kind, Tensor};

    use super::{AdamW, adamw_, sum_of_squares};
    use crate::{
        BackendKind, Device,
        testing::{adamw_one, first_of, values},
    };

    /// The first GPU on which libtorch computes.
    fn device() -> Option<Arc<dyn Device>> {
        first_of(BackendKind::CUDA)
    }

    /// Five steps, with one that is not finite after each, at `skip` elements behind an aligned address.
    fn steps_as_the_host_does(len: usize, skip: usize, gradient_kind: Kind) {
        let at = tch::Device::Cuda(0);
        let mut host: Vec<[f32; 3]> = values(len, 1).into_iter().map(|w| [w, 0.0, 0.0]).collect();
        let on_device = |column: &[f32], kind| {
            let padded: Vec<f32> = vec![3.0; skip].into_iter().chain(column.iter().copied()).collect();
            let padded = Tensor::from_slice(&padded).to_kind(kind);
            padded.to_device(at).narrow(0, skip as i64, len as i64)
        };
        let zeros = vec![0.0; len];
        let weights: Vec<f32> = host.iter().map(|state| state[0]).collect();
        let mut states = [&weights, &zeros, &zeros].map(|column| on_device(column, Kind::Float));
        for step in 1..=5 {
            let hyper = AdamW { learning_rate: 1e-2, betas: (0.9, 0.98), eps: 1e-8, weight_decay: 0.1 };
            let mut gradient = values(len, 10 + step as u64);
            let rounded = |x: f32| match gradient_kind {
                Kind::BFloat16 => bf16::from_f32(x).to_f32(),
                Kind::Half => f16::from_f32(x).to_f32(),
                _ => x,
            };
            gradient.iter_mut().for_each(|x| *x = rounded(*x));
            for scale in [0.37f32, f32::NAN] {
                let (scale, step) = (Tensor::from(scale), Tensor::from(f64::from(step)));
                let factors = hyper.factors(&scale.to_device(at), &step.to_device(at)).unwrap();
                let [w, m, v] = &mut states;
                adamw_(w, m, v, &on_device(&gradient, gradient_kind), &factors, &hyper).unwrap();
            }
            for (state, gradient) in host.iter_mut().zip(&gradient) {
                *state = adamw_one(*state, gradient * 0.37f32, &hyper, step);
            }
        }
        for (column, state) in states.iter().enumerate() {
            let got = Vec::<f32>::try_from(state.to_device(tch::Device::Cpu)).unwrap();
            let differ = got.iter().zip(&host).filter(|(a, b)| a.to_bits() != b[column].to_bits()).count();
            assert_eq!(differ, 0, "of {len} elements after {skip}, state {column}, {gradient_kind:?}");
        }
    }

    #[test]
    fn adamw_has_the_bits_of_the_host() {
        let Some(_open) = device() else { return };
        for kind in [Kind::Float, Kind::BFloat16, Kind::Half] {
            for (len, skip) in [(0, 0), (1, 0), (7, 0), (4096, 0), (4099, 1), (4100, 2), (4100, 4)] {
                steps_as_the_host_does(len, skip, kind);
            }
        }
    }

    #[test]
    fn large_adamw_steps_have_the_bits_of_the_host() {
        let Some(_open) = device() else { return };
        for kind in [Kind::Float, Kind::BFloat16, Kind::Half] {
            steps_as_the_host_does(100_001, 1, kind);
            steps_as_the_host_does(1 << 20, 4, kind);
        }
    }

    #[test]
    fn sums_of_squares_depend_on_the_length_alone() {
        let Some(_open) = device() else { return };
        let at = tch::Device::Cuda(0);
        for len in [0, 1, 255, 16_384, 16_385, 1_000_003] {
            let host = values(len, 5);
            let exact: f64 = host.iter().map(|x| f64::from(*x) * f64::from(*x)).sum();
            let sums = [0, 1, 2, 3].map(|skip| {
                let padded: Vec<f32> = vec![9.0; skip].into_iter().chain(host.iter().copied()).collect();
                let x = Tensor::from_slice(&padded).to_device(at).narrow(0, skip as i64, len as i64);
                sum_of_squares(&x).unwrap().double_value(&[])
            });
            assert!((sums[0] - exact).abs() <= 1e-12 * exact, "{len} elements: {} and {exact}", sums[0]);
            assert!(sums.iter().all(|sum| sum.to_bits() == sums[0].to_bits()), "{len} elements: {sums:?}");
        }
    }

    #[test]
    fn tensors_that_a_kernel_cannot_take_are_refused() {
        let Some(_open) = device() else { return };
        let make = |at| Tensor::zeros([8], (Kind::Float, at));
        let on_device = || make(tch::Device::Cuda(0));
        let hyper = AdamW { learning_rate: 1.0, betas: (0.9, 0.9), eps: 1e-8, weight_decay: 0.0 };
        let factors = Tensor::from_slice(&[1f32, 0.1, 0.1]).to_device(tch::Device::Cuda(0));
        let check = |gradient: &Tensor, words: &str| {
            let error =
                adamw_(&mut on_device(), &mut on_device(), &mut on_device(), gradient, &factors, &hyper);
            let error = error.unwrap_err().to_string();
            assert!(error.contains("`gradient`") && error.contains(words), "{error}");
        };
        check(&make(tch::Device::Cpu), "Cpu");
        check(&on_device().to_kind(Kind::Double), "Double");
        check(&on_device().narrow(0, 0, 7), "7");
        check(&Tensor::zeros([16], (Kind::Float, tch::Device::Cuda(0))).slice(0, 0, 16, 2), "contiguous");
    }
}
