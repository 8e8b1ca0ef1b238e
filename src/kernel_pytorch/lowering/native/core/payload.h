// A payload as it was read: every count, index and string inside its bounds, nothing about shapes checked yet.
#pragma once

#include <string>
#include <vector>

#include "core/format.h"
#include "core/types.h"

namespace kernel_pytorch {

// A number that is known when the inputs are: dimension `dim` of input `input`, or that input itself (kNone).
struct Symbol {
  uint32_t input;
  uint32_t dim;
  int64_t low;
  int64_t high;
};

struct ExpressionToken {
  uint32_t kind;
  int64_t value;
};
using Expression = std::vector<ExpressionToken>;  // postfix

struct Parameter {  // an input or an output of the whole payload
  format::ArgumentKind kind;
  DType dtype;
  std::vector<uint32_t> dims;  // expressions
  std::string name;
};

struct SharedConstant {  // found by its name, outside the payload
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
  uint64_t bytes;   // capacity; of inputs and outputs, the shape says it
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
  const uint8_t* constants = nullptr;  // inside the bytes that were read
  uint64_t constants_bytes = 0;
};

// Reads a payload, or says why it is none. `payload` points into `data`, which must outlive it.
bool read_payload(const uint8_t* data, size_t size, Payload& payload, Reason& reason);

}  // namespace kernel_pytorch
