#include "core/payload.h"

#include <cstring>

#include "core/crc32.h"

namespace kernel_pytorch {
namespace {

using namespace format;

constexpr uint64_t kMaxArenaBytes = uint64_t{1} << 40;
constexpr int64_t kMaxCacheSize = int64_t{1} << 30;
constexpr size_t kMagicBytes = sizeof(kMagic) - 1;

// Reads little-endian numbers. Past the end it returns zeros and sets failed().
class Reader {
 public:
  Reader(const uint8_t* data, size_t size) : at_(data), left_(size) {}

  uint64_t bits(size_t bytes) {
    if (left_ < bytes) {
      left_ = 0;
      failed_ = true;
      return 0;
    }
    uint64_t value = 0;
    for (size_t n = 0; n < bytes; ++n) value |= uint64_t{at_[n]} << (8 * n);
    at_ += bytes;
    left_ -= bytes;
    return value;
  }
  uint8_t u8() { return static_cast<uint8_t>(bits(1)); }
  uint16_t u16() { return static_cast<uint16_t>(bits(2)); }
  uint32_t u32() { return static_cast<uint32_t>(bits(4)); }
  uint64_t u64() { return bits(8); }
  int64_t i64() { return static_cast<int64_t>(bits(8)); }
  double f64() {
    const uint64_t value = bits(8);
    double number;
    std::memcpy(&number, &value, sizeof(number));
    return number;
  }
  std::string text(size_t bytes) {
    if (left_ < bytes) {
      left_ = 0;
      failed_ = true;
      return {};
    }
    std::string result(reinterpret_cast<const char*>(at_), bytes);
    at_ += bytes;
    left_ -= bytes;
    return result;
  }

  // Whether `count` items of at least `bytes_each` can still follow; guards every allocation against a false count.
  bool fits(uint64_t count, size_t bytes_each) const { return !failed_ && count <= left_ / bytes_each; }
  bool failed() const { return failed_; }

