// Divisions and roots for `strategy.wgsl` where a device has no fp64: as exact as the device's own.

fn divide(x: f32, y: f32) -> f32 {
  return x / y;
}

fn root(x: f32) -> f32 {
  return sqrt(x);
}
