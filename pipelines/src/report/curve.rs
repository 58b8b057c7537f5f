//! Smoothing and thinning of curves.

/// A step and a value. A value that is not finite is a gap.
pub(super) type Point = (f64, f64);

/// Trend of a noisy curve, at [`thinned`] points: local linear regression over about a twelfth of the curve.
///
/// It uses points on both sides, so it does not lag like a running average, and follows the slope at the
/// ends. It is linear in the values: trends of parts add up to the trend of their sum.
pub(super) fn trend(points: &[Point], count: usize) -> Vec<Point> {
    let radius = (points.len() / 25).clamp(3, 200);
    let width = (2 * radius + 1).min(points.len());
    let fit = |index: usize| {
        let (step, value) = points[index];
        // At the ends the full window moves inside, since half of it would follow the noise.
        let start = index.saturating_sub(radius).min(points.len() - width);
        let window = start..start + width;
        // Relative to the point itself, so that its value on the line is the intercept.
        let neighbours = window.map(|other| (other as f64 - index as f64, points[other].1));
        (step, if value.is_finite() { intercept(neighbours) } else { value })
    };
    spread(points.len(), count).map(fit).collect()
}

/// At most `count` of the points, evenly spread, with the first and the last.
pub(super) fn thinned(points: &[Point], count: usize) -> Vec<Point> {
    spread(points.len(), count).map(|index| points[index]).collect()
}

/// At most `count` of `len` indices, evenly spread, with the first and the last.
fn spread(len: usize, count: usize) -> impl Iterator<Item = usize> {
    let kept = len.min(count);
    (0..kept).map(move |position| if kept < 2 { 0 } else { position * (len - 1) / (kept - 1) })
}

/// Intercept of the least squares line through `points`, of which at least one is finite.
fn intercept(points: impl Iterator<Item = Point>) -> f64 {
    let mut sums = [0.0; 5];
    for (x, y) in points.filter(|point| point.1.is_finite()) {
        for (sum, term) in sums.iter_mut().zip([1.0, x, x * x, y, x * y]) {
            *sum += term;
        }
    }
    let [count, x, xx, y, xy] = sums;
    let determinant = count * xx - x * x;
    // A single point has no slope.
    if determinant > 0.0 { (y * xx - x * xy) / determinant } else { y / count }
}

/// At most `2 * count` points that look like all of them when drawn: the lowest and the highest of each of
/// `count` intervals, so that no spike is lost.
pub(super) fn envelope(points: &[Point], count: usize) -> Vec<Point> {
    if points.len() <= 2 * count {
        return points.to_vec();
    }
    let mut kept = Vec::with_capacity(2 * count);
    for stretch in points.chunks(points.len().div_ceil(count)) {
        let finite = || stretch.iter().filter(|point| point.1.is_finite());
        let by_value = |a: &&Point, b: &&Point| a.1.total_cmp(&b.1);
        match finite().min_by(by_value).zip(finite().max_by(by_value)) {
            Some((low, high)) if low.0 <= high.0 => kept.extend([low, high]),
            Some((low, high)) => kept.extend([high, low]),
            None => kept.push(stretch[0]),
        }
    }
    kept
}

#[cfg(test)]
mod tests {
    use super::*;

    fn curve(count: usize, value: impl Fn(usize) -> f64) -> Vec<Point> {
        (0..count).map(|step| (step as f64, value(step))).collect()
    }

    #[test]
    fn the_trend_of_a_line_is_the_line_and_noise_shrinks() {
        for count in [1, 2, 3, 50, 20_000] {
            let line = curve(count, |step| 0.3 + 0.01 * step as f64);
            let distance = |(a, b): (&Point, &Point)| (a.1 - b.1).abs();
            let worst = trend(&line, count).iter().zip(&line).map(distance).fold(0.0, f64::max);
            assert!(worst < 1e-10, "{count}: {worst}");
        }
        let noise = trend(&curve(500, |step| if step % 2 == 0 { 1.0 } else { -1.0 }), 500);
        assert!(noise.iter().all(|point| point.1.abs() < 0.2));
    }

    #[test]
    fn a_gap_stays_a_gap_and_spoils_nothing() {
        let gap = trend(&curve(50, |step| if step == 20 { f64::NAN } else { 1.0 }), 50);
        assert!(gap[20].1.is_nan() && (gap[21].1 - 1.0).abs() < 1e-9);
    }

    #[test]
    fn thinning_keeps_both_ends() {
        let thin = thinned(&curve(1_000, |step| step as f64), 7);
        assert_eq!((thin.len(), thin[0].0, thin[6].0), (7, 0.0, 999.0));
        assert_eq!(thinned(&curve(7, |_| 0.0), 7).len(), 7);
    }

    #[test]
    fn an_envelope_keeps_every_spike_in_order() {
        let spikes =
            envelope(&curve(10_000, |step| if step == 4_321 { 9.0 } else { (step % 3) as f64 }), 100);
        assert!(spikes.len() <= 200 && spikes.is_sorted_by_key(|point| point.0));
        assert!(spikes.contains(&(4_321.0, 9.0)));
        let gaps = envelope(&curve(1_000, |step| if step < 500 { f64::NAN } else { 1.0 }), 10);
        assert!(gaps[0].1.is_nan() && gaps.last().unwrap().1 == 1.0);
    }
}
