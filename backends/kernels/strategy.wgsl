// The kernels of strategy.cu for Vulkan, and those of `flat`, which has them where libtorch does not compute.
//
// Every buffer is words of 32 bits, so that no device has to have types of 8 or 16: two 16-bit floats or four bytes lie in
// one, and are widened and narrowed as integers. Vulkan lets a device round some operations as it likes; none is
// contracted into another (`vulkan/shader.rs` sees to it), so that where a device rounds to the nearest the results have
// the bits of the same formula on a CPU.

struct Arguments {
  // Elements of this dispatch.
  n: u32,
  ranks: u32,
  // Elements from one rank to the next.
  stride: u32,
  // A ReduceOp, or whether sums are added to what is there.
  op: u32,
  // What `load` reads, and what `store` writes.
  kind: u32,
  to_kind: u32,
  // The first element of each buffer.
  at_0: u32,
  at_1: u32,
  at_2: u32,
  at_3: u32,
  at_4: u32,
  learning_rate: f32,
  beta1: f32,
  beta2: f32,
  eps: f32,
  keep: f32,
}

var<immediate> a: Arguments;

@group(0) @binding(0) var<storage, read_write> buffer_0: array<u32>;
@group(0) @binding(1) var<storage, read_write> buffer_1: array<u32>;
@group(0) @binding(2) var<storage, read_write> buffer_2: array<u32>;
@group(0) @binding(3) var<storage, read_write> buffer_3: array<u32>;
@group(0) @binding(4) var<storage, read_write> buffer_4: array<u32>;

const THREADS = 256u;

// The numbers of `ReduceOp`, in its order.
const AVG = 1u;
const MIN = 2u;
const MAX = 3u;

// Element types.
const F32 = 0u;
const BF16 = 1u;
const F16 = 2u;

// ---- floats as bits ----

fn is_nan(x: f32) -> bool {
  return (bitcast<u32>(x) & 0x7fffffffu) > 0x7f800000u;
}

fn widen_f16(bits: u32) -> f32 {
  let sign = (bits & 0x8000u) << 16u;
  let exponent = (bits >> 10u) & 0x1fu;
  let fraction = bits & 0x3ffu;
  var wide = ((exponent + 112u) << 23u) | (fraction << 13u);
  if (exponent == 31u) {
    wide = 0x7f800000u | (fraction << 13u);
  }
  if (exponent == 0u) {
    wide = bitcast<u32>(f32(fraction) * 5.9604644775390625e-8);
  }
  return bitcast<f32>(sign | wide);
}

// To the nearest, ties to even; a NaN stays one.
fn narrow_bf16(x: f32) -> u32 {
  let bits = bitcast<u32>(x);
  if (is_nan(x)) {
    return 0x7fc0u;
  }
  return (bits + 0x7fffu + ((bits >> 16u) & 1u)) >> 16u;
}

fn narrow_f16(x: f32) -> u32 {
  let bits = bitcast<u32>(x);
  let sign = (bits >> 16u) & 0x8000u;
  let size = bits & 0x7fffffffu;
  if (is_nan(x)) {
    return sign | 0x7e00u;
  }
  if (size >= 0x47800000u) {
    return sign | 0x7c00u;
  }
  if (size >= 0x38800000u) {
    // The exponent's new bias, and a carry that may reach it: up to infinity.
    return sign | ((size - 0x38000000u + 0xfffu + ((size >> 13u) & 1u)) >> 13u);
  }
  if (size < 0x33000000u) {
    return sign;
  }
  // Below the least normal number: multiples of 2^-24.
  let fraction = (size & 0x7fffffu) | 0x800000u;
  let shift = 126u - (size >> 23u);
  let whole = fraction >> shift;
  let rest = fraction & ((1u << shift) - 1u);
  let half = 1u << (shift - 1u);
  return sign | (whole + select(0u, 1u, rest > half || (rest == half && (whole & 1u) == 1u)));
}

fn half_of(word: u32, index: u32) -> u32 {
  return (word >> ((index & 1u) * 16u)) & 0xffffu;
}

