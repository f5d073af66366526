// Products of codes by AVX2, with numbers of two bytes: codes of 8 bits are multiplied as 16-bit numbers, codes of 4
// bits with each of the bytes, whose sums over 16 codes are below 2^15. With three bytes nothing would be saved.
#pragma once

#include "integers.h"

#include <immintrin.h>

#include <algorithm>
#include <cfloat>

namespace structattn {

// Whether groups of codes can be read by these functions.
inline bool has_integers(int64_t group_size, int64_t dims, bool is_wide) {
  return !is_wide && group_size % 64 == 0 && dims % 8 == 0 && dims <= kMostDims;
}

inline __m256i load_bytes(const void* x) { return _mm256_loadu_si256(static_cast<const __m256i*>(x)); }

// The bits of the largest of some numbers in `count` rows, without their signs: those of one that is not finite are the
// largest.
inline int32_t largest_bits(const float* x, int64_t row, int64_t count, int64_t size) {
  __m256i most = _mm256_setzero_si256();
  for (int64_t r = 0; r < count; ++r)
    for (int64_t n = 0; n < size; n += 8)
      most = _mm256_max_epi32(most, _mm256_and_si256(load_bytes(x + r * row + n), _mm256_set1_epi32(0x7fffffff)));
  __m128i x4 = _mm_max_epi32(_mm256_castsi256_si128(most), _mm256_extracti128_si256(most, 1));
  x4 = _mm_max_epi32(x4, _mm_shuffle_epi32(x4, 0x4e));
  return _mm_cvtsi128_si32(_mm_max_epi32(x4, _mm_shuffle_epi32(x4, 0xb1)));
}

inline __m256i whole_numbers(const float* x, float inverse) {
  return _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(x), _mm256_set1_ps(inverse)));
}

// Numbers as two signed bytes, of which the first counts 1 and the second 2^8.
inline __m256i as_bytes(const float* x, float inverse) {
  const __m256i flip = _mm256_set1_epi32(0x8080);
  return _mm256_xor_si256(_mm256_add_epi32(whole_numbers(x, inverse), flip), flip);
}

// sum + the products of codes and numbers of 16 bits, two side by side added up.
inline __m256i add_pairs(__m256i sum, __m256i codes, __m256i numbers) {
  return _mm256_add_epi32(sum, _mm256_madd_epi16(codes, numbers));
}

// The same of codes and bytes, as numbers of 16 bits.
inline __m256i add_byte_pairs(__m256i sum, __m256i codes, __m256i bytes) {
  return _mm256_add_epi16(sum, _mm256_maddubs_epi16(codes, bytes));
}

// The same number, in a register: GCC delays sums otherwise until their terms no longer fit into registers.
inline __m256i in_register(__m256i x) {
  asm("" : "+x"(x));
  return x;
}

// Codes of 4 bits in the low halves of bytes, and in the high ones.
inline __m256i low_halves(__m256i x) { return _mm256_and_si256(x, _mm256_set1_epi8(15)); }
inline __m256i high_halves(__m256i x) { return low_halves(_mm256_srli_epi16(x, 4)); }

// Pairs of a query's numbers, of 16 bits each: every pair is twice there, as a number of 64 bits.
inline void by_pairs(const float* x, int64_t dims, float inverse, Line* out) {
  const __m128i order = _mm_setr_epi8(0, 1, 4, 5, 0, 1, 4, 5, 8, 9, 12, 13, 8, 9, 12, 13);
  auto* const to = reinterpret_cast<__m256i*>(out);
  for (int64_t d = 0; d < dims; d += 8)
    _mm256_store_si256(to + d / 8,
                       _mm256_shuffle_epi8(whole_numbers(x + d, inverse), _mm256_broadcastsi128_si256(order)));
}

// out = unit times sums for 32 positions: those of bytes 0, 2, ..., 14 of each half of the vectors they were in, those
// of the bytes between them, and the same of bytes 16 to 31.
inline void store_positions(const __m256i (&sums)[4], float unit, float* out) {
  const __m256 times = _mm256_set1_ps(unit);
  const auto store = [&](__m256i x, float* to) { _mm256_storeu_ps(to, _mm256_mul_ps(_mm256_cvtepi32_ps(x), times)); };
  for (int n = 0; n < 4; n += 2, out += 8) {
    const __m256i first = _mm256_unpacklo_epi32(sums[n], sums[n + 1]);
    const __m256i second = _mm256_unpackhi_epi32(sums[n], sums[n + 1]);
    store(_mm256_permute2x128_si256(first, second, 0x20), out);
    store(_mm256_permute2x128_si256(first, second, 0x31), out + 16);
  }
}

