// As many numbers as a vector register of the machine has that is compiled for, by the vector extensions of GCC and
// Clang; instructions are named only where these have no words for them.
#pragma once

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#include "numbers.h"

namespace structattn {

#if defined(__AVX512F__)
constexpr int64_t kVectorBytes = 64;
#elif defined(__AVX2__)
constexpr int64_t kVectorBytes = 32;
#else
constexpr int64_t kVectorBytes = 16;  // SSE2, NEON
#endif

template <typename T>
struct Register;
template <>
struct Register<float> {
  using Int = int32_t;
  typedef float Raw __attribute__((vector_size(kVectorBytes)));
  typedef int32_t Mask __attribute__((vector_size(kVectorBytes)));  // all bits of a number, or none
};
template <>
struct Register<double> {
  using Int = int64_t;
  typedef double Raw __attribute__((vector_size(kVectorBytes)));
  typedef int64_t Mask __attribute__((vector_size(kVectorBytes)));
};

template <typename T>
struct Vec {
  using Int = typename Register<T>::Int;
  using Raw = typename Register<T>::Raw;
  using Mask = typename Register<T>::Mask;

  Raw raw;

  Vec() = default;
  Vec(Raw x) : raw(x) {}
  explicit Vec(T x) : raw(x - Raw{}) {}

  static constexpr int64_t size() { return kVectorBytes / sizeof(T); }

  static Vec loadu(const T* x) {
    Vec out;
    std::memcpy(&out.raw, x, sizeof(Raw));
    return out;
  }
  // The first `count` numbers, the others 0.
  static Vec loadu(const T* x, int64_t count) {
#if defined(__AVX512F__)
    if constexpr (sizeof(T) == 4) return Raw(_mm512_maskz_loadu_ps((1u << count) - 1, x));
    if constexpr (sizeof(T) == 8) return Raw(_mm512_maskz_loadu_pd((1u << count) - 1, x));
#endif
    T all[size()] = {};
    std::memcpy(all, x, count * sizeof(T));
    return loadu(all);
  }
  void store(T* x) const { std::memcpy(x, &raw, sizeof(Raw)); }
  void store(T* x, int64_t count) const {
#if defined(__AVX512F__)
    if constexpr (sizeof(T) == 4) return _mm512_mask_storeu_ps(x, (1u << count) - 1, raw);
    if constexpr (sizeof(T) == 8) return _mm512_mask_storeu_pd(x, (1u << count) - 1, raw);
#endif
    std::memcpy(x, &raw, count * sizeof(T));
  }