fn widen(bits: u32, kind: u32) -> f32 {
  if (kind == BF16) {
    return bitcast<f32>(bits << 16u);
  }
  return widen_f16(bits);
}

fn narrow(x: f32, kind: u32) -> u32 {
  if (kind == BF16) {
    return narrow_bf16(x);
  }
  return narrow_f16(x);
}

// An element of the second buffer.
fn load(index: u32) -> f32 {
  if (a.kind == F32) {
    return bitcast<f32>(buffer_1[index]);
  }
  return widen(half_of(buffer_1[index / 2u], index), a.kind);
}

// ---- reduction in rank order ----

// NaN wins in MIN and MAX, as it does in a sum.
fn combine(x: f32, y: f32) -> f32 {
  if (a.op == MIN) {
    return select(y, x, is_nan(x) || x < y);
  }
  if (a.op == MAX) {
    return select(y, x, is_nan(x) || x > y);
  }
  return x + y;
}

fn reduced(i: u32) -> f32 {
  var sum = load(a.at_1 + i);
  for (var rank = 1u; rank < a.ranks; rank++) {
    sum = combine(sum, load(a.at_1 + rank * a.stride + i));
  }
  if (a.op == AVG) {
    sum = divide(sum, f32(a.ranks));
  }
  return sum;
}

// to[i] = from[0 * stride + i] op from[1 * stride + i] op ..., from left to right in fp32, rounded once. Of one rank it is a
// cast. A thread writes a word; those of the elements that are not there are zeros.
@compute @workgroup_size(THREADS)
fn reduce_floats(@builtin(global_invocation_id) id: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>) {
  let lanes = select(2u, 1u, a.to_kind == F32);
  for (var word = id.x; word * lanes < a.n; word += groups.x * THREADS) {
    let i = word * lanes;
    if (lanes == 1u) {
      buffer_0[a.at_0 + i] = bitcast<u32>(reduced(i));
    } else {
      var packed = narrow(reduced(i), a.to_kind);
      if (i + 1u < a.n) {
        packed |= narrow(reduced(i + 1u), a.to_kind) << 16u;
      }
      buffer_0[a.at_0 / 2u + word] = packed;
    }
  }
}

// Integers as they are; sums wrap.
@compute @workgroup_size(THREADS)
fn reduce_i32(@builtin(global_invocation_id) id: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>) {
  for (var i = id.x; i < a.n; i += groups.x * THREADS) {
    var sum = bitcast<i32>(buffer_1[a.at_1 + i]);
    for (var rank = 1u; rank < a.ranks; rank++) {
      let x = bitcast<i32>(buffer_1[a.at_1 + rank * a.stride + i]);
      switch (a.op) {
        case MIN: { sum = min(sum, x); }
        case MAX: { sum = max(sum, x); }
        default: { sum = sum + x; }
      }
    }
    buffer_0[a.at_0 + i] = bitcast<u32>(sum);
  }
}

// 64 bits as their low and high words. Elements are counted in words here, but for `n`.
fn load_i64(index: u32) -> vec2<u32> {
  return vec2<u32>(buffer_1[index], buffer_1[index + 1u]);
}

fn less_i64(x: vec2<u32>, y: vec2<u32>) -> bool {
  return bitcast<i32>(x.y) < bitcast<i32>(y.y) || (x.y == y.y && x.x < y.x);
}

@compute @workgroup_size(THREADS)
fn reduce_i64(@builtin(global_invocation_id) id: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>) {
  for (var i = id.x; i < a.n; i += groups.x * THREADS) {
    var sum = load_i64(a.at_1 + 2u * i);
    for (var rank = 1u; rank < a.ranks; rank++) {
      let x = load_i64(a.at_1 + 2u * (rank * a.stride + i));
      switch (a.op) {
        case MIN: { sum = select(x, sum, less_i64(sum, x)); }
        case MAX: { sum = select(x, sum, less_i64(x, sum)); }
        default: {
          let low = sum.x + x.x;
          sum = vec2<u32>(low, sum.y + x.y + select(0u, 1u, low < x.x));
        }
      }
    }
    buffer_0[a.at_0 + 2u * i] = sum.x;
    buffer_0[a.at_0 + 2u * i + 1u] = sum.y;
  }
}