// Sums over dimensions of codes, for 32 bytes of each dimension and M queries `lines` apart. Of 4 bits, `other` is
// where those go of the codes in high halves: a whole byte is its low half and 16 times the high one, and so are the
// sums. 256 x 255 x 32512 is below 2^31.
template <int M, bool kIsByte>
void store_sums(const uint8_t* codes, int64_t stride, const Line* pairs, int64_t lines, int64_t dims, const float* unit,
                float* out, float* other, int64_t out_row) {
  __m256i whole[M][4], low[M][4];
#pragma GCC unroll 2
  for (int m = 0; m < M; ++m)
#pragma GCC unroll 4
    for (int n = 0; n < 4; ++n) whole[m][n] = low[m][n] = _mm256_setzero_si256();
  for (int64_t d = 0; d < dims; d += 2, codes += 2 * stride) {
    if constexpr (!kIsByte) ask_for(codes);
    const __m256i x = load_bytes(codes), y = load_bytes(codes + stride);
    const __m256i first = _mm256_unpacklo_epi16(x, y), second = _mm256_unpackhi_epi16(x, y);
    const __m256i mask = _mm256_set1_epi16(255), half = _mm256_set1_epi16(15);
    const __m256i bytes[4] = {_mm256_and_si256(first, mask), _mm256_srli_epi16(first, 8),
                              _mm256_and_si256(second, mask), _mm256_srli_epi16(second, 8)};
#pragma GCC unroll 2
    for (int m = 0; m < M; ++m) {
      const __m256i pair = _mm256_set1_epi32(reinterpret_cast<const int32_t*>(pairs + m * lines)[d]);
#pragma GCC unroll 4
      for (int n = 0; n < 4; ++n) {
        whole[m][n] = in_register(add_pairs(whole[m][n], bytes[n], pair));
        if constexpr (!kIsByte) low[m][n] = in_register(add_pairs(low[m][n], _mm256_and_si256(bytes[n], half), pair));
      }
    }
  }
#pragma GCC unroll 2
  for (int m = 0; m < M; ++m) {
    store_positions(kIsByte ? whole[m] : low[m], unit[m], out + m * out_row);
    if constexpr (!kIsByte) {
#pragma GCC unroll 4
      for (int n = 0; n < 4; ++n) whole[m][n] = _mm256_sub_epi32(whole[m][n], low[m][n]);
      store_positions(whole[m], unit[m] / 16, other + m * out_row);
    }
  }
}

// sums[g][m][n] = sum over d of factor[g][m][d] code[g][d, n] for the positions n of G groups; false, and nothing done,
// where the numbers `factor` have no unit.
template <int M, int G, bool kIsByte, int kPieces>
bool key_sums(const float* factor, int64_t row, const uint8_t* const* codes, int64_t dims, int64_t group_size,
              IntegerRoom& room, float* sums) {
  const int64_t stride = kIsByte ? group_size : group_size / 2, lines = (dims + 15) / 16;
  constexpr float kMost = kMostScore<kPieces> / (kIsByte ? 255 : 15);
  float unit[G][M], inverse[G][M];  // of each group: a large number in one costs the others nothing
  for (int g = 0; g < G; ++g)
    for (int m = 0; m < M; ++m)
      if (!unit_of(largest_bits(factor + (g * M + m) * row, 0, 1, dims), kMostSteps<kPieces>, kMost, unit[g][m],
                   inverse[g][m]))
        return false;
  for (int g = 0; g < G; ++g) {
    Line* const pairs = room.bytes.data();
    for (int m = 0; m < M; ++m) by_pairs(factor + (g * M + m) * row, dims, inverse[g][m], pairs + m * lines);
    for (int64_t c = 0; c < stride; c += 32) {
      float* const out = sums + g * M * row + c;
      constexpr int kTogether = kIsByte && M > 1 ? 2 : 1;  // as many as have enough registers
      const auto store = [&]<int kCount>(int m) {
        store_sums<kCount, kIsByte>(codes[g] + c, stride, pairs + m * lines, lines, dims, unit[g] + m, out + m * row,
                                    out + m * row + stride, row);
      };
      int m = 0;
      for (; m + kTogether <= M; m += kTogether) store.template operator()<kTogether>(m);
      for (; m < M; ++m) store.template operator()<1>(m);
    }
  }
  return true;
}

// Groups of values whose sums are added up as whole numbers, for M queries.
template <int M, bool kIsByte, int kPieces>
constexpr int kGroupsAtOnce = std::max(1, 4 / M);

// 64 numbers as 16-bit numbers in vectors of 16, or as bytes: the first and the second bytes of the first 32, which are
// multiplied with codes in low halves, then those of the others. The latter begin at `other`.
template <bool kIsByte>
inline void as_weights(const float* x, const float* other, float inverse, __m256i* out) {
  if constexpr (kIsByte) {
    for (int n = 0; n < 4; ++n) {
      const float* const from = n < 2 ? x + 16 * n : other + 16 * (n - 2);
      const __m256i both = _mm256_packs_epi32(whole_numbers(from, inverse), whole_numbers(from + 8, inverse));
      out[n] = _mm256_permute4x64_epi64(both, 0xd8);
    }
  } else {
    const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    for (int h = 0; h < 2; ++h, out += 2) {
      const float* const from = h ? other : x;
      __m256i part[4];
      for (int n = 0; n < 4; ++n) part[n] = as_bytes(from + 8 * n, inverse);
      for (int p = 0; p < 2; ++p) {
        __m256i byte[4];
        for (int n = 0; n < 4; ++n)
          byte[n] = _mm256_and_si256(p ? _mm256_srli_epi32(part[n], 8) : part[n], _mm256_set1_epi32(255));
        const __m256i packed =
            _mm256_packus_epi16(_mm256_packus_epi32(byte[0], byte[1]), _mm256_packus_epi32(byte[2], byte[3]));
        out[p] = _mm256_permutevar8x32_epi32(packed, order);
      }
    }
  }
}

