// A payload after reading: every count, index and string is within bounds. Shapes are not checked yet.
#pragma once

#include <string>
#include <vector>

#include "core/format.h"
#include "core/types.h"

namespace kernel_pytorch {

// A size that the inputs determine: dimension `dim` of input `input`, or that integer input itself (kNone).
struct Symbol {
  uint32_t input;
  uint32_t dim;
  int64_t low;
  int64_t high;
};

struct ExpressionToken {
  format::Token kind;
  int64_t value;
};
using Expression = std::vector<ExpressionToken>;  // postfix

struct Parameter {  // an input or an output of the whole payload
  format::ArgumentKind kind;
  DType dtype;
  std::vector<uint32_t> dims;  // expressions
  std::string name;
};

struct SharedConstant {  // outside the payload, looked up by name
  std::string name;
  uint32_t crc;
  uint64_t bytes;
};

struct CacheShape {
  std::string name;
  DType dtype;
  int64_t batch, heads, dim, value_dim, ring, sinks, window;
};

struct Buffer {
  format::BufferKind kind;
  DType dtype;
  uint32_t index;   // of the input, output or shared constant
  uint64_t offset;  // in the arena, or in the constants
  uint64_t bytes;   // unused for inputs and outputs, whose shape gives the size
};

struct Value {  // a strided view of a buffer
  uint32_t buffer;
  uint32_t offset;  // expression
  std::vector<uint32_t> dims;
  std::vector<uint32_t> strides;
};

struct Op {
  uint32_t code;
  std::vector<uint32_t> inputs;  // values, or kNone
  std::vector<uint32_t> outputs;
  std::vector<int64_t> ints;
  std::vector<double> floats;
};

struct Payload {
  std::vector<Symbol> symbols;
  std::vector<Expression> expressions;
  std::vector<Parameter> inputs;
  std::vector<Parameter> outputs;
  std::vector<SharedConstant> shared;
  std::vector<CacheShape> caches;
  std::vector<Buffer> buffers;
  std::vector<Value> values;
  std::vector<Op> ops;
  uint64_t arena_bytes = 0;
  const uint8_t* constants = nullptr;  // points into the bytes that were read
  uint64_t constants_bytes = 0;
};

// Reads and validates a payload. `payload` points into `data`, which must outlive it.
bool read_payload(const uint8_t* data, size_t size, Payload& payload, Reason& reason);

}  // namespace kernel_pytorch
