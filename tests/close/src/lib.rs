//! Differences of tensors, for the tests of all crates.

#![forbid(unsafe_code)]

use tch::{Kind, Tensor};

/// Panics unless the tensors are equal up to `tolerance`, relative to the largest value of `expected` if that is above 1.
#[track_caller]
pub fn assert_close(what: &str, found: &Tensor, expected: &Tensor, tolerance: f64) {
    assert_eq!(found.size(), expected.size(), "{what}");
    if expected.numel() == 0 {
        return;
    }
    let scale = expected.to_kind(Kind::Double).abs().max().double_value(&[]).max(1.0);
    let error = largest_difference(found, expected) / scale;
    assert!(error <= tolerance, "{what} differs by {error:e}"); // false for NaN
}

/// Returns the largest difference between elements of two tensors of one shape, in fp64; NaN if one is.
#[track_caller]
pub fn largest_difference(found: &Tensor, expected: &Tensor) -> f64 {
    assert_eq!(found.size(), expected.size());
    (found.to_kind(Kind::Double) - expected.to_kind(Kind::Double)).abs().max().double_value(&[])
}

#[cfg(test)]
mod tests {
    use tch::Tensor;

    use super::{assert_close, largest_difference};

    fn is_close(found: &[f64], expected: &[f64]) -> bool {
        let (found, expected) = (Tensor::from_slice(found), Tensor::from_slice(expected));
        std::panic::catch_unwind(|| assert_close("tensors", &found, &expected, 0.01)).is_ok()
    }

    #[test]
    fn the_largest_difference_counts() {
        let difference =
            largest_difference(&Tensor::from_slice(&[1.0, -2.0]), &Tensor::from_slice(&[1.5, 2.0]));
        assert_eq!(difference, 4.0);
        assert!(is_close(&[0.0, 1.0], &[0.009, 1.0]));
        assert!(!is_close(&[0.0, 1.0], &[0.011, 1.0]));
    }

    #[test]
    fn large_values_may_differ_by_more() {
        assert!(is_close(&[0.0, 10.0], &[0.09, 10.0]));
        assert!(!is_close(&[0.0, 10.0], &[0.11, 10.0]));
    }

    #[test]
    fn nan_and_other_shapes_are_not_close() {
        for (found, expected) in [
            (&[f64::NAN][..], &[1.0][..]),
            (&[1.0], &[f64::NAN]),
            (&[1.0], &[1.0, 1.0]),
            (&[f64::INFINITY], &[1.0]),
        ] {
            assert!(!is_close(found, expected), "{found:?} {expected:?}");
        }
        assert!(is_close(&[], &[]));
    }
}
