// Attention of 16-bit floats on a device, by the kernels of its libtorch. Sequences are packed: q is [Q, H, D], k and v
// are [N, K, D], and a query's log-sum-exp lies at [Q, H]. The last keys of a sequence are its queries'.
#include <ATen/Context.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/_flash_attention_backward.h>
#include <ATen/ops/_flash_attention_forward.h>
#include <ATen/ops/_scaled_dot_product_cudnn_attention.h>
#include <ATen/ops/_scaled_dot_product_cudnn_attention_backward.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <optional>
#include <tuple>

#include "shim.h"

using at::Tensor;

static const Tensor& tensor_of(void* pointer) { return *static_cast<const Tensor*>(pointer); }

// FlashAttention-2 takes the order of its sums from libtorch's global flag, and from nowhere else.
class DeterministicScope {
 public:
  explicit DeterministicScope(bool wanted)
      : context(at::globalContext()),
        before(context.deterministicAlgorithms()),
        warned(context.deterministicAlgorithmsWarnOnly()),
        filled(context.deterministicFillUninitializedMemory()) {
    context.setDeterministicFillUninitializedMemory(false);
    context.setDeterministicAlgorithms(wanted, false);
  }
  ~DeterministicScope() {
    context.setDeterministicAlgorithms(before, warned);
    context.setDeterministicFillUninitializedMemory(filled);
  }
  DeterministicScope(const DeterministicScope&) = delete;
  DeterministicScope& operator=(const DeterministicScope&) = delete;

 private:
  at::Context& context;
  const bool before, warned, filled;
};

// [N, heads, D] as [B, heads, len, D], without a copy.
static Tensor by_sequence(const Tensor& packed, int64_t len) { return packed.unflatten(0, {-1, len}).transpose(1, 2); }
// And back, dense.
static Tensor packed(const Tensor& sequences) { return sequences.transpose(1, 2).flatten(0, 1).contiguous(); }

// Whether sequences of this length, 0 if there is none for all, are for cuDNN: AMD's libtorch has none.
static bool is_planned(int64_t planned_len) { return planned_len > 0 && at::Context::hasCuDNN(); }

// One token would be taken for a step of generation, whose log-sum-exps lie in another order.
static int64_t bound(int64_t most) { return std::max<int64_t>(2, most); }

// How many keys before and behind its own a query sees, of `window` tokens in all; 0 leaves it at causal.
struct Window {
  explicit Window(int64_t window) {
    if (window > 0) before = window - 1, behind = 0;
  }
  std::optional<int64_t> before, behind;
};

extern "C" {

// The output [Q, H D] and the log-sum-exps. `offsets` are the first queries and the first keys of all sequences, `most` how
// many one has at most. `planned_len` is the length that all sequences have if cuDNN is to run, or 0; `window` how many
// tokens a query sees, or 0 for all.
int anyroll_flash_attention(void* const* qkv, void* const* offsets, const int64_t* most, int64_t planned_len, double scale,
                            int64_t window, void** results) {
  return guarded(-1, [&] {
    const Tensor &q = tensor_of(qkv[0]), &k = tensor_of(qkv[1]), &v = tensor_of(qkv[2]);
    Tensor out, lse;
    if (is_planned(planned_len)) {
      const auto forward = at::_scaled_dot_product_cudnn_attention(
          by_sequence(q, planned_len), by_sequence(k, planned_len), by_sequence(v, planned_len), std::nullopt, true, 0.0,
          true, false, scale);
      out = packed(std::get<0>(forward));
      lse = packed(std::get<1>(forward).reshape({-1, q.size(1), planned_len, 1})).flatten(1);
    } else {
      const Window seen(window);
      const auto forward =
          at::_flash_attention_forward(q, k, v, tensor_of(offsets[0]), tensor_of(offsets[1]), bound(most[0]),
                                       bound(most[1]), 0.0, true, false, scale, seen.before, seen.behind);
      out = std::get<0>(forward);
      lse = std::get<1>(forward).t();
    }
    results[0] = new Tensor(out.flatten(1));
    results[1] = new Tensor(lse);
    return 0;
  });
}

// Writes the gradients of q, k and v, from that of the output and from what the forward returned. FlashAttention-2 runs
// for `kv_heads_at_once` key heads and their queries at a time, with so many empty sequences behind the others.
int anyroll_flash_attention_backward(void* dout, void* const* qkv, void* const* forward, void* const* offsets,
                                     const int64_t* most, int64_t planned_len, double scale, int64_t window,
                                     bool deterministic, int64_t kv_heads_at_once, int64_t empty_sequences,
                                     void* const* gradients) {
  return guarded(-1, [&] {
    const Tensor &q = tensor_of(qkv[0]), &k = tensor_of(qkv[1]), &v = tensor_of(qkv[2]);
    const Tensor &dq = tensor_of(gradients[0]), &dk = tensor_of(gradients[1]), &dv = tensor_of(gradients[2]);
    const Tensor of_out = tensor_of(dout).view(q.sizes()), out = tensor_of(forward[0]).view(q.sizes());
    const Tensor& lse = tensor_of(forward[1]);
    if (is_planned(planned_len) && !deterministic) {
      const auto sequences = [&](const Tensor& x) { return by_sequence(x, planned_len); };
      const Tensor no_random_state = at::empty({}, q.options().dtype(at::kLong));  // there is no dropout
      const auto found = at::_scaled_dot_product_cudnn_attention_backward(
          sequences(of_out), sequences(q), sequences(k), sequences(v), sequences(out),
          sequences(lse.unsqueeze(-1)).contiguous(), no_random_state, no_random_state, Tensor(), Tensor(), Tensor(),
          planned_len, planned_len, 0.0, true, scale);
      dq.copy_(packed(std::get<0>(found)));
      dk.copy_(packed(std::get<1>(found)));
      dv.copy_(packed(std::get<2>(found)));
      return 0;
    }
    const DeterministicScope scope(deterministic);
    const Window seen(window);
    const Tensor no_random_state = at::empty({2}, q.options().dtype(at::kUInt64));
    const Tensor by_head = lse.t().contiguous();
    const auto extended = [&](const Tensor& ends) {
      return empty_sequences > 0 ? at::cat({ends, ends.slice(0, -1).expand({empty_sequences})}) : ends;
    };
    const Tensor query_ends = extended(tensor_of(offsets[0])), key_ends = extended(tensor_of(offsets[1]));
    const int64_t group = q.size(1) / k.size(1), count = kv_heads_at_once;
    for (int64_t head = 0; head < k.size(1); head += count) {
      const auto of_queries = [&](const Tensor& x) { return x.narrow(1, head * group, count * group); };
      const auto of_keys = [&](const Tensor& x) { return x.narrow(1, head, count); };
      const auto found = at::_flash_attention_backward(
          of_queries(of_out), of_queries(q), of_keys(k), of_keys(v), of_queries(out),
          by_head.narrow(0, head * group, count * group), query_ends, key_ends, bound(most[0]), bound(most[1]), 0.0,
          true, no_random_state, no_random_state, scale, seen.before, seen.behind);
      of_queries(dq).copy_(std::get<0>(found));
      of_keys(dk).copy_(std::get<1>(found));
      of_keys(dv).copy_(std::get<2>(found));
    }
    return 0;
  });
}
}
