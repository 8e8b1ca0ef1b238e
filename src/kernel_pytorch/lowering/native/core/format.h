// Constants of the payload format, version 2. payload.py documents and writes the format; masks/code.py documents the
// codes of masks. tests/lowering/test_payload_format.py compares both with this file, name by name and value by value.
#pragma once

#include <cstddef>
#include <cstdint>

namespace kernel_pytorch::format {

constexpr char kMagic[] = "KPTPLOAD";
constexpr uint32_t kVersion = 2;
constexpr size_t kHeaderBytes = 32;
constexpr uint32_t kNone = 0xffffffff;
constexpr uint64_t kAlignment = 64;
constexpr int kMaxRank = 8;
constexpr int64_t kRegisters = 16;  // of a pointwise op
constexpr int64_t kPanel = 32;      // outputs of a linear that are packed together

enum class Target : uint32_t { kCpu = 1 };

// Enumerators that end in kCount are the number of the others.
enum class DType : uint8_t { kFloat32, kFloat16, kBFloat16, kBool, kInt64, kInt32, kInt8, kCount };
enum class Token : uint32_t { kConstant, kSymbol, kAdd, kMultiply, kFloorDivide, kModulo, kCount };
enum class BufferKind : uint8_t { kInput, kOutput, kArena, kConstant, kShared, kCount };
enum class ArgumentKind : uint8_t { kTensor, kInteger, kCount };
enum class OpCode : uint32_t {
  kAttention = 1,
  kRmsNorm = 2,
  kLayerNorm = 3,
  kSoftmax = 4,
  kPointwise = 5,
  kReduce = 6,
  kLinear = 7,
  kCacheWrite = 8,
  kCachedAttention = 9,
  kQuantizedLinear = 10,
  kAttentionBackward = 11,
};
enum class Reduction : int64_t { kSum, kMean, kMaximum, kCount };

// Steps of a pointwise op: (step, destination, a, b). All are registers, except that a of kImmediate is an index.
enum class Step : int64_t {
  kImmediate,
  kCopy,
  kAdd,
  kSubtract,
  kMultiply,
  kDivide,
  kMaximum,
  kMinimum,
  kPower,
  kNegate,
  kAbsolute,
  kExp,
  kLog,
  kSqrt,
  kRsqrt,
  kReciprocal,
  kSigmoid,
  kTanh,
  kErf,
  kSilu,
  kGelu,
  kGeluTanh,
  kRelu,
  kSin,
  kCos,
  kCount
};

enum class MaskNode : int64_t {
  kFull,
  kCausal,
  kWindow,
  kSinks,
  kPrefix,
  kDocuments,
  kBlocks,
  kAnd,
  kOr,
  kPart,
  kIntervals,
  kPadding,
  kDilated,
  kCount
};

// Whether a number read from a payload is an enumerator of an enum that starts at zero and ends in kCount.
template <typename Enum, typename Number>
constexpr bool is_one_of(Number number) {
  return number >= 0 && static_cast<uint64_t>(number) < static_cast<uint64_t>(Enum::kCount);
}

}  // namespace kernel_pytorch::format
