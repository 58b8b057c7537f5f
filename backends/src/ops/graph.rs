//! Functions that libtorch's autograd differentiates by a backward of their own.

use std::{
    error::Error as _,
    ffi::{c_char, c_int, c_void},
    panic::{AssertUnwindSafe, catch_unwind},
    slice,
};

use tch::Tensor;

use super::{Error, Result};
use crate::ffi;

type Backward = extern "C" fn(
    context: *mut c_void,
    grads: *const *mut c_void,
    wanted: *const bool,
    results: *mut *mut c_void,
    message: *mut c_char,
    capacity: usize,
) -> c_int;

unsafe extern "C" {
    // shim/graph.cpp
    fn anyroll_is_recorded(inputs: *const *mut c_void, count: c_int) -> c_int;
    // 0, or -1 with the reason in anyroll_last_error
    fn anyroll_record(
        inputs: *const *mut c_void,
        input_count: c_int,
        outputs: *const *mut c_void,
        output_count: c_int,
        context: *mut c_void,
        backward: Backward,
        release: extern "C" fn(context: *mut c_void),
    ) -> c_int;
}

/// Arguments of a backward.
#[derive(Debug)]
pub struct Asked {
    /// The gradient of each output, in its shape, with strides of libtorch's choice; `None` where it is zero.
    pub grads: Vec<Option<Tensor>>,
    /// True for each input whose gradient is needed.
    pub wanted: Vec<bool>,
}

/// A backward, which returns the gradient of each input: `None` for one without influence, and ignored if it is not needed. It
/// runs at most once, on a thread of libtorch's choice.
type Run = Box<dyn FnOnce(Asked) -> Result<Vec<Option<Tensor>>> + Send>;

struct Context {
    outputs: usize,
    inputs: usize,
    run: Run,
}

/// Adds a node to autograd's graph that makes `outputs` a function of `inputs`, with gradients by `backward`. The outputs were
/// computed without a graph. If no input requires a gradient, this does nothing and drops `backward`.
///
/// `backward` may keep an output's [`Tensor::detach`], but no output itself: they would keep each other alive. No one may write
/// to a kept tensor in between; libtorch would detect that for its own functions. Outputs are no views, except detached ones.
/// Gradients have no graph of their own.
///
/// # Errors
/// libtorch's. Errors of `backward` are errors of the differentiation.
pub fn differentiable(
    inputs: &[&Tensor],
    outputs: &[&Tensor],
    backward: impl FnOnce(Asked) -> Result<Vec<Option<Tensor>>> + Send + 'static,
) -> Result<()> {
    let pointers = |tensors: &[&Tensor]| tensors.iter().map(|tensor| ffi::tensor_ptr(tensor)).collect();
    let (from, to): (Vec<*mut c_void>, Vec<*mut c_void>) = (pointers(inputs), pointers(outputs));
    // SAFETY: live tensors.
    if unsafe { anyroll_is_recorded(from.as_ptr(), from.len() as c_int) } == 0 {
        return Ok(());
    }
    let context = Context { outputs: to.len(), inputs: from.len(), run: Box::new(backward) };
    let context = Box::into_raw(Box::new(context)).cast();
    // SAFETY: live tensors; the shim gives the context to one of the two functions, once.
    let code = unsafe {
        anyroll_record(
            from.as_ptr(),
            from.len() as c_int,
            to.as_ptr(),
            to.len() as c_int,
            context,
            run,
            release,
        )
    };
    if code == 0 { Ok(()) } else { Err(Error::Kernel { op: "differentiable", message: ffi::last_error() }) }
}

extern "C" fn release(context: *mut c_void) {
    // SAFETY: `differentiable` made it, and the shim gives it away once.
    drop(unsafe { Box::from_raw(context.cast::<Context>()) });
}

extern "C" fn run(
    context: *mut c_void,
    grads: *const *mut c_void,
    wanted: *const bool,
    results: *mut *mut c_void,
    message: *mut c_char,
    capacity: usize,
) -> c_int {
    // SAFETY: as in `release`.
    let Context { outputs, inputs, run } = *unsafe { Box::from_raw(context.cast::<Context>()) };
    // SAFETY: as many tensors or nulls as there are outputs, which are cloned, and as many flags and places as inputs.
    let (asked, results) = unsafe {
        let grads = slice::from_raw_parts(grads, outputs).iter();
        let grads =
            grads.map(|grad| (!grad.is_null()).then(|| Tensor::clone_from_ptr(grad.cast()))).collect();
        let wanted = slice::from_raw_parts(wanted, inputs).to_vec();
        (Asked { grads, wanted }, slice::from_raw_parts_mut(results, inputs))
    };
    let run =
        || run(asked).inspect(|found| assert_eq!(found.len(), inputs, "there is a gradient for each input"));
    let problem = match catch_unwind(AssertUnwindSafe(run)) {
        Ok(Ok(found)) => {
            for (result, gradient) in results.iter_mut().zip(found) {
                // The shim owns the tensor behind the pointer.
                *result = gradient.map_or(std::ptr::null_mut(), ffi::into_tensor_ptr);
            }
            return 0;
        }
        Ok(Err(error)) => with_sources(&error),
        Err(_) => "the backward of a function panicked".to_owned(),
    };
    let room = (0..capacity).rev().find(|&end| problem.is_char_boundary(end)).unwrap_or(0);
    let bytes = &problem.as_bytes()[..room];
    // SAFETY: there is room for so many bytes, and the one behind them is 0.
    unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), message.cast(), bytes.len()) };
    -1
}

