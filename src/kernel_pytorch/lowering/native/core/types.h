// What every part of the runtime shares: number formats, views of tensors, and how a reason is reported.
#pragma once

#include <cstdarg>
#include <cstddef>
#include <cstdint>
#include <cstdio>

namespace kernel_pytorch {

constexpr int kMaxRank = 8;

enum class DType : uint8_t { kFloat32 = 0, kFloat16 = 1, kBFloat16 = 2, kBool = 3, kInt64 = 4, kInt32 = 5, kInt8 = 6 };
constexpr int kDTypes = 7;

static inline size_t size_of(DType dtype) {
  switch (dtype) {
    case DType::kFloat32:
    case DType::kInt32:
      return 4;
    case DType::kFloat16:
    case DType::kBFloat16:
      return 2;
    case DType::kBool:
    case DType::kInt8:
      return 1;
    case DType::kInt64:
      return 8;
  }
  return 0;
}

static inline bool is_float(DType dtype) {
  return dtype == DType::kFloat32 || dtype == DType::kFloat16 || dtype == DType::kBFloat16;
}

static inline const char* name_of(DType dtype) {
  constexpr const char* kNames[kDTypes] = {"float32", "float16", "bfloat16", "bool", "int64", "int32", "int8"};
  return kNames[static_cast<int>(dtype)];
}

// A run of keys that a query attends to.
struct Run {
  int64_t first;
  int64_t last;  // exclusive
};

// Strides count elements; they are never negative. `data` already includes the view's offset.
struct View {
  char* data = nullptr;
  DType dtype = DType::kFloat32;
  int32_t rank = 0;
  int64_t dims[kMaxRank] = {};
  int64_t strides[kMaxRank] = {};

  int64_t numel() const {
    int64_t count = 1;
    for (int d = 0; d < rank; ++d) count *= dims[d];
    return count;
  }
};

// Why something was refused, in words. Functions return false after they have set it.
struct Reason {
  char text[320] = {};

  __attribute__((format(printf, 2, 3))) bool set(const char* format, ...) {
    va_list arguments;
    va_start(arguments, format);
    std::vsnprintf(text, sizeof(text), format, arguments);
    va_end(arguments);
    return false;
  }
};

}  // namespace kernel_pytorch
