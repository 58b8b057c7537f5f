// Trend of a noisy curve.

/**
 * Local linear regression over `share` of the curve. It uses points on both sides, so it does not lag like a running
 * average, and it stays between the lowest and the highest value around a point. A value that is null is a gap.
 */
function trend(values, share) {
  const count = values.length;
  const radius = Math.max(1, Math.min(200, Math.round((count * share) / 2)));
  const width = Math.min(2 * radius + 1, count);
  return values.map((value, index) => {
    if (value === null) return null;
    // At the ends the full window moves inside, since half of it would follow the noise.
    const start = Math.min(Math.max(0, index - radius), count - width);
    let [n, sx, sxx, sy, sxy, low, high] = [0, 0, 0, 0, 0, Infinity, -Infinity];
    for (let other = start; other < start + width; other += 1) {
      const y = values[other];
      if (y === null) continue;
      const x = other - index;
      n += 1;
      sx += x;
      sxx += x * x;
      sy += y;
      sxy += x * y;
      low = Math.min(low, y);
      high = Math.max(high, y);
    }
    const determinant = n * sxx - sx * sx;
    // A single point has no slope.
    const fitted = determinant > 0 ? (sy * sxx - sx * sxy) / determinant : sy / n;
    return Math.min(high, Math.max(low, fitted));
  });
}
