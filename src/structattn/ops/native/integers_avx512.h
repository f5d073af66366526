// Products of codes by AVX512-VNNI, which adds up products of four bytes side by side.
#pragma once

#include "integers.h"

#include <immintrin.h>

#include <algorithm>
#include <cfloat>

namespace structattn {

// The functions below need it as well; others are compiled for processors without it.
#define STRUCTATTN_INTEGERS __attribute__((target("avx512vnni")))

// Whether groups of codes can be read by these functions.
inline bool has_integers(int64_t group_size, int64_t dims, bool /*is_wide*/) {
  static const bool is_here = __builtin_cpu_supports("avx512vnni");
  return is_here && group_size % 64 == 0 && dims % 8 == 0 && dims <= kMostDims;
}

// sum += products of four codes and bytes side by side, in place: written with the intrinsic, GCC copies the sums.
STRUCTATTN_INTEGERS inline void add_products(__m512i& sum, __m512i codes, __m512i bytes) {
  asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(codes), "v"(bytes));
}

inline __mmask16 first_lanes(int64_t count) { return count >= 16 ? 0xffff : (1 << count) - 1; }

// The larger of numbers without their signs, as bits: those of one that is not finite are the largest.
inline __m512i larger(__m512i most, __m512 x) {
  return _mm512_max_epi32(most, _mm512_and_si512(_mm512_castps_si512(x), _mm512_set1_epi32(0x7fffffff)));
}

// Numbers as signed bytes, of which the first counts 1, the second 2^8, and the third, where it is used, 2^16.
inline __m512i as_bytes(__m512 x, float inverse) {
  const __m512i flip = _mm512_set1_epi32(0x808080);
  const __m512i whole = _mm512_cvtps_epi32(_mm512_mul_ps(x, _mm512_set1_ps(inverse)));
  return _mm512_xor_si512(_mm512_add_epi32(whole, flip), flip);
}

// Of four numbers side by side, as bytes, the first bytes, then the second ones, ...
inline __m512i by_byte(__m512i bytes) {
  const __m128i order = _mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  return _mm512_shuffle_epi8(bytes, _mm512_broadcast_i32x4(order));
}

// The bytes that count 2^(8 p) of 32 numbers that `by_byte` made, twice.
inline __m512i bytes_of(__m512i x, __m512i y, int p) {
  const __m512i first = _mm512_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28, 0, 4, 8, 12, 16, 20, 24, 28);
  return _mm512_permutex2var_epi32(x, _mm512_add_epi32(first, _mm512_set1_epi32(p)), y);
}

// 32 bytes of a row, and of the next, which is `stride` away.
inline __m512i two_rows(const uint8_t* x, int64_t stride) {
  if (stride == 32) return _mm512_loadu_si512(x);
  const __m256i low = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x));
  return _mm512_inserti64x4(_mm512_castsi256_si512(low),
                            _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x + stride)), 1);
}

// The bytes of four rows side by side: of each lane of 16 the first four of each row, the next four, ...
inline void interleave(const __m512i* row, __m512i* out) {
  const __m512i a = _mm512_unpacklo_epi8(row[0], row[1]), b = _mm512_unpackhi_epi8(row[0], row[1]);
  const __m512i c = _mm512_unpacklo_epi8(row[2], row[3]), d = _mm512_unpackhi_epi8(row[2], row[3]);
  out[0] = _mm512_unpacklo_epi16(a, c), out[1] = _mm512_unpackhi_epi16(a, c);
  out[2] = _mm512_unpacklo_epi16(b, d), out[3] = _mm512_unpackhi_epi16(b, d);
}

// Keys, 64 positions of some dimensions, four of a position side by side in vectors of 64 bytes. Of 8 bits a vector has
// 16 positions of 4 dimensions, d ... d + 3. Of 4 bits it has two times 8 positions of 8 dimensions: d, d + 2, d + 4
// and d + 6 in its low half, the others in the high half.
template <bool kIsByte>
constexpr int64_t kRowsAtOnce = kIsByte ? 4 : 8;

