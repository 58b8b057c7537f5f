//! The optimizer's passes over flat fp32 buffers: AdamW, and the sum of squares behind the gradient norm.

use std::ffi::c_void;

use tch::{Kind, Tensor};

use super::{
    Error, Result,
    check::{Args, has_kernel},
};
use crate::{Device, device_kernels};

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

/// The numbers of one AdamW step that the host knows.
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
/// the gradient may be bf16.
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
    let args = Args("adamw");
    let [len] = args.dims("weights", weights)?;
    if let Some(device) = device_kernels::device_of(weights) {
        return device_adamw_(&*device, weights, exp_avg, exp_avg_sq, gradient, factors, adamw);
    }
    let widened; // exact
    let gradient = match gradient.kind() {
        Kind::BFloat16 => {
            widened = gradient.f_to_kind(Kind::Float)?;
            &widened
        }
        _ => gradient,
    };
    if !has_kernel(weights) {
        return composite_adamw_(weights, exp_avg, exp_avg_sq, gradient, factors, adamw);
    }
    let w = args.floats("weights", weights, &[len])?;
    let m = args.floats("exp_avg", exp_avg, &[len])?;
    let v = args.floats("exp_avg_sq", exp_avg_sq, &[len])?;
    let g = args.floats("gradient", gradient, &[len])?;
    let factors = args.floats("factors", factors, &[3])?;
    let (beta1, beta2) = adamw.betas;
    // SAFETY: `floats` has checked that each holds `len` dense floats in host memory (three for `factors`), and the
    // mutable borrows keep the three that are written apart from each other and from the gradient.
    unsafe {
        anyroll_adamw(
            w,
            m,
            v,
            g,
            factors,
            len,
            adamw.learning_rate as f32,
            beta1 as f32,
            beta2 as f32,
            adamw.eps as f32,
            adamw.weight_decay as f32,
        );
    }
    Ok(())
}

/// The sum of the squares of an fp32 `[N]`, as one fp64 element on the same device. Summed in fp64, in an order
/// that depends on N alone.
///
/// # Errors
/// [`super::Error::Argument`] for other shapes, or libtorch's error.
pub fn sum_of_squares(x: &Tensor) -> Result<Tensor> {
    let args = Args("sum_of_squares");
    let [len] = args.dims("x", x)?;
    if let Some(device) = device_kernels::device_of(x) {
        return device_sum_of_squares(&*device, x);
    }
    if !has_kernel(x) {
        return composite_sum_of_squares(x);
    }
    let data = args.floats("x", x, &[len])?;
    let sum = Tensor::f_zeros([], (Kind::Double, x.device()))?;
    // SAFETY: `floats` has checked `x`; `sum` is one fp64 element of our own.
    unsafe { anyroll_sum_of_squares(data, len, sum.data_ptr().cast()) };
    Ok(sum)
}

/// [`adamw_`] by the device's own kernel.
fn device_adamw_(
    device: &dyn Device,
    weights: &mut Tensor,
    exp_avg: &mut Tensor,
    exp_avg_sq: &mut Tensor,
    gradient: &Tensor,
    factors: &Tensor,
    adamw: &AdamW,
) -> Result<()> {
    const OP: &str = "adamw";
    let len = weights.numel();
    let at =
        |argument, tensor: &Tensor| on_device(OP, argument, tensor, (Kind::Float, weights.device(), len));
    let states = [at("weights", weights)?, at("exp_avg", exp_avg)?, at("exp_avg_sq", exp_avg_sq)?];
    let is_bf16 = gradient.kind() == Kind::BFloat16;
    let kind = if is_bf16 { Kind::BFloat16 } else { Kind::Float };
    let gradient = on_device(OP, "gradient", gradient, (kind, weights.device(), len))?;
    let factors = on_device(OP, "factors", factors, (Kind::Float, weights.device(), 3))?;
    let learning_rate = adamw.learning_rate as f32;
    let numbers = device_kernels::AdamW {
        learning_rate,
        beta1: adamw.betas.0 as f32,
        beta2: adamw.betas.1 as f32,
        eps: adamw.eps as f32,
        keep: 1.0 - learning_rate * adamw.weight_decay as f32,
    };
    // SAFETY: `on_device` has checked that each holds `len` dense elements of its kind (three for `factors`), and the
    // mutable borrows keep the three that are written apart from each other and from the gradient. libtorch
    // takes memory back in the order of the stream on which the kernel runs.
    let launched =
        unsafe { device_kernels::adamw(device, states, (gradient, is_bf16), factors, len, numbers) };
    launched.map_err(|error| Error::Kernel { op: OP, message: error.to_string() })
}

/// [`sum_of_squares`] by the device's own kernel.
fn device_sum_of_squares(device: &dyn Device, x: &Tensor) -> Result<Tensor> {
    const OP: &str = "sum_of_squares";
    let len = x.numel();
    let data = on_device(OP, "x", x, (Kind::Float, x.device(), len))?;
    let partial = Tensor::f_empty([device_kernels::partial_sums(len) as i64], (Kind::Double, x.device()))?;
    let total = Tensor::f_empty([], (Kind::Double, x.device()))?;
    // SAFETY: `on_device` has checked `x`; the others are ours, and as long as the kernels ask.
    let launched =
        unsafe { device_kernels::sum_of_squares(device, data, len, partial.data_ptr(), total.data_ptr()) };
    launched.map_err(|error| Error::Kernel { op: OP, message: error.to_string() })?;
    Ok(total)
}

/// The address of a dense tensor of this kind, on this device and with so many elements.
fn on_device(
    op: &'static str,
    argument: &'static str,
    tensor: &Tensor,
    expected: (Kind, tch::Device, usize),
) -> Result<*mut c_void> {
    let found = (tensor.kind(), tensor.device(), tensor.numel());
    if found != expected || !tensor.is_contiguous() {
        let problem = format!("is {found:?}, expected {expected:?}, dense");
        return Err(Args(op).refuse(argument, problem));
    }
    Ok(tensor.data_ptr())
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
    fn a_bf16_gradient_counts_as_its_values() {
        let hyper = AdamW { learning_rate: 1e-2, betas: (0.9, 0.98), eps: 1e-8, weight_decay: 0.1 };
        let factors = hyper.factors(&Tensor::from(0.5f32), &Tensor::from(1)).unwrap();
        let gradient = Tensor::randn([1000], (Kind::BFloat16, Device::Cpu));
        let step = |gradient: &Tensor| {
            let [mut w, mut m, mut v] = [1.0, 0.5, 0.25].map(|value| Tensor::full([1000], value, FLOAT));
            adamw_(&mut w, &mut m, &mut v, gradient, &factors, &hyper).unwrap();
            w
        };
        assert!(step(&gradient).equal(&step(&gradient.to_kind(Kind::Float))));
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