  friend Vec operator+(Vec a, Vec b) { return a.raw + b.raw; }
  friend Vec operator-(Vec a, Vec b) { return a.raw - b.raw; }
  friend Vec operator*(Vec a, Vec b) { return a.raw * b.raw; }
  friend Vec operator/(Vec a, Vec b) { return a.raw / b.raw; }
  friend Mask operator<(Vec a, Vec b) { return a.raw < b.raw; }
  friend Mask operator>=(Vec a, Vec b) { return a.raw >= b.raw; }
};

// The numbers of b where a mask is set, others of a.
template <typename T>
inline Vec<T> blend(Vec<T> a, Vec<T> b, typename Vec<T>::Mask mask) {
  return mask ? b.raw : a.raw;
}

// a b + c, rounded once where the machine can.
template <typename T>
inline Vec<T> fmadd(Vec<T> a, Vec<T> b, Vec<T> c) {
#if defined(__AVX512F__)
  if constexpr (sizeof(T) == 4)
    return typename Vec<T>::Raw(_mm512_fmadd_ps(a.raw, b.raw, c.raw));
  else
    return typename Vec<T>::Raw(_mm512_fmadd_pd(a.raw, b.raw, c.raw));
#elif defined(__AVX2__)
  if constexpr (sizeof(T) == 4)
    return typename Vec<T>::Raw(_mm256_fmadd_ps(a.raw, b.raw, c.raw));
  else
    return typename Vec<T>::Raw(_mm256_fmadd_pd(a.raw, b.raw, c.raw));
#else
  return a.raw * b.raw + c.raw;  // which compilers make one instruction of
#endif
}

// The larger one; no number where either is none.
template <typename T>
inline Vec<T> maximum(Vec<T> a, Vec<T> b) {
  return (a.raw > b.raw) | (a.raw != a.raw) ? a.raw : b.raw;
}

// The larger ones in one instruction: where one of the two is no number, those of b.
template <typename T>
inline Vec<T> larger_or_last(Vec<T> a, Vec<T> b) {
#if defined(__AVX512F__)
  if constexpr (std::is_same_v<T, float>)
    return typename Vec<T>::Raw(_mm512_max_ps(a.raw, b.raw));
  else
    return typename Vec<T>::Raw(_mm512_max_pd(a.raw, b.raw));
#elif defined(__AVX2__)
  if constexpr (std::is_same_v<T, float>)
    return typename Vec<T>::Raw(_mm256_max_ps(a.raw, b.raw));
  else
    return typename Vec<T>::Raw(_mm256_max_pd(a.raw, b.raw));
#else
  return a.raw > b.raw ? a.raw : b.raw;
#endif
}

// At least `least`; what is no number stays none.
template <typename T>
inline Vec<T> clamp_min(Vec<T> x, Vec<T> least) {
  return larger_or_last(least, x);
}

// Whether every number of a is at most that of b; what is no number is not.
template <typename T>
inline bool all_at_most(Vec<T> a, Vec<T> b) {
#if defined(__AVX512F__)
  if constexpr (sizeof(T) == 4)
    return _mm512_cmp_ps_mask(a.raw, b.raw, _CMP_LE_OQ) == 0xffff;
  else
    return _mm512_cmp_pd_mask(a.raw, b.raw, _CMP_LE_OQ) == 0xff;
#elif defined(__AVX2__)
  if constexpr (sizeof(T) == 4)
    return _mm256_movemask_ps(_mm256_cmp_ps(a.raw, b.raw, _CMP_LE_OQ)) == 0xff;
  else
    return _mm256_movemask_pd(_mm256_cmp_pd(a.raw, b.raw, _CMP_LE_OQ)) == 0xf;
#else
  const typename Vec<T>::Mask holds = a.raw <= b.raw;
  typename Vec<T>::Int all = -1;
  for (int64_t n = 0; n < Vec<T>::size(); ++n) all &= holds[n];
  return all != 0;
#endif
}

namespace detail {

template <int64_t kBy, typename T, size_t... I>
inline Vec<T> rotated(Vec<T> x, std::index_sequence<I...>) {
  return __builtin_shufflevector(x.raw, x.raw, ((I + kBy) % sizeof...(I))...);
}

template <int64_t kBy, typename T, typename F>
inline Vec<T> folded(Vec<T> x, const F& f) {
  const Vec<T> both = f(x, rotated<kBy>(x, std::make_index_sequence<Vec<T>::size()>()));
  if constexpr (kBy == 1)
    return both;
  else
    return folded<kBy / 2>(both, f);
}

}  // namespace detail

// f, which is associative, of all numbers.
template <typename T, typename F>
inline T reduce(Vec<T> x, const F& f) {
  return detail::folded<Vec<T>::size() / 2>(x, f).raw[0];
}

template <typename T>
inline T sum_of(Vec<T> x) {
#if defined(__AVX512F__)
  if constexpr (std::is_same_v<T, float>) return _mm512_reduce_add_ps(x.raw);  // the same additions, of half vectors
#endif
  return reduce(x, [](Vec<T> a, Vec<T> b) { return a + b; });
}

template <typename T>
inline T largest_of(Vec<T> x) {
  return reduce(x, [](Vec<T> a, Vec<T> b) { return maximum(a, b); });
}

// out = f(x), or f(x, y), for `size` numbers.
template <typename T, typename F>
inline void map(const F& f, T* out, const T* x, int64_t size) {
  constexpr int64_t W = Vec<T>::size();
  int64_t n = 0;
  for (; n + W <= size; n += W) f(Vec<T>::loadu(x + n)).store(out + n);
  if (n < size) f(Vec<T>::loadu(x + n, size - n)).store(out + n, size - n);
}
template <typename T, typename F>
inline void map2(const F& f, T* out, const T* x, const T* y, int64_t size) {
  constexpr int64_t W = Vec<T>::size();
  int64_t n = 0;
  for (; n + W <= size; n += W) f(Vec<T>::loadu(x + n), Vec<T>::loadu(y + n)).store(out + n);
  if (n < size) f(Vec<T>::loadu(x + n, size - n), Vec<T>::loadu(y + n, size - n)).store(out + n, size - n);
}

// e^(x - shift) for x up to `shift`, or a little above: the weights of softmax. It is 1 for x = shift, and 0 for what
// is hidden, -infinity.
//
// In float32 to 22 bits near `shift` and 18 far below, where PyTorch's own attention on a CPU has 20, and 0 below
// 2^-126; in float64 to 52 bits near `shift`, and 0 below 2^-1022. It takes y = (x - shift) / ln 2 apart into the
// nearest whole number n and r: 2^r is a polynomial, and n + 127 (or 1023) are the bits of an exponent. Functions that
// also take large numbers need twice the instructions. Both may be made smaller by a power of 2, for which the bits of
// the exponent are other ones.
template <int kHalvings = 0>
inline Vec<float> exponential(Vec<float> x, Vec<float> shift) {
  using V = Vec<float>;
  constexpr float kZero = 127 - kHalvings;
  const V y = clamp_min((x - shift) * V(1.44269504f), V(-kZero));  // whose exponent is that of 0
  // 1.5 x 2^23: a sum with it has no bits for fractions, and the exponent as its last bits.
  const V whole(12582912.f + kZero), n = y + whole, r = y - (n - whole);
  // The coefficients are those with the least largest relative error, 1.1e-7, of the polynomials that are 1 at 0.
  V power = fmadd(r, V(0.0013264727f), V(0.009671513f));
  power = fmadd(r, power, V(0.055507336f));
  power = fmadd(r, power, V(0.24022242f));
  power = fmadd(r, power, V(0.693147f));
  power = fmadd(r, power, V(1.f));
  // A product: what is no number stays none.
  return power * V(reinterpret_cast<V::Raw>(reinterpret_cast<V::Mask>(n.raw) << 23));
}

template <int kHalvings = 0>
inline Vec<double> exponential(Vec<double> x, Vec<double> shift) {
  using V = Vec<double>;
  const V z = clamp_min(x - shift, V(-709.2 + 0.6931471805599453 * kHalvings));  // whose exponent is that of 0
  const V whole(6755399441055744.0 + 1023 - kHalvings), n = fmadd(z, V(1.4426950408889634), whole), times = n - whole;
  // ln 2 in two parts, the first with few bits: its product with a whole number is exact.
  const V r = fmadd(times, V(-1.9082149292705877e-10), fmadd(times, V(-0.69314718036912382), z));
  V power(1.0 / 6227020800);  // Taylor's series to the 13th power: the next is 4e-18 where r is largest
  for (const double inverse : {1.0 / 479001600, 1.0 / 39916800, 1.0 / 3628800, 1.0 / 362880, 1.0 / 40320, 1.0 / 5040,
                               1.0 / 720, 1.0 / 120, 1.0 / 24, 1.0 / 6, 0.5, 1.0, 1.0})
    power = fmadd(r, power, V(inverse));
  return power * V(reinterpret_cast<V::Raw>(reinterpret_cast<V::Mask>(n.raw) << 52));
}

// e^x of one number, as `exponential`. (The function `exp` of new C libraries is not in older ones.)
template <typename T>
inline T exponential(T x) {
  return exponential(Vec<T>(x), Vec<T>(T(0))).raw[0];
}

// The natural logarithm of one number; in long double for a double, for the same reason.
inline float logarithm(float x) { return std::log(x); }
inline double logarithm(double x) { return static_cast<double>(std::log(static_cast<long double>(x))); }

// The hyperbolic tangent, to the last bit or two.
//
// Source: Moshier, Cephes Mathematical Library, tanh.c: the fraction near 0, where the other form cancels.
template <typename T>
inline Vec<T> tanh(Vec<T> x) {
  using V = Vec<T>;
  const V zero(T(0)), one(T(1)), z = x * x;
  V above = fmadd(V(T(-9.64399179425052238628e-1)), z, V(T(-9.92877231001918586564e1)));
  above = fmadd(above, z, V(T(-1.61468768441708447952e3)));
  V below = fmadd(z + V(T(1.12811678491632931402e2)), z, V(T(2.23548839060100448583e3)));
  below = fmadd(below, z, V(T(4.84406305325125486048e3)));
  const V size = blend(x, zero - x, x < zero), e = exponential(zero - (size + size), zero);
  const V far = (one - e) / (one + e);
  return blend(blend(far, zero - far, x < zero), fmadd(x * z, above / below, x), size < V(T(0.625)));
}

// As many numbers as a vector has, in the type that they are computed in.
inline Vec<float> load_numbers(const float* x) { return Vec<float>::loadu(x); }
inline Vec<double> load_numbers(const double* x) { return Vec<double>::loadu(x); }
inline Vec<float> load_numbers(const Half* x) {
#if defined(__AVX512F__)
  return Vec<float>::Raw(_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(x))));
