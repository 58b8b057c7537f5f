// Memory of functions without the memory: libtorch runs them on its meta tensors, which have no values, and an allocator
// counts what each tensor would take and for how long. Gradients and saved tensors live as long as in a real run, since
// libtorch's own autograd makes and drops them.
//
// libtorch lacks meta versions of a few operations. They are here, with the memory of its kernels for GPUs
// (`aten/src/ATen/native`).
#include <ATen/ATen.h>
#include <c10/core/Allocator.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <memory>
#include <tuple>
#include <vector>

#include "shim.h"

namespace {

// Bytes of the tensors of one measurement.
struct Count {
  std::shared_ptr<Count> outer;
  int64_t live = 0;
  int64_t peak = 0;
};

// The measurement of this thread.
thread_local std::shared_ptr<Count> measured;

struct Claim {
  std::shared_ptr<Count> count;
  int64_t bytes;

  static void release(void* claim) {
    const std::unique_ptr<Claim> own(static_cast<Claim*>(claim));
    own->count->live -= own->bytes;
  }
};

struct Counter final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    const c10::Device meta(c10::kMeta);
    if (!measured) return {nullptr, meta};
    const auto size = static_cast<int64_t>(bytes);
    measured->live += size;
    measured->peak = std::max(measured->peak, measured->live);
    return {nullptr, new Claim{measured, size}, &Claim::release, meta};
  }
  void copy_data(void*, const void*, size_t) const override {}
};

using at::IntArrayRef;
using at::Tensor;
using MaybeTensor = std::optional<Tensor>;
using Two = std::tuple<Tensor, Tensor>;
using Three = std::tuple<Tensor, Tensor, Tensor>;

Tensor like(const Tensor& x) { return at::empty(x.sizes(), x.options()); }
Tensor like_if(bool wanted, const MaybeTensor& x) { return wanted && x && x->defined() ? like(*x) : Tensor(); }
Tensor floats(IntArrayRef size, const Tensor& on) { return at::empty(size, on.options().dtype(at::kFloat)); }

// A number for each group of values that a norm is over.
Tensor statistic(const Tensor& x, IntArrayRef normed) {
  std::vector<int64_t> size(x.sizes().begin(), x.sizes().end());
  std::fill(size.end() - normed.size(), size.end(), 1);
  return floats(size, x);
}

Three layer_norm(const Tensor& x, IntArrayRef shape, const MaybeTensor&, const MaybeTensor&, double) {
  const Tensor dense = x.contiguous();
  return {like(x), statistic(x, shape), statistic(x, shape)};
}
Three layer_norm_backward(const Tensor& grad, const Tensor& x, IntArrayRef, const Tensor&, const Tensor&,
                          const MaybeTensor& weight, const MaybeTensor& bias, std::array<bool, 3> wanted) {
  const std::array dense{grad.contiguous(), x.contiguous()};
  return {like_if(wanted[0], x), like_if(wanted[1], weight), like_if(wanted[2], bias)};
}

Two rms_norm(const Tensor& x, IntArrayRef shape, const MaybeTensor&, std::optional<double>) {
  const Tensor dense = x.contiguous();
  return {like(x), statistic(x, shape)};
}
Two rms_norm_backward(const Tensor& grad, const Tensor& x, IntArrayRef, const Tensor&, const MaybeTensor& weight,
                      std::array<bool, 2> wanted) {
  const std::array dense{grad.contiguous(), x.contiguous()};
  return {like_if(wanted[0], x), like_if(wanted[1], weight)};
}

Three group_norm(const Tensor& x, const MaybeTensor&, const MaybeTensor&, int64_t images, int64_t, int64_t,
                 int64_t groups, double) {
  const Tensor dense = x.contiguous();
  return {like(x), floats({images, groups}, x), floats({images, groups}, x)};
}
Three group_norm_backward(const Tensor& grad, const Tensor& x, const Tensor&, const Tensor&, const MaybeTensor& weight,
                          int64_t, int64_t, int64_t, int64_t, std::array<bool, 3> wanted) {
  const std::array dense{grad.contiguous(), x.contiguous()};
  return {like_if(wanted[0], x), like_if(wanted[1], weight), like_if(wanted[2], weight)};
}

// Libraries copy what a convolution reads into their own layout.
Tensor convolution(const Tensor& x, const Tensor& weight, const MaybeTensor&, IntArrayRef stride, IntArrayRef padding,
                   IntArrayRef dilation, bool, IntArrayRef, int64_t) {
  const std::array copies{like(x), like(weight)};
  std::vector<int64_t> size{x.size(0), weight.size(0)};
  for (size_t axis = 0; axis < stride.size(); axis++) {
    const int64_t kernel = dilation[axis] * (weight.size(axis + 2) - 1) + 1;
    size.push_back((x.size(axis + 2) + 2 * padding[axis] - kernel) / stride[axis] + 1);
  }
  return at::empty(size, x.options());
}
Three convolution_backward(const Tensor& grad, const Tensor& x, const Tensor& weight, IntArrayRef, IntArrayRef,
                           IntArrayRef, bool, IntArrayRef, int64_t, std::array<bool, 3> wanted) {
  const std::array copies{like(grad), like(weight)};
  Tensor of_bias = wanted[2] ? at::empty({weight.size(0)}, weight.options()) : Tensor();
  return {like_if(wanted[0], x), like_if(wanted[1], weight), of_bias};
}