fn load_u8(index: u32) -> u32 {
  return (buffer_1[index / 4u] >> ((index & 3u) * 8u)) & 0xffu;
}

@compute @workgroup_size(THREADS)
fn reduce_u8(@builtin(global_invocation_id) id: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>) {
  for (var word = id.x; word * 4u < a.n; word += groups.x * THREADS) {
    var packed = 0u;
    for (var lane = 0u; lane < 4u && word * 4u + lane < a.n; lane++) {
      let i = word * 4u + lane;
      var sum = load_u8(a.at_1 + i);
      for (var rank = 1u; rank < a.ranks; rank++) {
        let x = load_u8(a.at_1 + rank * a.stride + i);
        switch (a.op) {
          case MIN: { sum = min(sum, x); }
          case MAX: { sum = max(sum, x); }
          default: { sum = (sum + x) & 0xffu; }
        }
      }
      packed |= sum << (lane * 8u);
    }
    buffer_0[a.at_0 / 4u + word] = packed;
  }
}

// The sum over ranks of from[rank * stride + i], from left to right in fp32, written to to[i] or added to it.
@compute @workgroup_size(THREADS)
fn sum_ranks(@builtin(global_invocation_id) id: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>) {
  for (var i = id.x; i < a.n; i += groups.x * THREADS) {
    var sum = load(a.at_1 + i);
    for (var rank = 1u; rank < a.ranks; rank++) {
      sum = sum + load(a.at_1 + rank * a.stride + i);
    }
    if (a.op != 0u) {
      sum = bitcast<f32>(buffer_0[a.at_0 + i]) + sum;
    }
    buffer_0[a.at_0 + i] = bitcast<u32>(sum);
  }
}

// ---- AdamW ----

// Weights, both moments and factors are fp32; the gradient, which is the second buffer, is of `kind`. It is multiplied by
// factors[0]; where that is not finite nothing is written. The other two factors correct the moments' bias.
@compute @workgroup_size(THREADS)
fn adamw(@builtin(global_invocation_id) id: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>) {
  if ((buffer_4[a.at_4] & 0x7f800000u) == 0x7f800000u) {
    return;
  }
  let scale = bitcast<f32>(buffer_4[a.at_4]);
  let bias1 = bitcast<f32>(buffer_4[a.at_4 + 1u]);
  let bias2_root = bitcast<f32>(buffer_4[a.at_4 + 2u]);
  for (var i = id.x; i < a.n; i += groups.x * THREADS) {
    let gradient = load(a.at_1 + i) * scale;
    let m = a.beta1 * bitcast<f32>(buffer_2[a.at_2 + i]) + (1.0 - a.beta1) * gradient;
    let v = a.beta2 * bitcast<f32>(buffer_3[a.at_3 + i]) + (1.0 - a.beta2) * gradient * gradient;
    let w = bitcast<f32>(buffer_0[a.at_0 + i]);
    let step = divide(divide(a.learning_rate, bias1) * m, divide(root(v), bias2_root) + a.eps);
    buffer_2[a.at_2 + i] = bitcast<u32>(m);
    buffer_3[a.at_3 + i] = bitcast<u32>(v);
    buffer_0[a.at_0 + i] = bitcast<u32>(a.keep * w - step);
  }
}

// ---- numbers ----

// x[i] = x[i] * keep.
@compute @workgroup_size(THREADS)
fn scale(@builtin(global_invocation_id) id: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>) {
  for (var i = id.x; i < a.n; i += groups.x * THREADS) {
    buffer_0[a.at_0 + i] = bitcast<u32>(bitcast<f32>(buffer_0[a.at_0 + i]) * a.keep);
  }
}

// x[i] = keep.
@compute @workgroup_size(THREADS)
fn fill(@builtin(global_invocation_id) id: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>) {
  for (var i = id.x; i < a.n; i += groups.x * THREADS) {
    buffer_0[a.at_0 + i] = bitcast<u32>(a.keep);
  }
}
