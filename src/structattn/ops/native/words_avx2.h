// Products of codes of 4 bits with float32 numbers, by AVX2. Of 32 bytes, read as 8 words of 8 codes, a code becomes a
// number where it is in its word: the numbers that it is multiplied with are smaller by as much as that makes it
// larger.
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace structattn {

constexpr int64_t kWordBytes = 32;
constexpr int kCodesOfWord = 8;

// What code s of a word is multiplied by, where it is.
constexpr float times_of(int s) { return static_cast<float>(1 << (4 * (s % 4))); }

// Where code s of word w is, of the codes in the low halves of bytes, or, for odd s, of those in the high halves.
constexpr int64_t place_of(int s, int64_t w) { return 4 * w + s / 2; }

// Code s of 8 words, as numbers, `times_of(s)` too large.
template <int s>
inline __m256 code_of(__m256i words) {
  if constexpr (s >= 4) words = _mm256_srli_epi32(words, 16);
  return _mm256_cvtepi32_ps(_mm256_and_si256(words, _mm256_set1_epi32(15 << (4 * (s % 4)))));
}

// f.operator()<s>() for s from kFirst to kEnd - 1.
template <int kFirst, int kEnd, typename F>
inline void for_codes(const F& f) {
  if constexpr (kFirst < kEnd) {
    f.template operator()<kFirst>();
    for_codes<kFirst + 1, kEnd>(f);
  }
}

// Adds factor[m][d] code[d, c], summed over d, to the positions c of M sums that 32 bytes of each dimension hold: from
// `low` on those in the low halves, from `high` on those in the high ones. Of the codes of a word from kFirst on, as
// many as there are registers for the sums.
template <int M, int kFirst = 0>
inline void add_word_sums(const float* factor, int64_t factor_row, const uint8_t* codes, int64_t stride, int64_t dims,
                          float* low, float* high, int64_t row) {
  constexpr int kCount = M == 1 ? 8 : M == 2 ? 4 : 2, kEnd = kFirst + kCount;
  __m256 sum[M][kCount];
#pragma GCC unroll 4
  for (int m = 0; m < M; ++m)
#pragma GCC unroll 8
    for (int n = 0; n < kCount; ++n) sum[m][n] = _mm256_setzero_ps();
  for (int64_t d = 0; d < dims; ++d) {
    const __m256i words = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes + d * stride));
    for_codes<kFirst, kEnd>([&]<int s>() {
      const __m256 code = code_of<s>(words);
#pragma GCC unroll 4
      for (int m = 0; m < M; ++m)
        sum[m][s - kFirst] = _mm256_fmadd_ps(_mm256_set1_ps(factor[m * factor_row + d]), code, sum[m][s - kFirst]);
    });
  }
  for (int m = 0; m < M; ++m)
    for_codes<kFirst, kEnd>([&]<int s>() {
      float own[8], *const to = (s % 2 ? high : low) + m * row;
      _mm256_storeu_ps(own, _mm256_mul_ps(sum[m][s - kFirst], _mm256_set1_ps(1 / times_of(s))));
      for (int w = 0; w < 8; ++w) to[place_of(s, w)] += own[w];
    });
  if constexpr (kEnd < kCodesOfWord) add_word_sums<M, kEnd>(factor, factor_row, codes, stride, dims, low, high, row);
}

// Adds to lanes[m][d], 8 numbers, sums over the positions n of a group of factor[m][n] (code[d, n] - 8), which are to
// be added up.
template <int M>
inline void add_word_values(const float* factor, int64_t row, const uint8_t* codes, int64_t dims, int64_t group_size,
                            float* lanes, int64_t lanes_row) {
  const int64_t half = group_size / 2;
  for (int64_t c = 0; c < half; c += kWordBytes) {
    alignas(32) float times[M][kCodesOfWord][8];
    __m256 start[M];
    for (int m = 0; m < M; ++m) {
      start[m] = _mm256_setzero_ps();
      for_codes<0, kCodesOfWord>([&]<int s>() {
        const float* const from = factor + m * row + (s % 2 ? half : 0) + c;
        float own[8];
        for (int w = 0; w < 8; ++w) own[w] = from[place_of(s, w)];
        const __m256 all = _mm256_loadu_ps(own);
        start[m] = _mm256_fmadd_ps(all, _mm256_set1_ps(-8), start[m]);
        _mm256_store_ps(times[m][s], _mm256_mul_ps(all, _mm256_set1_ps(1 / times_of(s))));
      });
    }
    for (int64_t d = 0; d < dims; ++d) {
      const __m256i words = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes + d * half + c));
      __m256 sum[M], other[M];  // which do not wait for each other
#pragma GCC unroll 4
      for (int m = 0; m < M; ++m) sum[m] = start[m], other[m] = _mm256_loadu_ps(lanes + m * lanes_row + d * 8);
      for_codes<0, kCodesOfWord>([&]<int s>() {
        const __m256 code = code_of<s>(words);
#pragma GCC unroll 4
        for (int m = 0; m < M; ++m) {
          __m256& to = s < 4 ? sum[m] : other[m];
          to = _mm256_fmadd_ps(_mm256_load_ps(times[m][s]), code, to);
        }
      });
#pragma GCC unroll 4
      for (int m = 0; m < M; ++m) _mm256_storeu_ps(lanes + m * lanes_row + d * 8, _mm256_add_ps(sum[m], other[m]));
    }
  }
}

}  // namespace structattn