template <bool kIsByte>
inline void four_vectors(const uint8_t* codes, int64_t stride, __m512i* out) {
  __m512i row[4];
  if constexpr (!kIsByte)
    for (int n = 0; n < 4; ++n) ask_for(codes + 2 * n * stride);
  for (int n = 0; n < 4; ++n)
    row[n] = kIsByte ? _mm512_loadu_si512(codes + n * stride) : two_rows(codes + 2 * n * stride, stride);
  interleave(row, out);
}

template <bool kIsByte>
inline void by_position(const uint8_t* codes, int64_t stride, int64_t dims, Line* out) {
  for (int64_t d = 0; d < dims; d += kRowsAtOnce<kIsByte>, codes += kRowsAtOnce<kIsByte> * stride, out += 4) {
    __m512i x[4];
    four_vectors<kIsByte>(codes, stride, x);
    for (int n = 0; n < 4; ++n) _mm512_store_si512(out + n, x[n]);
  }
}

// Numbers of a query as bytes, in the order of `by_position`: of four of them the first bytes, the second ones, ...
template <bool kIsByte>
inline void by_piece(const float* x, int64_t dims, float inverse, Line* out) {
  const __m512i order = _mm512_setr_epi32(0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15);
  for (int64_t d = 0; d < dims; d += 16, ++out) {
    __m512i bytes = as_bytes(_mm512_maskz_loadu_ps(first_lanes(dims - d), x + d), inverse);
    if constexpr (!kIsByte) bytes = _mm512_permutexvar_epi32(order, bytes);
    _mm512_store_si512(out, by_byte(bytes));
  }
}

// What the codes of a vector of `by_position` are multiplied with, of one piece.
template <bool kIsByte>
inline __m512i piece_of(const int32_t* fours) {
  const __m512i first = _mm512_set1_epi32(fours[0]);
  return kIsByte ? first : _mm512_mask_blend_epi32(0xff00, first, _mm512_set1_epi32(fours[4]));
}

// Sums of the lanes of four vectors whose halves are to be added, in the order of their positions.
inline void fold(const __m512i (&x)[4], __m512i& first, __m512i& second) {
  const __m512i a = _mm512_add_epi32(_mm512_shuffle_i32x4(x[0], x[1], 0x44), _mm512_shuffle_i32x4(x[0], x[1], 0xee));
  const __m512i b = _mm512_add_epi32(_mm512_shuffle_i32x4(x[2], x[3], 0x44), _mm512_shuffle_i32x4(x[2], x[3], 0xee));
  first = _mm512_shuffle_i32x4(a, b, 0x88), second = _mm512_shuffle_i32x4(a, b, 0xdd);
}

// The lanes of four vectors, in the order of their positions.
inline void transpose(const __m512i (&x)[4], __m512i (&out)[4]) {
  const __m512i a = _mm512_shuffle_i32x4(x[0], x[1], 0x44), b = _mm512_shuffle_i32x4(x[2], x[3], 0x44);
  const __m512i c = _mm512_shuffle_i32x4(x[0], x[1], 0xee), d = _mm512_shuffle_i32x4(x[2], x[3], 0xee);
  out[0] = _mm512_shuffle_i32x4(a, b, 0x88), out[1] = _mm512_shuffle_i32x4(a, b, 0xdd);
  out[2] = _mm512_shuffle_i32x4(c, d, 0x88), out[3] = _mm512_shuffle_i32x4(c, d, 0xdd);
}

// sums[0] = the sums of pieces, as numbers: exact with two pieces, since 256 x 255 x 32512 is below 2^31. With three,
// the first has to be added as a float: sums[1] gets what the other two count.
template <int kPieces>
inline void join_pieces(__m512i (&sums)[kPieces][4]) {
#pragma GCC unroll 4
  for (int n = 0; n < 4; ++n) {
    const __m512i upper = _mm512_slli_epi32(sums[kPieces - 1][n], 8);
    __m512i& to = sums[kPieces - 2][n];
    to = _mm512_add_epi32(upper, to);
  }
}