#elif defined(__AVX2__)
  return Vec<float>::Raw(_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(x))));
#else
  float numbers[Vec<float>::size()];
  for (int64_t n = 0; n < Vec<float>::size(); ++n) numbers[n] = x[n];
  return Vec<float>::loadu(numbers);
#endif
}
inline Vec<float> load_numbers(const BFloat16* x) {
#if defined(__AVX512F__)
  const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x));
  return Vec<float>::Raw(_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16)));
#elif defined(__AVX2__)
  const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(x));
  return Vec<float>::Raw(_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16)));
#else
  float numbers[Vec<float>::size()];
  for (int64_t n = 0; n < Vec<float>::size(); ++n) numbers[n] = x[n];
  return Vec<float>::loadu(numbers);
#endif
}

// Rows and columns that are transposed at once: those of vectors of floats, and a size that compilers do well for
// others.
template <typename T>
constexpr int64_t kSquare = std::is_same_v<T, float> && kVectorBytes == 64 ? 16 : 8;

#if defined(__AVX512F__)
inline void transpose_floats(const float* from, int64_t from_stride, int64_t rows, int64_t cols, float* to,
                             int64_t to_stride) {
  const __mmask16 read = (1u << cols) - 1, written = (1u << rows) - 1;
  __m512 a[16], b[16];
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) a[i] = i < rows ? _mm512_maskz_loadu_ps(read, from + i * from_stride) : __m512{};
#pragma GCC unroll 8
  for (int i = 0; i < 16; i += 2) {
    b[i] = _mm512_unpacklo_ps(a[i], a[i + 1]);
    b[i + 1] = _mm512_unpackhi_ps(a[i], a[i + 1]);
  }
  // a[4 g + c] becomes the columns c, c + 4, c + 8, c + 12 of the rows 4 g ... 4 g + 3.
