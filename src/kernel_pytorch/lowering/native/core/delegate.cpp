// The ExecuTorch delegate: registers KernelPyTorchBackend when the library is loaded.
#include <executorch/runtime/backend/interface.h>
#include <executorch/runtime/core/error.h>
#include <executorch/runtime/core/evalue.h>
#include <executorch/runtime/core/exec_aten/util/tensor_util.h>
#include <executorch/runtime/platform/log.h>

#include <memory>
#include <vector>

#include "core/c_api.h"
#include "core/program.h"
#include "core/threads.h"

namespace kernel_pytorch {
namespace {

using executorch::aten::ScalarType;
using executorch::aten::Tensor;
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
using executorch::runtime::NamedDataMap;
using executorch::runtime::register_backend;
using executorch::runtime::Result;
using executorch::runtime::Span;

constexpr const char* kName = "KernelPyTorchBackend";

// The reason for which the last call on this thread failed. ExecuTorch passes on only an error code.
thread_local Reason last_error;

// The owner of the caches of the last program with caches that this thread loaded.
thread_local const void* last_owner = nullptr;

// What the process said about the file that this thread loads.
thread_local bool file_verified = false;

bool dtype_of(ScalarType type, DType& dtype) {
  switch (type) {
    case ScalarType::Float:
      dtype = DType::kFloat32;
      return true;
    case ScalarType::Half:
      dtype = DType::kFloat16;
      return true;
    case ScalarType::BFloat16:
      dtype = DType::kBFloat16;
      return true;
    case ScalarType::Bool:
      dtype = DType::kBool;
      return true;
    case ScalarType::Long:
      dtype = DType::kInt64;
      return true;
    case ScalarType::Char:
      dtype = DType::kInt8;
      return true;
    case ScalarType::Int:
      dtype = DType::kInt32;
      return true;
    default:
      return false;
  }
}

// A loaded program and the arrays that each call fills, so that a call allocates nothing.
struct Handle {
  const NamedDataMap* named = nullptr;
  std::vector<FreeableBuffer> shared;  // constants of the .pte, which the program reads in place
  std::unique_ptr<Program> program;
  std::vector<Argument> inputs;
  std::vector<void*> outputs;
};

bool read_argument(const EValue& value, const Parameter& wanted, Argument& given, Reason& reason) {
  const char* name = wanted.name.c_str();
  given.is_integer = value.isInt();
  if (given.is_integer) {
    given.integer = value.toInt();
    return true;
  }
  if (!value.isTensor()) return reason.set("input '%.64s' is not a tensor", name);
  const Tensor& tensor = value.toTensor();
  if (!dtype_of(tensor.scalar_type(), given.dtype)) return reason.set("input '%.64s' has an unsupported dtype", name);
  if (tensor.dim() > kMaxRank) return reason.set("input '%.64s' has %d dimensions", name, (int)tensor.dim());
  given.rank = static_cast<int32_t>(tensor.dim());
  int64_t stride = 1;
  for (int d = given.rank - 1; d >= 0; --d) {
    given.dims[d] = tensor.size(d);
    if (tensor.size(d) != 1 && tensor.strides()[d] != stride && tensor.numel() > 1) {
      return reason.set("input '%.64s' is not contiguous", name);
    }
    stride *= tensor.size(d);
  }
  given.data = const_cast<void*>(tensor.const_data_ptr());
  if (given.data == nullptr && tensor.numel() > 0) return reason.set("input '%.64s' has no data", name);
  return true;
}

const uint8_t* find_shared(void* context, const std::string& name, uint64_t bytes) {
  Handle& handle = *static_cast<Handle*>(context);
  if (handle.named == nullptr) return nullptr;
  auto found = handle.named->get_data(name);
  if (!found.ok() || found->size() != bytes) return nullptr;
  handle.shared.push_back(std::move(found.get()));
  return static_cast<const uint8_t*>(handle.shared.back().data());
}

class KernelPyTorchBackend final : public BackendInterface {
 public:
  bool is_available() const override {
    Reason reason;
    return kernels(reason) != nullptr;
  }