/// An error and what caused it.
fn with_sources(error: &Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        text += &format!(": {error}");
        cause = error.source();
    }
    text
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use tch::{Device, Kind};

    use super::super::tests::before_autograd;
    use super::*;

    fn leaf(values: &[f64]) -> Tensor {
        before_autograd();
        Tensor::from_slice(values).set_requires_grad(true)
    }

    /// `x y`, and `x + y`, without a graph of libtorch's.
    fn product_and_sum(x: &Tensor, y: &Tensor, kept: &Arc<()>) -> [Tensor; 2] {
        let [from_x, from_y] = [x.detach(), y.detach()];
        let (product, sum) = (&from_x * &from_y, &from_x + &from_y);
        let kept = Arc::clone(kept);
        differentiable(&[x, y], &[&product, &sum], move |Asked { grads, wanted }| {
            let _kept = kept;
            let [of_product, of_sum] = &grads[..] else { panic!("two outputs") };
            let gradient = |other: &Tensor| {
                let of_product = of_product.as_ref().map(|grad| grad * other);
                let all = [of_product, of_sum.as_ref().map(Tensor::shallow_clone)];
                all.into_iter().flatten().reduce(|a, b| a + b).expect("one counts")
            };
            Ok(vec![wanted[0].then(|| gradient(&from_y)), wanted[1].then(|| gradient(&from_x))])
        })
        .unwrap();
        [product, sum]
    }

    #[test]
    fn gradients_are_those_of_the_backward_and_what_it_keeps_is_let_go() {
        let kept = Arc::new(());
        let (x, y) = (leaf(&[2.0, 3.0]), leaf(&[5.0, 7.0]));
        {
            let [product, sum] = product_and_sum(&(&x * 2.0), &y, &kept);
            assert!(product.requires_grad() && sum.requires_grad());
            let loss = (product * 10.0).sum(Kind::Double);
            let found = Tensor::run_backward(&[loss], &[&x, &y], false, false);
            // sum(10 (2 x) y): the other output does not count.
            assert_eq!(found[0], Tensor::from_slice(&[100.0, 140.0]));
            assert_eq!(found[1], Tensor::from_slice(&[40.0, 60.0]));
            assert_eq!(Arc::strong_count(&kept), 1);

            let constant = Tensor::from_slice(&[1.0, 1.0]);
            let [_, sum] = product_and_sum(&x, &constant, &kept);
            let found = Tensor::run_backward(&[sum.sum(Kind::Double)], &[&x], false, false);
            assert_eq!(found[0], constant);
            let _never_differentiated = product_and_sum(&x, &y, &kept);
            assert_eq!(Arc::strong_count(&kept), 2);
        }
        assert_eq!(Arc::strong_count(&kept), 1);
    }

    #[test]
    fn without_a_gradient_to_find_nothing_is_kept() {
        let kept = Arc::new(());
        let x = Tensor::ones([2], (Kind::Double, Device::Cpu));
        let [product, _] = product_and_sum(&x, &x, &kept);
        assert!(!product.requires_grad());
        let x = leaf(&[1.0, 2.0]);
        let [product, _] = tch::no_grad(|| product_and_sum(&x, &x, &kept));
        assert!(!product.requires_grad());
        assert_eq!(Arc::strong_count(&kept), 1);
    }

    #[test]
    fn failures_of_a_backward_are_errors_of_the_differentiation() {
        let check = |says: &str, backward: fn(Asked) -> Result<Vec<Option<Tensor>>>| {
            let x = leaf(&[1.0]);
            let y = x.detach() * 2.0;
            differentiable(&[&x], &[&y], backward).unwrap();
            let error = Tensor::f_run_backward(&[y.sum(Kind::Double)], &[&x], false, false).unwrap_err();
            assert!(error.to_string().contains(says), "{error}");
        };
        check("ran away", |_| Err(Error::Kernel { op: "test", message: "ran away".to_owned() }));
        check("panicked", |_| panic!("as this test wants"));
        check("what libtorch says", |_| Err(tch::TchError::Torch("what libtorch says".to_owned()).into()));
        let x = leaf(&[3.0]);
        let y = x.detach() * 2.0;
        differentiable(&[&x], &[&y], |_| unreachable!("it is not asked for")).unwrap();
        let error = Tensor::f_run_backward(&[y.sum(Kind::Double)], &[&x], true, true).unwrap_err();
        assert!(error.to_string().contains("no graph of their own"), "{error}");
    }
}