#pragma GCC unroll 4
  for (int i = 0; i < 16; i += 4)
#pragma GCC unroll 2
    for (int j = 0; j < 2; ++j) {
      const __m512d low = _mm512_castps_pd(b[i + j]), high = _mm512_castps_pd(b[i + j + 2]);
      a[i + 2 * j] = _mm512_castpd_ps(_mm512_unpacklo_pd(low, high));
      a[i + 2 * j + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(low, high));
    }
#pragma GCC unroll 4
  for (int c = 0; c < 4; ++c) {
    const __m512 even = _mm512_shuffle_f32x4(a[c], a[4 + c], 0x88), odd = _mm512_shuffle_f32x4(a[c], a[4 + c], 0xdd);
    const __m512 even_after = _mm512_shuffle_f32x4(a[8 + c], a[12 + c], 0x88);
    const __m512 odd_after = _mm512_shuffle_f32x4(a[8 + c], a[12 + c], 0xdd);
    b[c] = _mm512_shuffle_f32x4(even, even_after, 0x88);
    b[8 + c] = _mm512_shuffle_f32x4(even, even_after, 0xdd);
    b[4 + c] = _mm512_shuffle_f32x4(odd, odd_after, 0x88);
    b[12 + c] = _mm512_shuffle_f32x4(odd, odd_after, 0xdd);
  }
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i)
    if (i < cols) _mm512_mask_storeu_ps(to + i * to_stride, written, b[i]);
}
#elif defined(__AVX2__)
inline void transpose_floats(const float* from, int64_t from_stride, float* to, int64_t to_stride) {
  __m256 a[8], b[8];
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) a[i] = _mm256_loadu_ps(from + i * from_stride);
#pragma GCC unroll 4
  for (int i = 0; i < 8; i += 2) {
    b[i] = _mm256_unpacklo_ps(a[i], a[i + 1]);
    b[i + 1] = _mm256_unpackhi_ps(a[i], a[i + 1]);
  }
  // a[4 g + c] becomes the columns c and c + 4 of the rows 4 g ... 4 g + 3.