  Result<DelegateHandle*> init(BackendInitContext& context, FreeableBuffer* processed,
                               ArrayRef<CompileSpec>) const override {
    Reason reason;
    auto handle = std::make_unique<Handle>();
    handle->named = context.get_named_data_map();
    Host host;
    host.workers = thread_count();
    host.parallel = on_threads;
    // All methods of one loaded program have the same named data map, and no other program has it.
    host.owner = handle->named;
    host.find = find_shared;
    host.context = handle.get();
    host.verified = file_verified;
    auto program = Program::load(static_cast<const uint8_t*>(processed->data()), processed->size(), host, reason);
    if (program && program->has_caches() && host.owner == nullptr) {
      reason.set("the program has caches, and this runtime passes no named data by which its methods could share them");
      program = nullptr;
    }
    last_error = reason;
    if (!program) {
      ET_LOG(Error, "%s: %s", kName, reason.text);
      return Error::DelegateInvalidCompatibility;
    }
    if (program->has_caches()) last_owner = host.owner;
    handle->inputs.resize(program->input_count());
    handle->outputs.resize(program->output_count());
    handle->program = std::move(program);
    return static_cast<DelegateHandle*>(handle.release());
  }

  Error execute(BackendExecutionContext&, DelegateHandle* opaque, Span<EValue*> arguments) const override {
    Handle& handle = *static_cast<Handle*>(opaque);
    Program& program = *handle.program;
    Reason reason;
    if (arguments.size() < handle.inputs.size() + handle.outputs.size()) {
      last_error.set("%zu arguments were given and %zu are needed", (size_t)arguments.size(),
                     handle.inputs.size() + handle.outputs.size());
      ET_LOG(Error, "%s: %s", kName, last_error.text);
      return Error::InvalidArgument;
    }
    bool good = true;
    for (size_t n = 0; good && n < handle.inputs.size(); ++n) {
      good = read_argument(*arguments[n], program.input(n), handle.inputs[n], reason);
    }
    good = good && program.bind(handle.inputs.data(), reason);
    // Outputs are the last arguments.
    const size_t first = arguments.size() - handle.outputs.size();
    for (size_t n = 0; good && n < handle.outputs.size(); ++n) {
      good = take_output(*arguments[first + n], program, n, handle.outputs[n], reason);
    }
    good = good && program.run(handle.outputs.data(), reason);
    last_error = reason;
    if (!good) ET_LOG(Error, "%s: %s", kName, reason.text);
    return good ? Error::Ok : Error::InvalidArgument;
  }

  void destroy(DelegateHandle* handle) const override { delete static_cast<Handle*>(handle); }

 private:
  static bool take_output(EValue& value, const Program& program, size_t n, void*& data, Reason& reason) {
    const char* name = program.output(n).name.c_str();
    DType dtype;
    if (!value.isTensor()) return reason.set("output '%.64s' is not a tensor", name);
    Tensor& tensor = value.toTensor();
    if (!dtype_of(tensor.scalar_type(), dtype) || dtype != program.output(n).dtype) {
      return reason.set("output '%.64s' has another dtype than the payload", name);
    }
    const View& shape = program.output_shape(n);
    executorch::aten::SizesType sizes[kMaxRank];
    bool same = tensor.dim() == shape.rank;
    for (int d = 0; d < shape.rank; ++d) {
      sizes[d] = static_cast<executorch::aten::SizesType>(shape.dims[d]);
      same = same && tensor.size(d) == shape.dims[d];
    }
    if (!same && executorch::runtime::resize_tensor(tensor, {sizes, static_cast<size_t>(shape.rank)}) != Error::Ok) {
      return reason.set("output '%.64s' cannot take its shape", name);
    }
    data = tensor.mutable_data_ptr();
    return data != nullptr || tensor.numel() == 0 || reason.set("output '%.64s' has no memory", name);
  }
};

KernelPyTorchBackend backend;
const Error registered = register_backend(Backend{kName, &backend});

}  // namespace
}  // namespace kernel_pytorch

const char* kernel_pytorch_last_error() {
  thread_local kernel_pytorch::Reason told;
  told = kernel_pytorch::last_error;
  kernel_pytorch::last_error = {};
  return told.text;
}

void kernel_pytorch_file_verified(bool verified) { kernel_pytorch::file_verified = verified; }

const void* kernel_pytorch_last_owner() {
  const void* const owner = kernel_pytorch::last_owner;
  kernel_pytorch::last_owner = nullptr;
  return owner;
}
