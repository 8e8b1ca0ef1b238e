// The payload's format, version 2. src/kernel_pytorch/lowering/payload.py writes it and documents every field.
#pragma once

#include <cstdint>

namespace kernel_pytorch::format {

constexpr char kMagic[8] = {'K', 'P', 'T', 'P', 'L', 'O', 'A', 'D'};
constexpr uint32_t kVersion = 2;
constexpr uint32_t kTargetCpu = 1;
constexpr size_t kHeaderBytes = 32;
constexpr uint32_t kNone = 0xffffffff;
constexpr uint64_t kMostArenaBytes = uint64_t{1} << 40;
constexpr int64_t kMostCacheSize = int64_t{1} << 30;
constexpr uint64_t kConstantAlignment = 64;

enum Token : uint32_t { kConstantToken, kSymbolToken, kAdd, kMultiply, kFloorDivide, kModulo, kTokens };
enum BufferKind : uint8_t { kInput, kOutput, kArena, kConstant, kShared, kBufferKinds };
enum ArgumentKind : uint8_t { kTensor, kInteger, kArgumentKinds };
enum OpCode : uint32_t {
  kAttention = 1,
  kRmsNorm = 2,
  kLayerNorm = 3,
  kSoftmax = 4,
  kPointwise = 5,
  kReduce = 6,
  kLinear = 7,
  kCacheWrite = 8,
  kCachedAttention = 9,
};
enum Reduction : int64_t { kSum, kMean, kMaximum, kReductions };

// Steps of a pointwise op: (step, destination, a, b), all of them registers but for kImmediate's a.
enum Step : int64_t {
  kImmediate,
  kCopy,
  kAddStep,
  kSubtract,
  kMultiplyStep,
  kDivide,
  kMaximumStep,
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
  kSteps
};
constexpr int64_t kRegisters = 16;

}  // namespace kernel_pytorch::format