// out = unit times joined sums: for 64 positions, or for 32 of those in one half of each byte of 4 bits.
template <bool kIsByte, int kPieces>
inline void store_joined(const __m512i (&sums)[kPieces][4], float unit, float* out) {
  constexpr int kVectors = kIsByte ? 4 : 2, kJoined = kPieces - 1;
  __m512i of_piece[kJoined][4];
#pragma GCC unroll 4
  for (int p = 0; p < kJoined; ++p)
    if constexpr (kIsByte)
      transpose(sums[p], of_piece[p]);
    else
      fold(sums[p], of_piece[p][0], of_piece[p][1]);
#pragma GCC unroll 4
  for (int n = 0; n < kVectors; ++n) {
    __m512 all = _mm512_cvtepi32_ps(of_piece[0][n]);
    if constexpr (kJoined == 2) all = _mm512_fmadd_ps(_mm512_cvtepi32_ps(of_piece[1][n]), _mm512_set1_ps(256), all);
    _mm512_storeu_ps(out + 16 * n, _mm512_mul_ps(_mm512_set1_ps(unit), all));
  }
}

template <int kPieces>
inline void clear(__m512i (&sums)[kPieces][4]) {
#pragma GCC unroll 4
  for (int p = 0; p < kPieces; ++p)
#pragma GCC unroll 4
    for (int n = 0; n < 4; ++n) sums[p][n] = _mm512_setzero_si512();
}

// The sums of one query, for 64 positions whose codes are those of `by_position`, or, with kIsStored, as they are
// stored. `other` is where those go of the high halves of bytes of 4 bits.
template <bool kIsByte, int kPieces, bool kIsStored>
STRUCTATTN_INTEGERS inline void store_sums(const uint8_t* codes, int64_t stride, const Line* query, int64_t dims,
                                           float unit, float* out, float* other) {
  const auto* fours = reinterpret_cast<const int32_t*>(query);  // four numbers of each piece
  __m512i all[kPieces][4], high[kPieces][4];  // of whole bytes, and of their high halves: 16 times the code
  clear(all), clear(high);
  const __m512i upper = _mm512_set1_epi8(-16);
  for (int64_t d = 0; d < dims; d += kRowsAtOnce<kIsByte>, fours += kRowsAtOnce<kIsByte>) {
    __m512i x[4];
    if constexpr (kIsStored) {
      four_vectors<kIsByte>(codes + d * stride, stride, x);
    } else {
      for (int n = 0; n < 4; ++n) x[n] = _mm512_load_si512(codes + n * sizeof(Line));
      codes += 4 * sizeof(Line);
    }
    __m512i piece[kPieces];
#pragma GCC unroll 4
    for (int p = 0; p < kPieces; ++p) piece[p] = piece_of<kIsByte>(fours + p);
#pragma GCC unroll 4
    for (int n = 0; n < 4; ++n) {
      const __m512i part = _mm512_and_si512(x[n], upper);
#pragma GCC unroll 4
      for (int p = 0; p < kPieces; ++p) {
        add_products(all[p][n], x[n], piece[p]);
        if constexpr (!kIsByte) add_products(high[p][n], part, piece[p]);
      }
    }
  }
  join_pieces(all);
  if constexpr (!kIsByte) {
    join_pieces(high);
#pragma GCC unroll 4
    for (int p = 0; p < kPieces - 1; ++p)
#pragma GCC unroll 4
      for (int n = 0; n < 4; ++n) all[p][n] = _mm512_sub_epi32(all[p][n], high[p][n]);
    store_joined<kIsByte, kPieces>(high, unit / 16, other);
  }
  store_joined<kIsByte, kPieces>(all, unit, out);
}

