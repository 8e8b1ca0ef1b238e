// The ExecuTorch delegate: registers AcmeBackend when the library is loaded.
#include <executorch/runtime/backend/interface.h>
#include <executorch/runtime/core/error.h>
#include <executorch/runtime/core/evalue.h>
#include <executorch/runtime/platform/log.h>

#include <memory>
#include <utility>
#include <vector>

#include "payload.h"

namespace acme_backend {
namespace {

using executorch::aten::ScalarType;
using executorch::runtime::ArrayRef;
using executorch::runtime::Backend;
using executorch::runtime::BackendExecutionContext;
using executorch::runtime::BackendInitContext;
using executorch::runtime::BackendInterface;
using executorch::runtime::CompileSpec;
using executorch::runtime::DelegateHandle;
using executorch::runtime::Error;
using executorch::runtime::EValue;
using executorch::runtime::FreeableBuffer;
using executorch::runtime::Result;
using executorch::runtime::Span;

// The two kernels, in plain C++: put calls of your hardware's library in their place.

void relu(const float* x, float* y, uint32_t count) {
  for (uint32_t n = 0; n < count; ++n) y[n] = x[n] < 0 ? 0 : x[n];  // this way round a NaN stays one
}

template <typename Weight>
void linear(const Op& op, const Weight* weights, const float* x, float* y) {
  for (uint32_t row = 0; row < op.rows; ++row) {
    const float* from = x + size_t{row} * op.inputs;
    for (uint32_t out = 0; out < op.outputs; ++out) {
      const Weight* weight = weights + size_t{out} * op.inputs;
      float sum = 0;
      for (uint32_t in = 0; in < op.inputs; ++in) sum += from[in] * static_cast<float>(weight[in]);
      if (!op.scales.empty()) sum *= op.scales[out];
      y[size_t{row} * op.outputs + out] = sum + (op.bias.empty() ? 0 : op.bias[out]);
    }
  }
}

// A program with the memory for what lies between its ops, so that a call allocates nothing.
struct Handle {
  Program program;
  std::vector<std::vector<float>> between;
  std::vector<float*> values;
};

class AcmeBackend final : public BackendInterface {
 public:
  bool is_available() const override { return true; }

  Result<DelegateHandle*> init(BackendInitContext&, FreeableBuffer* processed, ArrayRef<CompileSpec>) const override {
    auto handle = std::make_unique<Handle>();
    const char* problem = read(processed->data(), processed->size(), handle->program);
    if (problem != nullptr) {
      ET_LOG(Error, "AcmeBackend: %s", problem);
      return Error::DelegateInvalidCompatibility;
    }
    processed->Free();  // the program holds its own copy of the weights
    const Program& program = handle->program;
    handle->values.resize(program.sizes.size());
    handle->between.resize(program.sizes.size());
    std::vector<bool> given(program.sizes.size(), false);
    for (uint32_t one : program.inputs) given[one] = true;
    for (uint32_t one : program.outputs) given[one] = true;
    for (const Op& op : program.ops) {
      if (given[op.target]) continue;
      handle->between[op.target].resize(program.sizes[op.target]);
      handle->values[op.target] = handle->between[op.target].data();
    }
    return static_cast<DelegateHandle*>(handle.release());
  }

  Error execute(BackendExecutionContext&, DelegateHandle* opaque, Span<EValue*> arguments) const override {
    Handle& handle = *static_cast<Handle*>(opaque);
    const Program& program = handle.program;
    const size_t inputs = program.inputs.size(), outputs = program.outputs.size();
    if (arguments.size() < inputs + outputs) return refuse("too few arguments");
    for (size_t n = 0; n < inputs + outputs; ++n) {
      // Outputs are the last arguments.
      const size_t at = n < inputs ? n : arguments.size() - outputs + (n - inputs);
      const uint32_t value = n < inputs ? program.inputs[n] : program.outputs[n - inputs];
      if (!arguments[at]->isTensor()) return refuse("an argument is not a tensor");
      auto& tensor = arguments[at]->toTensor();
      if (tensor.scalar_type() != ScalarType::Float) return refuse("an argument is not float32");
      if (static_cast<uint64_t>(tensor.numel()) != program.sizes[value]) return refuse("an argument has a wrong size");
      handle.values[value] = static_cast<float*>(tensor.mutable_data_ptr());
    }
    for (const Op& op : program.ops) {
      const float* x = handle.values[op.source];
      float* y = handle.values[op.target];
      if (op.code == kRelu) {
        relu(x, y, program.sizes[op.source]);
      } else if (op.weights_int8.empty()) {
        linear(op, op.weights.data(), x, y);
      } else {
        linear(op, op.weights_int8.data(), x, y);
      }
    }
    return Error::Ok;
  }

  void destroy(DelegateHandle* handle) const override { delete static_cast<Handle*>(handle); }

 private:
  static Error refuse(const char* reason) {
    ET_LOG(Error, "AcmeBackend: %s", reason);
    return Error::InvalidArgument;
  }
};

AcmeBackend backend;
const Error registered = executorch::runtime::register_backend(Backend{"AcmeBackend", &backend});

}  // namespace
}  // namespace acme_backend
