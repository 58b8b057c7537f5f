// What `strategy.wgsl` has where a device computes in fp64.

// Vulkan allows errors of 2.5 units in the last place of a quotient, and more of a root. In fp64 they are far below what
// is rounded away here, so that results are those of a CPU.
fn divide(x: f32, y: f32) -> f32 {
  return f32(f64(x) / f64(y));
}

fn root(x: f32) -> f32 {
  return f32(sqrt(f64(x)));
}

// ---- sum of squares ----

// Elements of one workgroup; `kernels/strategy.rs` counts with it.
const CHUNK = 16384u;

@group(0) @binding(0) var<storage, read_write> sums_0: array<f64>;
@group(0) @binding(1) var<storage, read_write> sums_1: array<f64>;

var<workgroup> tree: array<f64, THREADS>;

// The sum over the group's threads, as a tree. Thread 0 has the result.
fn group_sum(thread: u32, sum: f64) -> f64 {
  tree[thread] = sum;
  for (var half = THREADS / 2u; half > 0u; half /= 2u) {
    workgroupBarrier();
    if (thread < half) {
      tree[thread] = tree[thread] + tree[thread + half];
    }
  }
  return tree[0];
}

// to[g] = the sum of the squares of chunk g of the second buffer, in fp64. Which thread adds what depends on n alone.
@compute @workgroup_size(THREADS)
fn sum_squares(@builtin(local_invocation_index) thread: u32, @builtin(workgroup_id) group: vec3<u32>) {
  let begin = group.x * CHUNK;
  let end = min(begin + CHUNK, a.n);
  var sum = f64(0.0);
  for (var i = begin + thread * 4u; i < end; i += THREADS * 4u) {
    for (var k = i; k < min(i + 4u, end); k++) {
      let x = f64(bitcast<f32>(buffer_1[a.at_1 + k]));
      sum = sum + x * x;
    }
  }
  sum = group_sum(thread, sum);
  if (thread == 0u) {
    sums_0[a.at_0 + group.x] = sum;
  }
}

// to[0] = the sum of n partial sums; one group.
@compute @workgroup_size(THREADS)
fn sum_partial(@builtin(local_invocation_index) thread: u32) {
  var sum = f64(0.0);
  for (var i = thread; i < a.n; i += THREADS) {
    sum = sum + sums_1[a.at_1 + i];
  }
  sum = group_sum(thread, sum);
  if (thread == 0u) {
    sums_0[a.at_0] = sum;
  }
}
