// Reads what delegate.py writes; its docstring is the format. Every number is checked before it is used.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

namespace acme_backend {

constexpr uint32_t kMagic = 0x314B504B;
constexpr uint32_t kVersion = 1;
enum OpCode : uint32_t { kRelu = 1, kLinear = 2 };
enum Flags : uint32_t { kInt8Weights = 1, kBias = 2 };

struct Op {
  uint32_t code = 0, source = 0, target = 0;
  uint32_t rows = 0, inputs = 0, outputs = 0;  // of a linear
  std::vector<float> weights, scales, bias;
  std::vector<int8_t> weights_int8;
};

struct Program {
  std::vector<uint32_t> sizes;  // how many numbers each value holds
  std::vector<uint32_t> inputs, outputs;
  std::vector<Op> ops;
};

class Reader {
 public:
  Reader(const void* data, size_t size) : at_(static_cast<const uint8_t*>(data)), left_(size) {}

  template <typename Number>
  bool list(uint64_t count, std::vector<Number>& into) {
    const uint64_t bytes = (count * sizeof(Number) + 3) / 4 * 4;
    if (count > left_ || bytes > left_) return false;
    into.resize(count);
    if (count > 0) std::memcpy(into.data(), at_, count * sizeof(Number));
    at_ += bytes;
    left_ -= bytes;
    return true;
  }

  bool numbers(std::initializer_list<uint32_t*> into) {
    for (uint32_t* one : into) {
      if (left_ < sizeof(*one)) return false;
      std::memcpy(one, at_, sizeof(*one));
      at_ += sizeof(*one);
      left_ -= sizeof(*one);
    }
    return true;
  }

  bool finished() const { return left_ == 0; }

 private:
  const uint8_t* at_;
  uint64_t left_;
};

// Null where all is well, otherwise what is wrong.
inline const char* read(const void* data, size_t size, Program& program) {
  Reader reader(data, size);
  uint32_t magic, version, values, inputs, outputs, ops;
  if (!reader.numbers({&magic, &version, &values, &inputs, &outputs, &ops}) || magic != kMagic) {
    return "this is no payload of this backend";
  }
  if (version != kVersion) return "the payload has another version: lower the model again";
  if (!reader.list(values, program.sizes) || !reader.list(inputs, program.inputs) ||
      !reader.list(outputs, program.outputs)) {
    return "the payload is cut short";
  }
  std::vector<bool> known(values, false);  // an op reads only what was given or computed before it
  for (uint32_t one : program.inputs) {
    if (one >= values) return "an input is out of range";
    known[one] = true;
  }
  for (uint32_t n = 0; n < ops; ++n) {
    Op op;
    if (!reader.numbers({&op.code, &op.source, &op.target})) return "the payload is cut short";
    if (op.source >= values || op.target >= values || !known[op.source] || known[op.target]) {
      return "an op names a wrong value";
    }
    known[op.target] = true;
    if (op.code == kRelu) {
      if (program.sizes[op.source] != program.sizes[op.target]) return "a relu changes the size";
    } else if (op.code == kLinear) {
      uint32_t flags;
      if (!reader.numbers({&op.rows, &op.inputs, &op.outputs, &flags})) return "the payload is cut short";
      const uint64_t most = std::numeric_limits<uint32_t>::max();
      const uint64_t count = uint64_t{op.inputs} * op.outputs;
      if (uint64_t{op.rows} * op.inputs != program.sizes[op.source] ||
          uint64_t{op.rows} * op.outputs != program.sizes[op.target] || count > most) {
        return "a linear's sizes do not fit";
      }
      const bool small = flags & kInt8Weights;
      if (!(small ? reader.list(count, op.weights_int8) : reader.list(count, op.weights)) ||
          (small && !reader.list(op.outputs, op.scales)) ||
          ((flags & kBias) && !reader.list(op.outputs, op.bias))) {
        return "the payload is cut short";
      }
    } else {
      return "an op is unknown";
    }
    program.ops.push_back(std::move(op));
  }
  for (uint32_t one : program.outputs) {
    if (one >= values || !known[one]) return "an output is never computed";
  }
  return reader.finished() ? nullptr : "something follows the payload";
}

}  // namespace acme_backend
