//! Confidence intervals of means over prompts.

/// Quantile of the normal distribution for 95 %.
const Z: f64 = 1.959_963_984_540_054;

/// Number of resamples of [`bootstrap`].
const RESAMPLES: usize = 5000;

/// Method of an interval.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Method {
    /// Wilson score interval, of a share.
    Wilson,
    /// Percentiles of means over resampled prompts.
    Bootstrap,
}

/// Returns the 95 % confidence interval of the mean of `values`, one for each prompt, and its method. Values that are
/// all 0 or 1 have Wilson's interval, and others a bootstrap with the random numbers of `next`.
///
/// # Panics
///
/// Panics if there is no value.
pub fn interval(values: &[f64], next: impl FnMut() -> u64) -> ([f64; 2], Method) {
    if values.iter().all(|value| [0.0, 1.0].contains(value)) {
        return (wilson(values.iter().sum(), values.len()), Method::Wilson);
    }
    (bootstrap(values, next), Method::Bootstrap)
}

/// Returns Wilson's score interval of a share: `right` of `count` (Wilson, 1927). It is not empty for 0 and 1.
fn wilson(right: f64, count: usize) -> [f64; 2] {
    let n = count as f64;
    let share = right / n;
    let center = share + Z * Z / (2.0 * n);
    let half = Z * (share * (1.0 - share) / n + Z * Z / (4.0 * n * n)).sqrt();
    let [low, high] = [-half, half].map(|half| (center + half) / (1.0 + Z * Z / n));
    // Exactly, where rounding would leave a last bit.
    [if share == 0.0 { 0.0 } else { low }, if share == 1.0 { 1.0 } else { high }]
}

/// Returns the percentile bootstrap interval of a mean (Efron, 1979): the quantiles 2.5 % and 97.5 % of the means of
/// random draws of as many values, with replacement. `next` returns random numbers.
fn bootstrap(values: &[f64], mut next: impl FnMut() -> u64) -> [f64; 2] {
    let count = values.len();
    // The upper half of a product is uniform up to a bias of count / 2^64.
    let mut pick = || values[((u128::from(next()) * count as u128) >> 64) as usize];
    let mut means: Vec<f64> =
        (0..RESAMPLES).map(|_| (0..count).map(|_| pick()).sum::<f64>() / count as f64).collect();
    means.sort_by(f64::total_cmp);
    [0.025, 0.975].map(|quantile| means[(quantile * (RESAMPLES - 1) as f64).round() as usize])
}

#[cfg(test)]
mod tests {
    use super::*;

    /// SplitMix64.
    fn random(mut state: u64) -> impl FnMut() -> u64 {
        move || {
            state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
            let mixed = (state ^ (state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
            mixed ^ (mixed >> 31)
        }
    }

    /// The bounds are the shares at which the observed one is 1.96 standard errors away, which defines them.
    #[test]
    fn wilsons_bounds_solve_the_score_equation() {
        for (right, count) in [(8, 10), (1, 3), (113, 500), (0, 20), (20, 20)] {
            let (share, n) = (f64::from(right) / f64::from(count), f64::from(count));
            let bounds = wilson(f64::from(right), count as usize);
            assert!(bounds[0] < bounds[1], "{bounds:?}");
            for bound in bounds.into_iter().filter(|bound| *bound > 0.0 && *bound < 1.0) {
                let distance = (share - bound).abs();
                assert!(
                    (distance - Z * (bound * (1.0 - bound) / n).sqrt()).abs() < 1e-12,
                    "{right} of {count}"
                );
            }
        }
        // statsmodels 0.14: proportion_confint(8, 10, method="wilson").
        let [low, high] = wilson(8.0, 10);
        assert!((low - 0.490_162_5).abs() < 1e-6 && (high - 0.943_317_8).abs() < 1e-6, "{low} {high}");
    }

    #[test]
    fn the_bootstrap_is_as_wide_as_the_normal_interval_of_many_values() {
        let mut next = random(1);
        let values: Vec<f64> = (0..2000).map(|_| (next() % 5) as f64 / 4.0).collect();
        let mean = values.iter().sum::<f64>() / 2000.0;
        let variance = values.iter().map(|value| (value - mean).powi(2)).sum::<f64>() / 1999.0;
        let half = Z * (variance / 2000.0).sqrt();
        let ([low, high], method) = interval(&values, random(2));
        assert_eq!(method, Method::Bootstrap);
        assert!((low - (mean - half)).abs() < 0.1 * half, "{low}, not {}", mean - half);
        assert!((high - (mean + half)).abs() < 0.1 * half, "{high}, not {}", mean + half);
        assert_eq!(interval(&values, random(2)).0, [low, high]);
    }

    /// Means over 60 prompts, of which each is right in 0 to 4 of 4 samples with equal probability.
    #[test]
    fn about_19_of_20_intervals_contain_the_mean() {
        let mut next = random(3);
        let covers = |_: &usize| {
            let values: Vec<f64> = (0..60).map(|_| (next() % 5) as f64 / 4.0).collect();
            let [low, high] = interval(&values, random(next())).0;
            low <= 0.5 && 0.5 <= high
        };
        let covered = (0..300).filter(covers).count();
        assert!((270..=298).contains(&covered), "{covered} of 300");
    }

    #[test]
    fn right_and_wrong_alone_have_wilsons_interval() {
        let (bounds, method) = interval(&[0.0; 100], || unreachable!("no random numbers"));
        assert_eq!(method, Method::Wilson);
        assert!(bounds[0] == 0.0 && (0.03..0.04).contains(&bounds[1]), "{bounds:?}");
    }
}