// Sums of products of weights and of the codes of rows, of one query: of 8 bits `parts[0]` are numbers of 32 bits, of
// 4 bits they are numbers of 16 bits for each byte of the weights.
template <bool kIsByte>
struct RowSum {
  __m256i parts[kIsByte ? 1 : 2];

  RowSum() { std::fill(parts, std::end(parts), _mm256_setzero_si256()); }

  // What `add` multiplies, of 64 codes of a row.
  static void read(const uint8_t* from, __m256i* codes) {
    if constexpr (kIsByte) {
#pragma GCC unroll 4
      for (int n = 0; n < 4; ++n)
        codes[n] = _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from + 16 * n)));
    } else {
      const __m256i x = load_bytes(from);
      codes[0] = low_halves(x), codes[1] = high_halves(x);
    }
  }

  void add(const __m256i* codes, const __m256i* weights) {
    constexpr int kParts = kIsByte ? 1 : 2;
#pragma GCC unroll 2
    for (int p = 0; p < kParts; ++p)
#pragma GCC unroll 4
      for (int n = 0; n < 4 / kParts; ++n) {
        const __m256i weight = weights[kParts * n + p];
        parts[p] =
            in_register(kIsByte ? add_pairs(parts[p], codes[n], weight) : add_byte_pairs(parts[p], codes[n], weight));
      }
  }

  __m256i total() const {
    if constexpr (kIsByte)
      return parts[0];
    else
      return add_pairs(_mm256_madd_epi16(parts[0], _mm256_set1_epi16(1)), parts[1], _mm256_set1_epi16(256));
  }
};

// Adds to lanes[m][d], 8 numbers, sums over the positions n of G groups of factor[g][m][n] (code[g][d, n] - middle),
// which are to be added up; false, and nothing done, where the numbers `factor` have no unit.
template <int M, int G, bool kIsByte, int kPieces>
bool add_value_sums(const float* factor, int64_t row, const uint8_t* const* codes, int64_t dims, int64_t group_size,
                    float* lanes, int64_t lanes_row) {
  const int64_t stride = kIsByte ? group_size : group_size / 2;
  float unit[M], inverse[M];
  for (int m = 0; m < M; ++m)
    if (!unit_of(largest_bits(factor + m * row, M * row, G, group_size), kMostSteps<kPieces>, FLT_MAX, unit[m],
                 inverse[m]))
      return false;
  constexpr int kVectors = kIsByte ? 4 : 2;  // of codes
  __m256i middle[kVectors];
  std::fill(middle, middle + kVectors, kIsByte ? _mm256_set1_epi16(128) : _mm256_set1_epi8(8));
  for (int64_t c = 0; c < stride; c += kIsByte ? 64 : 32) {
    __m256i weights[G][M][4], start[M];
    for (int m = 0; m < M; ++m) {
      RowSum<kIsByte> of_middle;
      for (int g = 0; g < G; ++g) {
        const float* const x = factor + (g * M + m) * row + c;
        as_weights<kIsByte>(x, kIsByte ? x + 32 : x + stride, inverse[m], weights[g][m]);
        of_middle.add(middle, weights[g][m]);
      }
      start[m] = of_middle.total();
    }
    constexpr int kRows = M > 2 ? 1 : 2;  // with which weights are multiplied that are loaded once
    for (int64_t d = 0; d < dims; d += kRows) {
      RowSum<kIsByte> sum[kRows][M];
#pragma GCC unroll 4
      for (int g = 0; g < G; ++g) {
        __m256i of_row[kRows][kVectors];
        const uint8_t* const at = codes[g] + d * stride + c;
        if constexpr (G > 1 || !kIsByte) ask_for(at);
#pragma GCC unroll 2
        for (int r = 0; r < kRows; ++r) RowSum<kIsByte>::read(at + r * stride, of_row[r]);
#pragma GCC unroll 4
        for (int m = 0; m < M; ++m)
#pragma GCC unroll 2
          for (int r = 0; r < kRows; ++r) sum[r][m].add(of_row[r], weights[g][m]);
      }
#pragma GCC unroll 4
      for (int m = 0; m < M; ++m)
#pragma GCC unroll 2
        for (int r = 0; r < kRows; ++r) {
          const __m256 numbers = _mm256_cvtepi32_ps(_mm256_sub_epi32(sum[r][m].total(), start[m]));
          float* const to = lanes + m * lanes_row + (d + r) * 8;
          _mm256_storeu_ps(to, _mm256_fmadd_ps(numbers, _mm256_set1_ps(unit[m]), _mm256_loadu_ps(to)));
        }
    }
  }
  return true;
}

}  // namespace structattn
