//! Selection of the tokens at which the policy is least certain, the "forking" tokens of Wang et al., 2025
//! (2506.01939).

/// Returns 1 for each of `own` entropies that is among the largest `share` of `all`, else 0. The bound is the
/// quantile 1 - `share` of `all`, interpolated linearly as in `torch.quantile`. Entropies equal to the bound are
/// included.
pub fn most_uncertain(share: f64, own: &[f64], all: Vec<f64>) -> Vec<f32> {
    let bound = quantile(all, 1.0 - share);
    own.iter().map(|entropy| f32::from(u8::from(*entropy >= bound))).collect()
}

/// The value below which `share` of the values are; 0 without values.
fn quantile(mut values: Vec<f64>, share: f64) -> f64 {
    values.sort_by(f64::total_cmp);
    let place = share * values.len().saturating_sub(1) as f64;
    let at = |place: f64| values.get(place as usize).copied().unwrap_or(0.0);
    let (below, above) = (at(place.floor()), at(place.ceil()));
    below + (above - below) * place.fract()
}
