// Shapes of a program for one set of symbols: expressions, inputs, outputs and the operands of each op.
#include <algorithm>

#include "core/program.h"

namespace kernel_pytorch {
namespace {

using format::BufferKind;
using format::Token;

constexpr int64_t kMaxElements = int64_t{1} << 40;

// Applies a binary token; false on overflow, division by zero and negative dividends.
bool apply(Token token, int64_t a, int64_t b, int64_t& result) {
  if (token == Token::kAdd) return !__builtin_add_overflow(a, b, &result);
  if (token == Token::kMultiply) return !__builtin_mul_overflow(a, b, &result);
  if (b <= 0 || a < 0) return false;
  result = token == Token::kFloorDivide ? a / b : a % b;
  return true;
}

}  // namespace

bool Program::evaluate(const std::vector<int64_t>& symbols, Reason& reason) {
  for (size_t n = 0; n < payload_.expressions.size(); ++n) {
    int64_t stack[16];  // read_payload() bounds the depth
    int top = 0;
    for (const ExpressionToken& token : payload_.expressions[n]) {
      if (token.kind == Token::kConstant) {
        stack[top++] = token.value;
      } else if (token.kind == Token::kSymbol) {
        stack[top++] = symbols[static_cast<size_t>(token.value)];
      } else {
        --top;
        if (!apply(token.kind, stack[top - 1], stack[top], stack[top - 1])) {
          return reason.set("a shape cannot be computed from these lengths");
        }
      }
    }
    sizes_[n] = stack[0];
  }
  return true;
}

bool Program::resolve_parameter(const Parameter& parameter, View& shape, Reason& reason) const {
  shape.dtype = parameter.dtype;
  shape.rank = static_cast<int32_t>(parameter.dims.size());
  int64_t count = 1;
  for (int d = 0; d < shape.rank; ++d) {
    const int64_t size = shape.dims[d] = sizes_[parameter.dims[d]];
    if (size < 0 || size > INT32_MAX || __builtin_mul_overflow(count, size, &count) || count > kMaxElements) {
      return reason.set("'%.64s' would have a dimension of %lld", parameter.name.c_str(), static_cast<long long>(size));
    }
  }
  return true;
}

int64_t Program::buffer_elements(const Buffer& buffer) const {
  if (buffer.kind == BufferKind::kInput) return input_shapes_[buffer.index].numel();
  if (buffer.kind == BufferKind::kOutput) return output_shapes_[buffer.index].numel();
  return static_cast<int64_t>(buffer.bytes / size_of(buffer.dtype));
}

// Sets everything of a view but its data, and rejects a view that exceeds its buffer.
bool Program::resolve_value(uint32_t index, View& view, Reason& reason) const {
  const Value& value = payload_.values[index];
  const Buffer& buffer = payload_.buffers[value.buffer];
  view.dtype = buffer.dtype;
  view.rank = static_cast<int32_t>(value.dims.size());
  int64_t last = sizes_[value.offset], count = 1;
  bool bad = last < 0;
  for (int d = 0; d < view.rank; ++d) {
    const int64_t size = sizes_[value.dims[d]], stride = sizes_[value.strides[d]];
    view.dims[d] = size;
    view.strides[d] = stride;
    int64_t reach;
    bad = bad || size < 0 || stride < 0 || __builtin_mul_overflow(std::max<int64_t>(size - 1, 0), stride, &reach) ||
          __builtin_add_overflow(last, reach, &last) || __builtin_mul_overflow(count, size, &count) ||
          count > kMaxElements;
    if (bad) break;
  }
  if (bad || (count > 0 && last >= buffer_elements(buffer))) return reason.set("a value reaches beyond its buffer");
  return true;
}

bool Program::resolve_operator(Operator& op, Reason& reason) {
  for (size_t n = 0; n < op.op->inputs.size(); ++n) {
    op.has_input[n] = op.op->inputs[n] != format::kNone;
    if (op.has_input[n] && !resolve_value(op.op->inputs[n], op.inputs[n], reason)) return false;
  }
  for (size_t n = 0; n < op.op->outputs.size(); ++n) {
    View& view = op.outputs[n];
    if (!resolve_value(op.op->outputs[n], view, reason)) return false;
    // Two workers must not write the same element.
    for (int d = 0; d < view.rank; ++d) {
      if (view.dims[d] > 1 && view.strides[d] == 0) return reason.set("%s writes an element more than once", op.name);
    }
  }
  op.schedule = {};
  if (!op.resolve(reason)) return false;
  // Scratch was allocated for the largest lengths; only a malformed payload needs more for smaller ones.
  if (memory_ && (op.schedule.scratch_bytes > scratch_bytes_ || op.schedule.workspace_bytes > workspace_bytes_)) {
    return reason.set("%s needs more scratch memory than at the largest lengths", op.name);
  }
  return true;
}

bool Program::resolve(const std::vector<int64_t>& symbols, Reason& reason) {
  resolved_ = false;
  if (!evaluate(symbols, reason)) return false;
  for (size_t n = 0; n < payload_.inputs.size(); ++n) {
    if (!resolve_parameter(payload_.inputs[n], input_shapes_[n], reason)) return false;
  }
  for (size_t n = 0; n < payload_.outputs.size(); ++n) {
    if (!resolve_parameter(payload_.outputs[n], output_shapes_[n], reason)) return false;
  }
  for (const auto& op : ops_) {
    if (!resolve_operator(*op, reason)) return false;
  }
  if (&symbols != &symbols_) symbols_ = symbols;
  resolved_ = true;
  return true;
}

}  // namespace kernel_pytorch