 private:
  const uint8_t* at_;
  size_t left_;
  bool failed_ = false;
};

bool cut_short(Reason& reason, const char* what) { return reason.set("the payload is cut short in its %s", what); }

bool read_indices(Reader& in, uint64_t count, size_t limit, bool may_be_none, std::vector<uint32_t>& out,
                  const char* what, Reason& reason) {
  if (!in.fits(count, 4)) return cut_short(reason, what);
  out.resize(count);
  for (uint32_t& index : out) {
    index = in.u32();
    if (index >= limit && !(may_be_none && index == kNone)) {
      return reason.set("a %s has index %u of %zu", what, index, limit);
    }
  }
  return true;
}

bool read_dtype(uint8_t number, DType& dtype, Reason& reason) {
  if (!is_one_of<DType>(number)) return reason.set("dtype %u is unknown", number);
  dtype = static_cast<DType>(number);
  return true;
}

bool read_expressions(Reader& in, Payload& payload, Reason& reason) {
  for (Expression& expression : payload.expressions) {
    const uint32_t count = in.u32();
    if (count == 0 || !in.fits(count, 12)) return cut_short(reason, "expressions");
    expression.resize(count);
    int depth = 0;
    for (ExpressionToken& token : expression) {
      const uint32_t kind = in.u32();
      if (!is_one_of<Token>(kind)) return reason.set("an expression has the unknown token %u", kind);
      token.kind = static_cast<Token>(kind);
      token.value = in.i64();
      const bool leaf = token.kind == Token::kConstant || token.kind == Token::kSymbol;
      if (token.kind == Token::kSymbol &&
          (token.value < 0 || static_cast<uint64_t>(token.value) >= payload.symbols.size())) {
        return reason.set("an expression refers to a symbol that does not exist");
      }
      depth += leaf ? 1 : -1;
      if (depth < 1 || depth > 16) return reason.set("an expression is not well formed");
    }
    if (depth != 1) return reason.set("an expression is not well formed");
  }
  return true;
}

bool read_parameters(Reader& in, std::vector<Parameter>& parameters, size_t expressions, Reason& reason) {
  for (Parameter& parameter : parameters) {
    const uint8_t kind = in.u8(), dtype = in.u8();
    const uint16_t rank = in.u16();
    const uint32_t name_bytes = in.u32();
    if (in.failed()) return cut_short(reason, "inputs and outputs");
    if (!is_one_of<ArgumentKind>(kind)) return reason.set("an input is of the unknown kind %u", kind);
    if (rank > kMaxRank) return reason.set("an input has %u dimensions; %d are the most", rank, kMaxRank);
    parameter.kind = static_cast<ArgumentKind>(kind);
    if (!read_dtype(dtype, parameter.dtype, reason)) return false;
    if (!read_indices(in, rank, expressions, false, parameter.dims, "dimension", reason)) return false;
    if (!in.fits(name_bytes, 1)) return cut_short(reason, "names");
    parameter.name = in.text(name_bytes);
  }
  return true;
}

bool read_shared(Reader& in, Payload& payload, Reason& reason) {
  for (SharedConstant& constant : payload.shared) {
    const uint32_t name_bytes = in.u32();
    constant.crc = in.u32();
    constant.bytes = in.u64();
    if (in.failed() || !in.fits(name_bytes, 1)) return cut_short(reason, "shared constants");
    constant.name = in.text(name_bytes);
  }
  return true;
}

bool read_caches(Reader& in, Payload& payload, Reason& reason) {
  for (CacheShape& cache : payload.caches) {
    const uint8_t dtype = in.u8();
    in.bits(3);
    const uint32_t name_bytes = in.u32();
    for (int64_t* size :
         {&cache.batch, &cache.heads, &cache.dim, &cache.value_dim, &cache.ring, &cache.sinks, &cache.window}) {
      *size = in.i64();
      const bool may_be_zero = size == &cache.sinks || size == &cache.window;
      if (*size < (may_be_zero ? 0 : 1) || *size > kMaxCacheSize) {
        return in.failed() ? cut_short(reason, "caches") : reason.set("a cache has a size of %lld", (long long)*size);
      }
    }
    if (!in.fits(name_bytes, 1)) return cut_short(reason, "caches");
    cache.name = in.text(name_bytes);
    if (!read_dtype(dtype, cache.dtype, reason)) return false;
    if (cache.dtype != DType::kFloat32 && cache.dtype != DType::kFloat16 && cache.dtype != DType::kInt8) {
      return reason.set("cache '%.64s' holds %s; float32, float16 and int8 are supported", cache.name.c_str(),
                        name_of(cache.dtype));
    }
    if (cache.window >= cache.ring) return reason.set("cache '%.64s' is shorter than its window", cache.name.c_str());
  }
  return true;
}

bool read_buffers(Reader& in, Payload& payload, Reason& reason) {
  for (Buffer& buffer : payload.buffers) {
    const uint8_t kind = in.u8(), dtype = in.u8();
    in.u16();
    buffer.index = in.u32();
    buffer.offset = in.u64();
    buffer.bytes = in.u64();
    if (in.failed()) return cut_short(reason, "buffers");
    if (!is_one_of<BufferKind>(kind)) return reason.set("a buffer is of the unknown kind %u", kind);
    buffer.kind = static_cast<BufferKind>(kind);
    if (!read_dtype(dtype, buffer.dtype, reason)) return false;
    if (buffer.kind == BufferKind::kInput || buffer.kind == BufferKind::kOutput) {
      const auto& parameters = buffer.kind == BufferKind::kInput ? payload.inputs : payload.outputs;
      if (buffer.index >= parameters.size()) {
        return reason.set("a buffer refers to input or output %u, which does not exist", buffer.index);
      }
      const Parameter& parameter = parameters[buffer.index];
      if (parameter.kind != ArgumentKind::kTensor || parameter.dtype != buffer.dtype) {
        return reason.set("the dtype of a buffer differs from that of '%.64s'", parameter.name.c_str());
      }
      continue;
    }
    if (buffer.kind == BufferKind::kShared) {
      if (buffer.index >= payload.shared.size()) {
        return reason.set("a buffer refers to a constant that does not exist");
      }
      if (buffer.offset != 0 || buffer.bytes != payload.shared[buffer.index].bytes) {
        return reason.set("a buffer has another size than its shared constant");
      }
      continue;
    }
    const uint64_t limit = buffer.kind == BufferKind::kArena ? payload.arena_bytes : payload.constants_bytes;
    if (buffer.offset > limit || buffer.bytes > limit - buffer.offset) {
      return reason.set("a buffer ends beyond the %s", buffer.kind == BufferKind::kArena ? "arena" : "constants");
    }
    if (buffer.offset % kAlignment) return reason.set("a buffer is not aligned to 64 bytes");
  }
  return true;
}

bool read_values(Reader& in, Payload& payload, Reason& reason) {
  const size_t expressions = payload.expressions.size();
  for (Value& value : payload.values) {
    value.buffer = in.u32();
    const uint32_t rank = in.u32();
    value.offset = in.u32();
    if (in.failed()) return cut_short(reason, "values");
    if (value.buffer >= payload.buffers.size()) return reason.set("a value refers to a buffer that does not exist");
    if (rank > kMaxRank) return reason.set("a value has %u dimensions; %d are the most", rank, kMaxRank);
    if (value.offset >= expressions) return reason.set("a value's offset refers to an expression that does not exist");
    if (!read_indices(in, rank, expressions, false, value.dims, "dimension", reason)) return false;
    if (!read_indices(in, rank, expressions, false, value.strides, "stride", reason)) return false;
  }
  return true;
}

bool read_ops(Reader& in, Payload& payload, Reason& reason) {
  const size_t values = payload.values.size();
  for (Op& op : payload.ops) {
    op.code = in.u32();
    const uint32_t inputs = in.u32(), outputs = in.u32(), ints = in.u32(), floats = in.u32();
    if (in.failed()) return cut_short(reason, "ops");
    if (!read_indices(in, inputs, values, true, op.inputs, "op's input", reason)) return false;
    if (!read_indices(in, outputs, values, false, op.outputs, "op's output", reason)) return false;
    if (!in.fits(ints, 8)) return cut_short(reason, "ops");
    op.ints.resize(ints);
    for (int64_t& number : op.ints) number = in.i64();
    if (!in.fits(floats, 8)) return cut_short(reason, "ops");
    op.floats.resize(floats);
    for (double& number : op.floats) number = in.f64();
    for (uint32_t output : op.outputs) {
      const BufferKind kind = payload.buffers[payload.values[output].buffer].kind;
      if (kind != BufferKind::kOutput && kind != BufferKind::kArena) {
        return reason.set("an op writes to an input or a constant");
      }
    }
  }
  return true;
}

}  // namespace

bool read_payload(const uint8_t* data, size_t size, Payload& payload, Reason& reason) {
  if (data == nullptr || size < kHeaderBytes) return reason.set("the payload has %zu bytes and no header", size);
  if (std::memcmp(data, kMagic, kMagicBytes) != 0) return reason.set("this is not a payload of KernelPyTorch");
  Reader header(data + kMagicBytes, kHeaderBytes - kMagicBytes);
  const uint32_t version = header.u32(), checksum = header.u32();
  const uint64_t whole = header.u64();
  if (version != kVersion) {
    return reason.set("the payload has version %u and this runtime reads %u: lower the model again", version, kVersion);
  }
  // A container may pad its contents, so `size` may exceed the size in the header.
  if (whole < kHeaderBytes || whole > size) return reason.set("the payload is cut short");
  if (crc32(data + 16, whole - 16) != checksum) return reason.set("the payload is damaged: its checksum is wrong");

  Reader in(data + kHeaderBytes, whole - kHeaderBytes);
  const uint32_t target = in.u32();
  uint32_t counts[9];
  for (uint32_t& count : counts) count = in.u32();
  payload.arena_bytes = in.u64();
  const uint64_t constants_at = in.u64();
  payload.constants_bytes = in.u64();
  if (in.failed()) return cut_short(reason, "head");
  if (target != static_cast<uint32_t>(Target::kCpu)) {
    return reason.set("the payload is for target %u; this runtime is for the CPU (1)", target);
  }
  if (payload.arena_bytes > kMaxArenaBytes) return reason.set("the payload asks for more than 2^40 bytes of memory");
  if (constants_at > whole || payload.constants_bytes > whole - constants_at) return cut_short(reason, "constants");
  if (payload.constants_bytes > 0 && constants_at % kAlignment) {
    return reason.set("the constants are not aligned to 64 bytes");
  }
  payload.constants = data + constants_at;

  constexpr size_t kSmallest[9] = {24, 16, 8, 8, 16, 64, 24, 12, 20};
  for (int n = 0; n < 9; ++n) {
    if (!in.fits(counts[n], kSmallest[n])) return cut_short(reason, "head");
  }
  payload.symbols.resize(counts[0]);
  payload.expressions.resize(counts[1]);
  payload.inputs.resize(counts[2]);
  payload.outputs.resize(counts[3]);
  payload.shared.resize(counts[4]);
  payload.caches.resize(counts[5]);
  payload.buffers.resize(counts[6]);
  payload.values.resize(counts[7]);
  payload.ops.resize(counts[8]);

  for (Symbol& symbol : payload.symbols) {
    symbol.input = in.u32();
    symbol.dim = in.u32();
    symbol.low = in.i64();
    symbol.high = in.i64();
    if (symbol.low < 0 || symbol.high < symbol.low) return reason.set("a symbol's range is empty or negative");
  }
  if (in.failed()) return cut_short(reason, "symbols");
  if (!read_expressions(in, payload, reason)) return false;
  if (!read_parameters(in, payload.inputs, counts[1], reason)) return false;
  if (!read_parameters(in, payload.outputs, counts[1], reason)) return false;
  if (!read_shared(in, payload, reason) || !read_caches(in, payload, reason)) return false;
  if (!read_buffers(in, payload, reason)) return false;
  if (!read_values(in, payload, reason)) return false;
  if (!read_ops(in, payload, reason)) return false;
  for (const Symbol& symbol : payload.symbols) {
    if (symbol.input >= counts[2]) return reason.set("a symbol refers to input %u, which does not exist", symbol.input);
    const Parameter& input = payload.inputs[symbol.input];
    const bool fine = input.kind == ArgumentKind::kInteger ? symbol.dim == kNone : symbol.dim < input.dims.size();
    if (!fine) return reason.set("a symbol refers to dimension %u of '%.64s'", symbol.dim, input.name.c_str());
  }
  return true;
}

}  // namespace kernel_pytorch
