// y = x w^T with x quantized to 8 bits per row and weights of 4 or 8 bits with a scale per group of inputs.
//
// Weights are packed into panels of 32 outputs so that a vector holds four inputs of each of its outputs, which is what
// dot-product instructions take. A step is one vector row of a panel, 32 outputs x 4 bytes: four inputs for 8 bits, and
// eight for 4 bits, the first four in the low halves of the bytes. Integers accumulate over a group, floats over
// groups.
#pragma once

#include "kernels/table.h"
#include "kernels/whole_rows.h"

#if defined(__ARM_FEATURE_DOTPROD)
#include <arm_neon.h>
#elif defined(__SSE2__)
#include <immintrin.h>
#endif

namespace {

using kernel_pytorch::QuantizedLinearTask;
using kernel_pytorch::QuantizedRow;
using kernel_pytorch::format::kPanel;

constexpr int kPanelVectors = static_cast<int>(kPanel) / kLanes;
constexpr int kStepBytes = static_cast<int>(kPanel) * 4;
constexpr int64_t kPrefetchBytes = 2048;  // ahead of the weights: a hardware prefetcher stops at the end of a page
// Rows that a tile multiplies: integer accumulators stay in registers, and with several groups, float ones as well.
#if defined(KP_TARGET_AVX512)
constexpr int kTileRowsOfOneGroup = 12, kGroupedTileRows = 6;  // of 32 registers, 24
#else
constexpr int kTileRowsOfOneGroup = 2, kGroupedTileRows = 2;  // 8 with AVX2, 16 with NEON
#endif

// acc[lane] += sum over j < 4 of a[j] * w[4 lane + j]; `a` is the same four unsigned bytes in every lane, w is signed.
inline IntVec dot4(IntVec acc, IntVec a, IntVec w) {
#if defined(__AVX512VNNI__) && defined(KP_TARGET_AVX512)
  return reinterpret_cast<IntVec>(
      _mm512_dpbusd_epi32(reinterpret_cast<__m512i>(acc), reinterpret_cast<__m512i>(a), reinterpret_cast<__m512i>(w)));
#elif defined(__AVXVNNI__) && defined(KP_TARGET_AVX2)
  return reinterpret_cast<IntVec>(_mm256_dpbusd_avx_epi32(reinterpret_cast<__m256i>(acc), reinterpret_cast<__m256i>(a),
                                                          reinterpret_cast<__m256i>(w)));
#elif defined(__ARM_FEATURE_DOTPROD)
  // Signed x signed: a - 128 is signed, and 128 times the sum of w is added by the caller's correction.
  return reinterpret_cast<IntVec>(
      vdotq_s32(reinterpret_cast<int32x4_t>(acc), reinterpret_cast<int8x16_t>(w), reinterpret_cast<int8x16_t>(a)));
#elif defined(__SSE2__)
  // Even and odd bytes as 16-bit integers, whose products add up in pairs without overflow.
  const IntVec low = splat_int(0x00ff00ff);
  typedef int16_t Shorts __attribute__((vector_size(4 * KP_LANES)));
  const Shorts w_even = (reinterpret_cast<Shorts>(w) << 8) >> 8, w_odd = reinterpret_cast<Shorts>(w) >> 8;
  const IntVec a_even = a & low, a_odd = (a >> 8) & low;
#if defined(KP_TARGET_AVX512)
  acc +=
      reinterpret_cast<IntVec>(_mm512_madd_epi16(reinterpret_cast<__m512i>(w_even), reinterpret_cast<__m512i>(a_even)));
  acc +=
      reinterpret_cast<IntVec>(_mm512_madd_epi16(reinterpret_cast<__m512i>(w_odd), reinterpret_cast<__m512i>(a_odd)));
#elif defined(KP_TARGET_AVX2)
  acc +=
      reinterpret_cast<IntVec>(_mm256_madd_epi16(reinterpret_cast<__m256i>(w_even), reinterpret_cast<__m256i>(a_even)));
  acc +=
      reinterpret_cast<IntVec>(_mm256_madd_epi16(reinterpret_cast<__m256i>(w_odd), reinterpret_cast<__m256i>(a_odd)));
#else
  acc += reinterpret_cast<IntVec>(_mm_madd_epi16(reinterpret_cast<__m128i>(w_even), reinterpret_cast<__m128i>(a_even)));
  acc += reinterpret_cast<IntVec>(_mm_madd_epi16(reinterpret_cast<__m128i>(w_odd), reinterpret_cast<__m128i>(a_odd)));
#endif
  return acc;
#else
  for (int j = 0; j < 4; ++j) acc += ((w << (24 - 8 * j)) >> 24) * ((a >> (8 * j)) & 0xff);
  return acc;
#endif
}

// Quantizes a row as torchao's asymmetric per-token quantization does: the range includes zero, ties round to even.
// Stored as unsigned bytes, q + 128; bytes past the end are zero. Rows that are not finite give NaN outputs.
inline void quantize_row(const float* __restrict x, int64_t count, const QuantizedRow& row) {
  uint8_t* const __restrict data = row.data;
  Vec low = {}, high = {}, finite = {};
  int64_t n = 0;
  for (; n + kLanes <= count; n += kLanes) {
    const Vec own = load(x + n);
    low = select(own < low, own, low);
    high = select(own > high, own, high);
    finite += own * 0.0f;  // NaN for infinities and NaN
  }
  float least = 0, greatest = 0, check = sum(finite);
  for (int lane = 0; lane < kLanes; ++lane) {
    least = low[lane] < least ? low[lane] : least;
    greatest = high[lane] > greatest ? high[lane] : greatest;
  }
  for (; n < count; ++n) {
    least = x[n] < least ? x[n] : least;
    greatest = x[n] > greatest ? x[n] : greatest;
    check += x[n] * 0.0f;
  }
  for (n = count; n < row.padded; ++n) data[n] = 0;
  float scale = (greatest - least) / 255.0f;
  if (check != 0 || scale - scale != 0) {
    __builtin_memset(data, 0, static_cast<size_t>(count));
    *row.scale = __builtin_nanf("");
    *row.zero_point = 0;
  } else {
    scale = scale > 1.1920928955078125e-7f ? scale : 1.1920928955078125e-7f;  // torchao's eps, that of float32
    const float inverse = 1.0f / scale;
    const float zero = -__builtin_rintf(least / scale);  // of the unsigned bytes
    const float zero_point = zero < 0 ? 0.0f : zero > 255 ? 255.0f : zero;
    for (n = 0; n < count; ++n) {
      // rint, not an added constant: with that the product would be fused, and not rounded as the definition does.
      const float q = __builtin_rintf(x[n] * inverse) + zero_point;
      data[n] = static_cast<uint8_t>(static_cast<int32_t>(q < 0 ? 0.0f : q > 255 ? 255.0f : q));
    }
    *row.scale = scale;
    *row.zero_point = static_cast<int32_t>(zero_point);
  }
  for (int64_t group = 0; group * row.group < row.padded; ++group) {
    int32_t total = 0;
    for (int64_t i = 0; i < row.group; ++i) total += data[group * row.group + i];
    row.group_sums[group] = total;
  }
}

inline IntVec load_bytes(const void* p) { return *reinterpret_cast<const UnalignedIntVec*>(p); }

// The four activations of a step in every lane.
inline IntVec splat_bytes(const uint8_t* p) {
  int32_t four;
  __builtin_memcpy(&four, p, sizeof(four));
#if defined(__ARM_FEATURE_DOTPROD)
  four ^= static_cast<int32_t>(0x80808080);  // a - 128
#endif
  return splat_int(four);
}

// What dot4 leaves out of sum(a * w): on Arm the activations are 128 too small. For 4 bits, w is stored as w + 8.
#if defined(__ARM_FEATURE_DOTPROD)
constexpr int32_t kActivationOffset = 128;
#else
constexpr int32_t kActivationOffset = 0;
#endif

// What a row's integer sums of one group become: sum(q (n - 8)) = sum(q n) - 8 sum(q), where n is the stored nibble.
template <int Bits>
inline Vec scaled_sums(const QuantizedLinearTask& task, int64_t row, int64_t group, IntVec sums, int v) {
  if (Bits == 4) {
    const int32_t own = task.x[row].group_sums[group];
    sums -= 8 * (own - kActivationOffset * static_cast<int32_t>(task.group));
  }
  return __builtin_convertvector(sums, Vec) * load(task.scales + group * kPanel + v * kLanes);
}

template <int Bits, int Rows>
inline void quantized_tile(const QuantizedLinearTask& task, int64_t first_row) {
  constexpr int kInputsPerStep = Bits == 4 ? 8 : 4;
  const int64_t steps = task.group / kInputsPerStep, groups = task.padded / task.group;
  const uint8_t* x[Rows];
  Vec acc[Rows][kPanelVectors];
  for (int r = 0; r < Rows; ++r) {
    x[r] = task.x[first_row + r].data;
    for (int v = 0; v < kPanelVectors; ++v) acc[r][v] = Vec{};
  }
  const char* weights = task.weights;
  const int64_t mask = prefetch_mask(task.rows / Rows);
  const int64_t ahead = Rows == 1 ? kPrefetchBytes : groups * steps * kStepBytes;
  for (int64_t group = 0; group < groups; ++group) {
    IntVec sums[Rows][kPanelVectors];
    for (int r = 0; r < Rows; ++r) {
      for (int v = 0; v < kPanelVectors; ++v) sums[r][v] = IntVec{};
    }
    const int64_t first = group * task.group;
    for (int64_t step = 0; step < steps; ++step, weights += kStepBytes) {
      const int64_t input = first + step * kInputsPerStep;
      // One row waits for memory. Of many, each tile asks for a part of the panel that comes next.
      if (Rows == 1 || (Rows > 2 && (step & mask) == (first_row / Rows & mask))) {
        __builtin_prefetch(weights + ahead);
        __builtin_prefetch(weights + ahead + 64);
      }
      IntVec low[kPanelVectors], high[kPanelVectors];
      for (int v = 0; v < kPanelVectors; ++v) {
        low[v] = load_bytes(weights + v * kLanes * 4);
        if (Bits == 4) {
          high[v] = (low[v] >> 4) & 0x0f0f0f0f;
          low[v] &= 0x0f0f0f0f;
        }
      }
      for (int r = 0; r < Rows; ++r) {
        const IntVec a = splat_bytes(x[r] + input);
        for (int v = 0; v < kPanelVectors; ++v) sums[r][v] = dot4(sums[r][v], a, low[v]);
        if (Bits == 4) {
          const IntVec b = splat_bytes(x[r] + input + 4);
          for (int v = 0; v < kPanelVectors; ++v) sums[r][v] = dot4(sums[r][v], b, high[v]);
        }
      }
    }
    for (int r = 0; r < Rows; ++r) {
      for (int v = 0; v < kPanelVectors; ++v) {
        acc[r][v] += scaled_sums<Bits>(task, first_row + r, group, sums[r][v], v);
      }
    }
  }
  for (int r = 0; r < Rows; ++r) {
    const QuantizedRow& row = task.x[first_row + r];
    float* const to = task.y[first_row + r];
    float y[kPanel];
    float* const out = task.columns == kPanel ? to : y;
    for (int v = 0; v < kPanelVectors; ++v) {
      const float zero_point = static_cast<float>(*row.zero_point - kActivationOffset);
      store(out + v * kLanes, (acc[r][v] - zero_point * load(task.sums + v * kLanes)) * *row.scale);
    }
    if (task.bias != nullptr) {
      for (int64_t n = 0; n < task.columns; ++n) out[n] += task.bias[n];
    }
    if (out != to) __builtin_memcpy(to, y, static_cast<size_t>(task.columns) * sizeof(float));
  }
}

#if defined(__ARM_FEATURE_MATMUL_INT8)
// Two rows at once with instructions that multiply 2x8 by 8x2 bytes, for half of the panel: a vector of sums has two
// outputs of a row and the same two of the next row.
template <int Bits, int Pairs>
inline void quantized_pairs(const QuantizedLinearTask& task, int64_t first_row, int half) {
  constexpr int kQuads = static_cast<int>(kPanel) / 8;  // vectors of four outputs
  const int64_t groups = task.padded / task.group;
  const int8_t* weights = reinterpret_cast<const int8_t*>(task.weights) + half * kStepBytes / 2;
  const int8x16_t nibble = vdupq_n_s8(0x0f);
  Vec acc[2 * Pairs][kQuads];
  for (int r = 0; r < 2 * Pairs; ++r) {
    for (int v = 0; v < kQuads; ++v) acc[r][v] = Vec{};
  }
  for (int64_t group = 0; group < groups; ++group) {
    int32x4_t sums[Pairs][2 * kQuads];
    for (int p = 0; p < Pairs; ++p) {
      for (int v = 0; v < 2 * kQuads; ++v) sums[p][v] = vdupq_n_s32(0);
    }
    for (int64_t input = group * task.group; input < (group + 1) * task.group; input += 8) {
      uint8x16_t a[Pairs];
      for (int p = 0; p < Pairs; ++p) {
        a[p] = vcombine_u8(vld1_u8(task.x[first_row + 2 * p].data + input),
                           vld1_u8(task.x[first_row + 2 * p + 1].data + input));
      }
      for (int v = 0; v < kQuads; ++v) {
        const int8x16_t own = vld1q_s8(weights + 16 * v);  // four inputs of four outputs
        const int8x16_t low = Bits == 4 ? vandq_s8(own, nibble) : own;
        const int8x16_t high =
            Bits == 4 ? vandq_s8(vshrq_n_s8(own, 4), nibble) : vld1q_s8(weights + kStepBytes + 16 * v);
        const int32x4_t first = vreinterpretq_s32_s8(low), second = vreinterpretq_s32_s8(high);
        const int8x16_t left = vreinterpretq_s8_s32(vzip1q_s32(first, second));  // eight inputs of two outputs
        const int8x16_t right = vreinterpretq_s8_s32(vzip2q_s32(first, second));
        for (int p = 0; p < Pairs; ++p) {
          sums[p][2 * v] = vusmmlaq_s32(sums[p][2 * v], a[p], left);
          sums[p][2 * v + 1] = vusmmlaq_s32(sums[p][2 * v + 1], a[p], right);
        }
      }
      weights += Bits == 4 ? kStepBytes : 2 * kStepBytes;
    }
    for (int p = 0; p < Pairs; ++p) {
      const QuantizedRow* const rows = task.x + first_row + 2 * p;
      for (int v = 0; v < kQuads; ++v) {
        const int32x4_t left = sums[p][2 * v], right = sums[p][2 * v + 1];
        IntVec own[2] = {reinterpret_cast<IntVec>(vcombine_s32(vget_low_s32(left), vget_low_s32(right))),
                         reinterpret_cast<IntVec>(vcombine_s32(vget_high_s32(left), vget_high_s32(right)))};
        const Vec scales = load(task.scales + group * kPanel + half * kPanel / 2 + v * kLanes);
        for (int r = 0; r < 2; ++r) {
          if (Bits == 4) own[r] -= 8 * rows[r].group_sums[group];
          acc[2 * p + r][v] += __builtin_convertvector(own[r], Vec) * scales;
        }
      }
    }
  }
  for (int r = 0; r < 2 * Pairs; ++r) {
    const QuantizedRow& row = task.x[first_row + r];
    const int64_t first = half * kPanel / 2;
    float y[kPanel / 2];
    for (int v = 0; v < kQuads; ++v) {
      const Vec sums = load(task.sums + first + v * kLanes);
      store(y + v * kLanes, (acc[r][v] - static_cast<float>(*row.zero_point) * sums) * *row.scale);
    }
    for (int64_t n = first; n < task.columns && n < first + kPanel / 2; ++n) {
      task.y[first_row + r][n] = y[n - first] + (task.bias ? task.bias[n] : 0.0f);
    }
  }
}

template <int Bits>
inline int64_t quantized_pairs_of(const QuantizedLinearTask& task) {
  int64_t row = 0;
  if (task.group % 8 != 0) return row;
  for (; row + 4 <= task.rows; row += 4) {
    for (int half = 0; half < 2; ++half) quantized_pairs<Bits, 2>(task, row, half);
  }
  for (; row + 2 <= task.rows; row += 2) {
    for (int half = 0; half < 2; ++half) quantized_pairs<Bits, 1>(task, row, half);
  }
  return row;
}
#endif

template <int Bits, int Rows>
inline void quantized_linear_of(const QuantizedLinearTask& task) {
#if defined(__ARM_FEATURE_MATMUL_INT8)
  int64_t row = quantized_pairs_of<Bits>(task);
#else
  int64_t row = 0;
#endif
  for (; row + Rows <= task.rows; row += Rows) quantized_tile<Bits, Rows>(task, row);
  for (; Rows > 4 && row + 4 <= task.rows; row += 4) quantized_tile<Bits, 4>(task, row);
  for (; row + 2 <= task.rows; row += 2) quantized_tile<Bits, 2>(task, row);
  for (; row < task.rows; ++row) quantized_tile<Bits, 1>(task, row);
}

inline void quantized_linear(const QuantizedLinearTask& task) {
  if (task.bits == 4) {
    quantized_linear_of<4, kGroupedTileRows>(task);
  } else if (task.group < task.padded) {
    quantized_linear_of<8, kGroupedTileRows>(task);
  } else {
    quantized_linear_of<8, kTileRowsOfOneGroup>(task);
  }
}

}  // namespace