// sums[g][m][n] = sum over d of factor[g][m][d] code[g][d, n] for the positions n of G groups; false, and nothing done,
// where the numbers `factor` have no unit.
template <int M, int G, bool kIsByte, int kPieces>
STRUCTATTN_INTEGERS bool key_sums(const float* factor, int64_t row, const uint8_t* const* codes, int64_t dims,
                                  int64_t group_size, IntegerRoom& room, float* sums) {
  const int64_t stride = kIsByte ? group_size : group_size / 2, lines = (dims + 15) / 16;
  constexpr float kMost = kMostScore<kPieces> / (kIsByte ? 255 : 15);
  float unit[G][M], inverse[G][M];  // of each group: a large number in one costs the others nothing
  for (int g = 0; g < G; ++g)
    for (int m = 0; m < M; ++m) {
      const float* const x = factor + (g * M + m) * row;
      __m512i most = _mm512_setzero_si512();
      for (int64_t d = 0; d < dims; d += 16) most = larger(most, _mm512_maskz_loadu_ps(first_lanes(dims - d), x + d));
      if (!unit_of(_mm512_reduce_max_epi32(most), kMostSteps<kPieces>, kMost, unit[g][m], inverse[g][m])) return false;
    }
  for (int g = 0; g < G; ++g)
    for (int m = 0; m < M; ++m)
      by_piece<kIsByte>(factor + (g * M + m) * row, dims, inverse[g][m], room.bytes.data() + (g * M + m) * lines);
  for (int g = 0; g < G; ++g)
    for (int64_t c = 0; c < stride; c += kIsByte ? 64 : 32) {
      if constexpr (M > 1) by_position<kIsByte>(codes[g] + c, stride, dims, room.codes.data());
      const uint8_t* const from = M > 1 ? room.codes[0].bytes : codes[g] + c;
      for (int m = 0; m < M; ++m) {
        const Line* const query = room.bytes.data() + (g * M + m) * lines;
        float* const out = sums + (g * M + m) * row + c;
        store_sums<kIsByte, kPieces, M == 1>(from, stride, query, dims, unit[g][m], out, out + stride);
      }
    }
  return true;
}

// Groups of values whose sums are added up as whole numbers, for M queries: as many as registers hold the weights of.
template <int M, bool kIsByte, int kPieces>
constexpr int kGroupsAtOnce = kIsByte && kPieces == 3 ? 1 : std::max(1, 4 / M);

