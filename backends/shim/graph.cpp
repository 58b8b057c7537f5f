// Functions that libtorch's autograd differentiates by a backward of ours.
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>

#include <memory>
#include <stdexcept>
#include <utility>
#include <vector>

#include "shim.h"

using at::Tensor;
using torch::autograd::variable_list;

// Takes over `context`. Gets the gradient of each output, or null where it is zero, and of which inputs gradients are wanted;
// leaves new tensors, or null for one without influence, in `results`. Returns 0, or -1 with the reason in `message`.
using Backward = int (*)(void* context, void* const* grads, const bool* wanted, void** results, char* message,
                         size_t capacity);
using Release = void (*)(void* context);

namespace {

struct Recorded : torch::autograd::Node {
  Recorded(void* context, Backward backward, Release release)
      : context(context), backward(backward), let_go(release) {}
  ~Recorded() override { release_variables(); }

  variable_list apply(variable_list&& grads) override {
    void* const taken = std::exchange(context, nullptr);
    if (taken == nullptr) throw std::runtime_error("a function was differentiated a second time");
    if (at::GradMode::is_enabled()) {
      let_go(taken);
      throw std::runtime_error("the gradients of this function have no graph of their own");
    }
    std::vector<void*> from;
    for (Tensor& grad : grads) from.push_back(grad.defined() ? &grad : nullptr);
    std::vector<void*> results(num_outputs(), nullptr);
    const std::unique_ptr<bool[]> wanted(new bool[num_outputs()]);
    for (size_t i = 0; i < num_outputs(); i++) wanted[i] = task_should_compute_output(i);
    char message[512] = {};
    const int code = backward(taken, from.data(), wanted.get(), results.data(), message, sizeof message);
    if (code != 0) throw std::runtime_error(message);
    variable_list gradients;
    for (void* result : results) {
      const std::unique_ptr<Tensor> owned(static_cast<Tensor*>(result));
      gradients.push_back(owned ? *owned : Tensor());
    }
    return gradients;
  }

  void release_variables() override {
    if (void* const taken = std::exchange(context, nullptr)) let_go(taken);
  }

 private:
  void* context;
  Backward backward;
  Release let_go;
};

std::vector<Tensor> tensors(void* const* from, int count) {
  std::vector<Tensor> to;
  for (int i = 0; i < count; i++) to.push_back(*static_cast<Tensor*>(from[i]));
  return to;
}

}  // namespace

extern "C" {

// Whether autograd follows what is made of any of these.
int anyroll_is_recorded(void* const* inputs, int count) {
  if (!at::GradMode::is_enabled()) return 0;
  for (int i = 0; i < count; i++) {
    if (static_cast<Tensor*>(inputs[i])->requires_grad()) return 1;
  }
  return 0;
}

// Makes `outputs`, which are no differentiable views, a function of `inputs`. Takes over `context`, also if it fails.
int anyroll_record(void* const* inputs, int input_count, void* const* outputs, int output_count, void* context,
                   Backward backward, Release release) {
  return guarded(-1, [&] {
    const std::shared_ptr<Recorded> node(new Recorded(context, backward, release), torch::autograd::deleteNode);
    node->set_next_edges(torch::autograd::collect_next_edges(tensors(inputs, input_count)));
    torch::autograd::set_history(tensors(outputs, output_count), node);
    return 0;
  });
}
}
