// Vectors of float32 at the width of one target, with the compilers' vector extensions: one source for all targets.
//
// This header is compiled once per target with that target's flags. Everything is in an unnamed namespace, and no
// template of the standard library is used: of an inline function that several targets share, the linker keeps one
// copy, and that one may use instructions that the processor lacks.
#pragma once

#include <stdint.h>

#if defined(KP_TARGET_AVX512) || defined(KP_TARGET_AVX2)
#include <immintrin.h>
#endif

#if defined(KP_TARGET_AVX512)
#define KP_LANES 16
#elif defined(KP_TARGET_AVX2)
#define KP_LANES 8
#else
#define KP_LANES 4
#endif

namespace {

constexpr int kLanes = KP_LANES;

typedef float Vec __attribute__((vector_size(4 * KP_LANES)));
typedef int32_t IntVec __attribute__((vector_size(4 * KP_LANES)));
typedef uint16_t HalfVec __attribute__((vector_size(2 * KP_LANES)));
typedef float UnalignedVec __attribute__((vector_size(4 * KP_LANES), aligned(4), may_alias));
typedef int32_t UnalignedIntVec __attribute__((vector_size(4 * KP_LANES), aligned(4), may_alias));
typedef uint16_t UnalignedHalfVec __attribute__((vector_size(2 * KP_LANES), aligned(2), may_alias));

inline Vec load(const float* p) { return *reinterpret_cast<const UnalignedVec*>(p); }
inline void store(float* p, Vec v) { *reinterpret_cast<UnalignedVec*>(p) = v; }
inline IntVec load_ints(const int32_t* p) { return *reinterpret_cast<const UnalignedIntVec*>(p); }
inline HalfVec load_halves(const uint16_t* p) { return *reinterpret_cast<const UnalignedHalfVec*>(p); }
inline void store_halves(uint16_t* p, HalfVec v) { *reinterpret_cast<UnalignedHalfVec*>(p) = v; }
inline Vec splat(float x) { return x - Vec{}; }
inline IntVec splat_int(int32_t x) { return x - IntVec{}; }
inline Vec select(IntVec condition, Vec yes, Vec no) { return condition ? yes : no; }
inline Vec maximum(Vec a, Vec b) { return select(a > b, a, b); }
inline IntVec as_ints(Vec v) { return reinterpret_cast<IntVec>(v); }
inline Vec as_floats(IntVec v) { return reinterpret_cast<Vec>(v); }
inline Vec absolute(Vec v) { return as_floats(as_ints(v) & 0x7fffffff); }

inline float sum(Vec v) {
  float total = 0;
  for (int n = 0; n < kLanes; ++n) total += v[n];
  return total;
}

inline float largest(Vec v) {
  float result = v[0];
  for (int n = 1; n < kLanes; ++n) result = v[n] > result || v[n] != v[n] ? v[n] : result;
  return result;
}

inline bool all(IntVec condition) {
  int32_t both = -1;
  for (int n = 0; n < kLanes; ++n) both &= condition[n];
  return both != 0;
}

// exp within 2 ulp; 0 on underflow, infinity on overflow, NaN for NaN.
inline Vec exp(Vec x) {
  const Vec wide = x;
  x = select(x < -104.0f, splat(-104.0f), x);
  x = select(x > 89.0f, splat(89.0f), x);
  const Vec magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
  const Vec shifted = x * 1.44269504088896f + magic;
  const Vec whole = shifted - magic;
  Vec r = x - whole * 0.693145751953125f;  // ln 2 as a sum of two; products with the first are exact
  r = r - whole * 1.42860682030941723e-6f;
  Vec p = splat(1.393373321e-03f);
  p = p * r + 8.363235385e-03f;
  p = p * r + 4.166646417e-02f;
  p = p * r + 1.666657664e-01f;
  p = p * r + 5.000000014e-01f;
  p = p * (r * r) + r + 1.0f;
  // 2^n as two factors, because 2^n itself may overflow or underflow.
  const IntVec n = as_ints(shifted) - 0x4b400000;
  const IntVec half = n >> 1;
  p = p * as_floats((half + 127) << 23) * as_floats((n - half + 127) << 23);
  return select(wide < -103.98f, splat(0.0f), p);
}

inline Vec sigmoid(Vec x) {
  // exp of a non-positive argument cannot overflow.
  const Vec e = exp(-absolute(x));
  const Vec r = 1.0f / (1.0f + e);
  return select(x < 0.0f, e * r, r);
}

inline Vec tanh(Vec x) {
  const Vec a = absolute(x);
  const Vec e = exp(-2.0f * a);
  const Vec far = (1.0f - e) / (1.0f + e);
  const Vec s = x * x;
  Vec near = splat(2.186948854e-2f);
  near = near * s - 5.396825397e-2f;
  near = near * s + 1.333333333e-1f;
  near = near * s - 3.333333333e-1f;
  near = x + x * s * near;
  return select(a < 0.25f, near, select(x < 0.0f, -far, far));
}

// erfc of a non-negative argument: a polynomial in 1 / (1 + 0.4 x), fitted to erfc(x) exp(x^2) on [0, 9.5].
inline Vec erfc_positive(Vec x) {
  const Vec t = 1.0f / (1.0f + 0.4f * x);
  Vec p = splat(4.090798242e-02f);
  p = p * t - 1.385347570e-01f;
  p = p * t + 8.005351025e-02f;
  p = p * t + 9.277888458e-02f;
  p = p * t + 7.618931123e-02f;
  p = p * t + 1.950261474e-01f;
  p = p * t + 2.014381398e-01f;
  p = p * t + 2.265108857e-01f;
  p = p * t + 2.256299571e-01f;
  return p * t * exp(-(x * x));
}

inline Vec erf(Vec x) {
  const Vec a = absolute(x);
  const Vec far = 1.0f - erfc_positive(a);
  const Vec s = x * x;
  Vec near = splat(-7.575757576e-4f);
  near = near * s + 4.629629630e-3f;
  near = near * s - 2.380952381e-2f;
  near = near * s + 1.0e-1f;
  near = near * s - 3.333333333e-1f;
  near = 1.128379167f * (x + x * s * near);
  return select(a < 0.5f, near, select(x < 0.0f, -far, far));
}

inline Vec gelu(Vec x) {
  // x times the normal CDF of x. Its lower tail is computed from erfc, so that nothing cancels.
  const Vec tail = 0.5f * erfc_positive(absolute(x) * 0.70710678118654752f);
  const Vec result = x * select(x < 0.0f, tail, 1.0f - tail);
  return select(x < -13.4f, splat(-0.0f), result);  // underflows; also keeps -inf * 0 from giving NaN
}

inline Vec gelu_tanh(Vec x) {
  const Vec inner = 0.79788456080286536f * (x + 0.044715f * x * x * x);
  return x * sigmoid(2.0f * inner);  // 0.5 (1 + tanh(y)) is the sigmoid of 2 y
}

inline Vec silu(Vec x) { return x * sigmoid(x); }

inline Vec square_root(Vec x) {
  Vec result = x;
  for (int n = 0; n < kLanes; ++n) result[n] = __builtin_sqrtf(x[n]);
  return result;
}

// With intrinsics, because compilers turn these conversions into about ten instructions instead of one.
inline Vec from_int8(const int8_t* p) {
#if defined(KP_TARGET_AVX512)
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
#elif defined(KP_TARGET_AVX2)
  return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
#else
  typedef int8_t Bytes __attribute__((vector_size(KP_LANES)));
  typedef int8_t UnalignedBytes __attribute__((vector_size(KP_LANES), aligned(1), may_alias));
  const Bytes bytes = *reinterpret_cast<const UnalignedBytes*>(p);
  return __builtin_convertvector(__builtin_convertvector(bytes, IntVec), Vec);
#endif
}

inline Vec from_bfloat16(HalfVec bits) {
  typedef uint32_t Bits __attribute__((vector_size(4 * KP_LANES)));
  return reinterpret_cast<Vec>(__builtin_convertvector(bits, Bits) << 16);
}

inline HalfVec to_bfloat16(Vec v) {
  const IntVec bits = as_ints(v);
  IntVec rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  rounded = (v != v) ? (splat_int(0x7fc0) | ((bits >> 16) & 0x8000)) : rounded;
  return __builtin_convertvector(rounded, HalfVec);
}

inline Vec from_float16(HalfVec half) {
#if defined(KP_TARGET_AVX512)
  return _mm512_cvtph_ps(reinterpret_cast<__m256i>(half));
#elif defined(KP_TARGET_AVX2)
  return _mm256_cvtph_ps(reinterpret_cast<__m128i>(half));
#else
  typedef uint32_t Bits __attribute__((vector_size(4 * KP_LANES)));
  const IntVec bits = reinterpret_cast<IntVec>(__builtin_convertvector(half, Bits));
  const IntVec sign = (bits & 0x8000) << 16, magnitude = (bits & 0x7fff) << 13;
  // Rebias the exponent by a multiplication, which is right for subnormals too.
  Vec moved = as_floats(magnitude) * 5.192296858534828e33f;  // 2^112
  moved = (magnitude >= (0x7c00 << 13)) ? as_floats(magnitude | 0x7f800000) : moved;
  return as_floats(as_ints(moved) | sign);
#endif
}

inline HalfVec to_float16(Vec v) {
  const IntVec bits = as_ints(v), sign = (bits >> 16) & 0x8000;
  const Vec a = absolute(v);
  const IntVec a_bits = as_ints(a);
  // Normal numbers: round the mantissa to ten bits, ties to even. A carry into the exponent gives the right result.
  const IntVec normal = (a_bits + 0xfff + ((a_bits >> 13) & 1) - (112 << 23)) >> 13;
  // Subnormals, below 2^-14: adding 0.5 rounds to the ten bits that are kept, and moves them to the lowest place.
  const IntVec small = as_ints(a + 0.5f) - as_ints(splat(0.5f));
  IntVec result = (a < 6.103515625e-5f) ? small : normal;
  result = (a >= 65520.0f) ? splat_int(0x7c00) : result;
  result = (v != v) ? splat_int(0x7e00) : result;
  return __builtin_convertvector(result | sign, HalfVec);
}

}  // namespace