#pragma GCC unroll 2
  for (int i = 0; i < 8; i += 4)
#pragma GCC unroll 2
    for (int j = 0; j < 2; ++j) {
      a[i + 2 * j] = _mm256_shuffle_ps(b[i + j], b[i + j + 2], 0x44);
      a[i + 2 * j + 1] = _mm256_shuffle_ps(b[i + j], b[i + j + 2], 0xee);
    }
#pragma GCC unroll 4
  for (int c = 0; c < 4; ++c) {
    _mm256_storeu_ps(to + c * to_stride, _mm256_permute2f128_ps(a[c], a[4 + c], 0x20));
    _mm256_storeu_ps(to + (4 + c) * to_stride, _mm256_permute2f128_ps(a[c], a[4 + c], 0x31));
  }
}
#endif

// to (cols, rows) = from (rows, cols), transposed; at most kSquare of each, and rows from_stride and to_stride apart.
template <typename T>
inline void transpose(const T* from, int64_t from_stride, int64_t rows, int64_t cols, T* to, int64_t to_stride) {
#if defined(__AVX512F__)
  if constexpr (std::is_same_v<T, float>) {
    if (rows == 16 && cols == 16)
      transpose_floats(from, from_stride, 16, 16, to, to_stride);
    else
      transpose_floats(from, from_stride, rows, cols, to, to_stride);
    return;
  }
#elif defined(__AVX2__)
  if constexpr (std::is_same_v<T, float>)
    if (rows == 8 && cols == 8) return transpose_floats(from, from_stride, to, to_stride);
#endif
  constexpr int64_t S = kSquare<T>;
  if (rows == S && cols == S) {
    for (int64_t j = 0; j < S; ++j)
      for (int64_t i = 0; i < S; ++i) to[j * to_stride + i] = from[i * from_stride + j];
    return;
  }
  for (int64_t i = 0; i < rows; ++i)
    for (int64_t j = 0; j < cols; ++j) to[j * to_stride + i] = from[i * from_stride + j];
}

}  // namespace structattn