// Adds to lanes[m][d], 16 numbers, sums over the positions n of G groups of factor[g][m][n] (code[g][d, n] - middle),
// which are to be added up; false, and nothing done, where the numbers `factor` have no unit.
template <int M, int G, bool kIsByte, int kPieces>
STRUCTATTN_INTEGERS bool add_value_sums(const float* factor, int64_t row, const uint8_t* const* codes, int64_t dims,
                                        int64_t group_size, float* lanes, int64_t lanes_row) {
  // 4 x 255 or 8 x 15 of them, for each group, are below 2^31.
  constexpr float kSteps = kPieces < 3 ? kMostSteps<kPieces> : kIsByte ? 2097152.f / G : kMostSteps<kPieces> / G;
  const int64_t stride = kIsByte ? group_size : group_size / 2;
  float unit[M], inverse[M];
  for (int m = 0; m < M; ++m) {
    __m512i most = _mm512_setzero_si512();
    for (int g = 0; g < G; ++g)
      for (int64_t n = 0; n < group_size; n += 16) most = larger(most, _mm512_loadu_ps(factor + (g * M + m) * row + n));
    if (!unit_of(_mm512_reduce_max_epi32(most), kSteps, FLT_MAX, unit[m], inverse[m])) return false;
  }
  for (int64_t c = 0; c < stride; c += kIsByte ? 64 : 32) {
    // Of 4 bits: of the codes in the low halves, and in the high ones.
    __m512i left[G][M][kPieces], right[G][M][kPieces];
#pragma GCC unroll 4
    for (int g = 0; g < G; ++g)
#pragma GCC unroll 4
      for (int m = 0; m < M; ++m) {
        const float *const x = factor + (g * M + m) * row + c, *const y = kIsByte ? x + 32 : x + stride;
        __m512i whole[4];
        const float* const from[4] = {x, x + 16, y, y + 16};
#pragma GCC unroll 4
        for (int n = 0; n < 4; ++n) whole[n] = by_byte(as_bytes(_mm512_loadu_ps(from[n]), inverse[m]));
#pragma GCC unroll 4
        for (int p = 0; p < kPieces; ++p) {
          const __m512i first = bytes_of(whole[0], whole[1], p), second = bytes_of(whole[2], whole[3], p);
          left[g][m][p] = kIsByte ? _mm512_mask_blend_epi32(0xff00, first, second) : first;
          if constexpr (!kIsByte) right[g][m][p] = second;
        }
      }
    // Of 4 bits: the high halves of bytes are 16 times the codes; with three pieces their sums would overflow.
    const __m512i lower = _mm512_set1_epi8(15), upper = _mm512_set1_epi8(-16);
    constexpr int kMiddle = kIsByte ? 128 : 8, kTimes = kIsByte || kPieces == 3 ? 1 : 16;
    const auto sum_of = [&](int m, const __m512i* low, const __m512i* high, __m512i start) STRUCTATTN_INTEGERS {
      __m512i of_low[kPieces], of_high[kPieces];  // chains that do not wait for each other
#pragma GCC unroll 4
      for (int p = 0; p < kPieces; ++p) {
        of_low[p] = kIsByte && p == 0 ? start : _mm512_setzero_si512();
        of_high[p] = p == 0 ? start : _mm512_setzero_si512();
#pragma GCC unroll 4
        for (int g = 0; g < G; ++g) {
          add_products(of_low[p], low[g], left[g][m][p]);
          if constexpr (!kIsByte) add_products(of_high[p], high[g], right[g][m][p]);
        }
      }
      __m512i sum = of_low[kPieces - 1], other = of_high[kPieces - 1];
#pragma GCC unroll 4
      for (int p = kPieces - 2; p >= 0; --p) {
        sum = _mm512_add_epi32(_mm512_slli_epi32(sum, 8), of_low[p]);
        if constexpr (!kIsByte) other = _mm512_add_epi32(_mm512_slli_epi32(other, 8), of_high[p]);
      }
      if constexpr (kTimes > 1) sum = _mm512_slli_epi32(sum, 4);
      return kIsByte ? sum : _mm512_add_epi32(sum, other);
    };
    __m512i low[G], high[G], start[M];
    std::fill(low, low + G, _mm512_set1_epi8(static_cast<char>(kMiddle)));
    std::fill(high, high + G, _mm512_set1_epi8(static_cast<char>(kMiddle * kTimes)));
    const __m512i zero = _mm512_setzero_si512();
#pragma GCC unroll 4
    for (int m = 0; m < M; ++m) start[m] = _mm512_sub_epi32(zero, sum_of(m, low, high, zero));
    for (int64_t d = 0; d < dims; d += kIsByte ? 1 : 2) {
#pragma GCC unroll 4
      for (int g = 0; g < G; ++g) {
        const uint8_t* const from = codes[g] + d * stride + c;
        if constexpr (G > 1 || !kIsByte) ask_for(from);
        const __m512i all = kIsByte ? _mm512_loadu_si512(from) : two_rows(from, stride);
        low[g] = kIsByte ? all : _mm512_and_si512(all, lower);
        high[g] = kTimes > 1 ? _mm512_and_si512(all, upper) : _mm512_and_si512(_mm512_srli_epi16(all, 4), lower);
      }
#pragma GCC unroll 4
      for (int m = 0; m < M; ++m) {
        const __m512 numbers = _mm512_cvtepi32_ps(sum_of(m, low, high, start[m]));
        float* const to = lanes + m * lanes_row + d * 16;
        if constexpr (kIsByte) {
          _mm512_storeu_ps(to, _mm512_fmadd_ps(numbers, _mm512_set1_ps(unit[m]), _mm512_loadu_ps(to)));
        } else {
          const __m256 times = _mm256_set1_ps(unit[m] / kTimes);
          _mm256_storeu_ps(to, _mm256_fmadd_ps(_mm512_castps512_ps256(numbers), times, _mm256_loadu_ps(to)));
          _mm256_storeu_ps(to + 16,
                           _mm256_fmadd_ps(_mm512_extractf32x8_ps(numbers, 1), times, _mm256_loadu_ps(to + 16)));
        }
      }
    }
  }
  return true;
}

#undef STRUCTATTN_INTEGERS

}  // namespace structattn
