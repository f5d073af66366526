// What products read: numbers as they are computed or, of bfloat16 where the processor multiplies these, pairs of them
// with sums in float.
#pragma once

#include "vector.h"

namespace structattn {

// Two neighbours in the dimension that a product sums over: the first in the lower bits.
struct Pair {
  uint32_t bits = 0;
};

#if defined(__AVX512BF16__)
constexpr bool kHasPairs = true;

template <>
struct Vec<Pair> {
  __m512i raw;
  Vec() = default;
  explicit Vec(Pair x) : raw(_mm512_set1_epi32(static_cast<int>(x.bits))) {}
  static constexpr int64_t size() { return kVectorBytes / sizeof(Pair); }
  static Vec loadu(const Pair* x) {
    Vec out;
    out.raw = _mm512_loadu_si512(x);
    return out;
  }
  static Vec loadu(const Pair* x, int64_t count) {
    Vec out;
    out.raw = _mm512_maskz_loadu_epi32((1u << count) - 1, x);
    return out;
  }
  void store(Pair* x) const { _mm512_storeu_si512(x, raw); }
};

// c + the products of both numbers.
inline Vec<float> fmadd(Vec<Pair> a, Vec<Pair> b, Vec<float> c) {
  return Vec<float>::Raw(_mm512_dpbf16_ps(c.raw, reinterpret_cast<__m512bh>(a.raw), reinterpret_cast<__m512bh>(b.raw)));
}
#else
constexpr bool kHasPairs = false;
#endif

// What a number of a tensor is in products. 16 bits without instructions for them become float, tile by tile.
template <typename I>
using Operand = std::conditional_t<std::is_same_v<I, BFloat16> && kHasPairs, Pair, Sum<I>>;
template <typename P>
constexpr bool kIsPair = std::is_same_v<P, Pair>;
template <typename P>
constexpr int64_t kDepth = kIsPair<P> ? 2 : 1;  // numbers of an operand
// What is kept of a tensor in another order: its numbers, or pairs of them.
template <typename I>
using PackedAs = std::conditional_t<kIsPair<Operand<I>>, Pair, I>;

// As many numbers as a vector has, rounded to the nearest.
inline void store_numbers(Vec<float> x, float* to) { x.store(to); }
inline void store_numbers(Vec<double> x, double* to) { x.store(to); }
inline void store_numbers(Vec<float> x, Half* to) {
#if defined(__AVX512F__)
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm512_cvtps_ph(x.raw, _MM_FROUND_TO_NEAREST_INT));
#elif defined(__AVX2__)
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm256_cvtps_ph(x.raw, _MM_FROUND_TO_NEAREST_INT));
#else
  for (int64_t n = 0; n < Vec<float>::size(); ++n) to[n] = x.raw[n];
#endif
}
inline void store_numbers(Vec<float> x, BFloat16* to) {  // bit for bit as BFloat16(float), which compilers leave scalar
#if defined(__AVX512F__)
  const __m512i bits = _mm512_castps_si512(x.raw), one = _mm512_set1_epi32(1);
  const __m512i half = _mm512_add_epi32(_mm512_set1_epi32(0x7fff), _mm512_and_si512(_mm512_srli_epi32(bits, 16), one));
  const __m512i upper = _mm512_srli_epi32(_mm512_add_epi32(bits, half), 16);
  const __mmask16 is_none = _mm512_cmp_ps_mask(x.raw, x.raw, _CMP_UNORD_Q);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to),
                      _mm512_cvtepi32_epi16(_mm512_mask_set1_epi32(upper, is_none, 0x7fc0)));
#elif defined(__AVX2__)
  const __m256i bits = _mm256_castps_si256(x.raw), one = _mm256_set1_epi32(1);
  const __m256i half = _mm256_add_epi32(_mm256_set1_epi32(0x7fff), _mm256_and_si256(_mm256_srli_epi32(bits, 16), one));
  const __m256i upper = _mm256_srli_epi32(_mm256_add_epi32(bits, half), 16);
  const __m256i is_none = _mm256_castps_si256(_mm256_cmp_ps(x.raw, x.raw, _CMP_UNORD_Q));
  const __m256i found = _mm256_blendv_epi8(upper, _mm256_set1_epi32(0x7fc0), is_none);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to),
                   _mm_packus_epi32(_mm256_castsi256_si128(found), _mm256_extracti128_si256(found, 1)));
#else
  for (int64_t n = 0; n < Vec<float>::size(); ++n) to[n] = x.raw[n];
#endif
}

// out = x, times a factor of each number where these are given, from and to numbers of any kind.
template <typename T, typename I, typename O>
inline void converted(const I* x, const T* factors, int64_t size, O* out) {
  constexpr int64_t W = Vec<T>::size();
  int64_t n = 0;
  for (; n + W <= size; n += W) {
    const Vec<T> numbers = load_numbers(x + n);
    store_numbers(factors == nullptr ? numbers : numbers * Vec<T>::loadu(factors + n), out + n);
  }
  for (; n < size; ++n) {
    const T number = static_cast<T>(x[n]);
    out[n] = O(factors == nullptr ? number : number * factors[n]);
  }
}

// The sum of the products of `size` numbers.
template <typename T, typename I>
inline T sum_of_products(const I* x, const I* y, int64_t size) {
  constexpr int64_t W = Vec<T>::size();
  Vec<T> sum(T(0));
  int64_t n = 0;
  for (; n + W <= size; n += W) sum = fmadd(load_numbers(x + n), load_numbers(y + n), sum);
  T out = sum_of(sum);
  for (; n < size; ++n) out += static_cast<T>(x[n]) * static_cast<T>(y[n]);
  return out;
}

// Pairs of neighbouring rows: out (rows / 2, size) of x (rows, size), its rows `stride` apart; 0 beyond the last row.
inline void stack(const BFloat16* x, int64_t stride, int64_t rows, int64_t size, Pair* out) {
  for (int64_t i = 0; i < rows; i += 2, out += size) {
    const BFloat16 *even = x + i * stride, *odd = even + stride;
    if (i + 1 < rows)
      for (int64_t n = 0; n < size; ++n)
        out[n].bits = static_cast<uint32_t>(even[n].bits) | static_cast<uint32_t>(odd[n].bits) << 16;
    else
      for (int64_t n = 0; n < size; ++n) out[n].bits = even[n].bits;
  }
}

}  // namespace structattn