// Attention of `[B, H, N, D]` that stores no scores. Results lie token by token.
Tensor by_token(const Tensor& x, int64_t width) {
  return at::empty({x.size(0), x.size(2), x.size(1), width}, x.options()).transpose(1, 2);
}
Tensor of_queries(const Tensor& q) { return floats({q.size(0), q.size(1), q.size(2)}, q); }
Three gradients(const Tensor& q, const Tensor& k, const Tensor& v) {
  return {by_token(q, q.size(3)), by_token(k, k.size(3)), by_token(v, v.size(3))};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, c10::SymInt, c10::SymInt, Tensor, Tensor, Tensor> attention(
    const Tensor& q, const Tensor& k, const Tensor& v, double, bool, bool, std::optional<double>) {
  const auto nothing = [&] { return at::empty({0}, q.options()); };
  return {by_token(q, v.size(3)), of_queries(q), Tensor(), Tensor(), q.size(2), k.size(2), nothing(), nothing(),
          nothing()};
}
// The gradient of the queries is summed in fp32.
Three attention_backward(const Tensor&, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor&, const Tensor&,
                         const Tensor&, const Tensor&, c10::SymInt, c10::SymInt, double, bool, const Tensor&,
                         const Tensor&, std::optional<double>) {
  const std::array sums{floats(q.sizes(), q), of_queries(q)};
  return gradients(q, k, v);
}
Two attention_on_host(const Tensor& q, const Tensor&, const Tensor& v, double, bool, const MaybeTensor&,
                      std::optional<double>) {
  return {by_token(q, v.size(3)), of_queries(q)};
}
Three attention_on_host_backward(const Tensor&, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor&,
                                 const Tensor&, double, bool, const MaybeTensor&, std::optional<double>) {
  return gradients(q, k, v);
}

Tensor index_select(const Tensor& x, int64_t dim, const Tensor& index) {
  std::vector<int64_t> size(x.sizes().begin(), x.sizes().end());
  size[dim < 0 ? dim + x.dim() : dim] = index.numel();
  return at::empty(size, x.options());
}
Tensor where(const Tensor& condition, const Tensor& x, const Tensor& other) {
  return at::empty(at::infer_size(condition.sizes(), at::infer_size(x.sizes(), other.sizes())),
                   x.dim() > 0 ? x.options() : other.options());
}

Tensor searchsorted(const Tensor&, const Tensor& values, bool is_narrow, bool, std::optional<c10::string_view>,
                    const MaybeTensor&) {
  return at::empty(values.sizes(), values.options().dtype(is_narrow ? at::kInt : at::kLong));
}

void prepare_measuring() {
  static Counter counter;
  static const auto library = [] {
    c10::SetAllocator(c10::kMeta, &counter, 1);
    torch::Library library(torch::Library::IMPL, "aten", c10::DispatchKey::Meta, __FILE__, __LINE__);
    library.impl("native_layer_norm", TORCH_FN(layer_norm));
    library.impl("native_layer_norm_backward", TORCH_FN(layer_norm_backward));
    library.impl("_fused_rms_norm", TORCH_FN(rms_norm));
    library.impl("_fused_rms_norm_backward", TORCH_FN(rms_norm_backward));
    library.impl("native_group_norm", TORCH_FN(group_norm));
    library.impl("native_group_norm_backward", TORCH_FN(group_norm_backward));
    library.impl("convolution_overrideable", TORCH_FN(convolution));
    library.impl("convolution_backward_overrideable", TORCH_FN(convolution_backward));
    library.impl("_scaled_dot_product_flash_attention", TORCH_FN(attention));
    library.impl("_scaled_dot_product_flash_attention_backward", TORCH_FN(attention_backward));
    library.impl("_scaled_dot_product_flash_attention_for_cpu", TORCH_FN(attention_on_host));
    library.impl("_scaled_dot_product_flash_attention_for_cpu_backward", TORCH_FN(attention_on_host_backward));
    library.impl("index_select", TORCH_FN(index_select));
    library.impl("where.self", TORCH_FN(where));
    library.impl("searchsorted.Tensor", TORCH_FN(searchsorted));
    return library;
  }();
}

}  // namespace

static bool is_measuring() { return measured != nullptr; }
static void take_name();

extern "C" {

// Begins to count this thread's meta tensors, apart from a measurement that it is in already.
int anyroll_measure_begin() {
  return guarded(-1, [] {
    prepare_measuring();
    take_name();
    auto count = std::make_shared<Count>();
    count->outer = std::move(measured);
    measured = std::move(count);
    return 0;
  });
}

// Ends the measurement of this thread that began last.
void anyroll_measure_end() { measured = std::exchange(measured->outer, nullptr); }

// The bytes that are live, and the most that were live at a time since the last restart.
void anyroll_measured(int64_t* live, int64_t* peak) {
  *live = measured->live;
  *peak = measured->peak;
}

void anyroll_measure_restart() { measured->peak = measured->live; }

// A flash attention on a device, of `[B, H, N, D]`, as libtorch chooses it there.
void* anyroll_attention_of_device(void* q, void* k, void* v, int is_causal) {
  return guarded<void*>(nullptr, [&]() -> void* {
    const auto of = [](void* tensor) -> const Tensor& { return *static_cast<Tensor*>(tensor); };
    return new Tensor(std::get<0>(at::_scaled_dot_product_flash_attention(of(q), of(k), of(v), 0.0, is_causal != 0)));
  });
}

}  // extern "C"
