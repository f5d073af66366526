// A token into what a cache keeps, and its attention.
#pragma once

#include "integers.h"
#include "products.h"
#include "storage.h"

#if defined(__AVX512F__)
#include "integers_avx512.h"
#elif defined(__AVX2__)
#include "integers_avx2.h"
#include "words_avx2.h"
#endif

#include <atomic>
#include <cmath>
#include <cstring>
#include <memory>
#include <numeric>
#include <optional>
#include <vector>

namespace structattn {

// Positions whose scores stay near while the dimensions of M queries are added: one row of a page, or four of one
// query.
template <int M>
constexpr int64_t kChunk = M == 1   ? 4096
                           : M == 2 ? 2048
                                    : 1024;

// Query heads that read the same keys and values and are computed together: what they read is loaded, and converted,
// once. One where speed matters less than the time of compiling.
template <typename S>
constexpr int64_t kHeads = std::is_same_v<S, float> || std::is_same_v<S, BFloat16> ? 4 : 1;
constexpr int64_t kMostHeads = 4;

// out[m][c] = before * out[m][c] + sum over d of q[m][d] x[d stride + c], for M queries `q_row` apart.
template <typename S, int M, typename T = Sum<S>>
void add_scores(const T* q, int64_t q_row, const S* x, int64_t stride, int64_t dims, int64_t size, T before, T* out,
                int64_t out_row) {
  using V = Vec<T>;
  constexpr int64_t W = V::size();
  for (int64_t from = 0; from < size; from += kChunk<M>) {
    const int64_t count = std::min(kChunk<M>, size - from);
    for (int m = 0; m < M; ++m) {
      T* const to = out + m * out_row + from;
      if (before == 0)
        std::fill(to, to + count, T(0));
      else if (before != 1)
        for (int64_t c = 0; c < count; ++c) to[c] *= before;
    }
    // Four rows at once, far from each other: then memory is read in four runs, each of them without a gap, which
    // processors foresee. Of rows side by side, each shorter than a page of memory, they do not.
    const int64_t apart = dims / 4;
    for (int64_t d = 0; d < apart; ++d) {
      const S *a = x + d * stride + from, *b = a + apart * stride, *e = b + apart * stride, *f = e + apart * stride;
      V left[M][4];
#pragma GCC unroll 4
      for (int m = 0; m < M; ++m)
        for (int n = 0; n < 4; ++n) left[m][n] = V(q[m * q_row + n * apart + d]);
      int64_t c = 0;
      for (; c + W <= count; c += W) {
        const V xa = load_numbers(a + c), xb = load_numbers(b + c), xe = load_numbers(e + c), xf = load_numbers(f + c);
#pragma GCC unroll 4
        for (int m = 0; m < M; ++m) {
          T* const to = out + m * out_row + from + c;
          V sum = fmadd(left[m][0], xa, V::loadu(to));
          V other = left[m][1] * xb;
          sum = fmadd(left[m][2], xe, sum);
          other = fmadd(left[m][3], xf, other);
          (sum + other).store(to);
        }
      }
      for (; c < count; ++c)
        for (int m = 0; m < M; ++m) {
          const T* const own = q + m * q_row + d;
          out[m * out_row + from + c] +=
              own[0] * a[c] + own[apart] * b[c] + own[2 * apart] * e[c] + own[3 * apart] * f[c];
        }
    }
    for (int64_t d = 4 * apart; d < dims; ++d)
      for (int m = 0; m < M; ++m)
        for (int64_t c = 0; c < count; ++c) out[m * out_row + from + c] += q[m * q_row + d] * x[d * stride + from + c];
  }
}

// Makes scores weights, of which the largest is 1, and returns their sum.
template <typename T>
T weigh(T* x, int64_t size) {
  using V = Vec<T>;
  constexpr int64_t W = V::size();
  T most = x[0];
  int64_t c = 0;
  if (size >= W) {  // where a score is no number, the sum is none, whatever is found here
    const V first = V::loadu(x);
    V top[4] = {first, first, first, first};  // which do not wait for each other
    for (; c + 4 * W <= size; c += 4 * W)
#pragma GCC unroll 4
      for (int n = 0; n < 4; ++n) top[n] = larger_or_last(top[n], V::loadu(x + c + n * W));
    for (; c + W <= size; c += W) top[0] = larger_or_last(top[0], V::loadu(x + c));
    most = largest_of(maximum(maximum(top[0], top[1]), maximum(top[2], top[3])));
  }
  for (; c < size; ++c) most = std::max(most, x[c]);
  const V shift(most);
  // Sums of sums, so that what is added to is not much larger than what is added, however long the context is.
  V added(0);
  T total = 0;
  for (c = 0; c + W <= size;) {
    V some(0);
    for (const int64_t end = std::min(size, c + 64 * W); c + W <= end; c += W) {
      const V e = exponential(V::loadu(x + c), shift);
      e.store(x + c);
      some = some + e;
    }
    added = added + some;
  }
  for (; c < size; ++c) total += x[c] = exponential(x[c] - most);
  return total + sum_of(added);
}

// How many sums a result of `add_dots` has, so that additions do not wait for each other.
constexpr int sums_of(int results) { return results == 1 ? 4 : results <= 4 ? 2 : 1; }

// out[m][r] += sum over c of a[m][c] b[r][c], for M and R rows: a_row and b_row apart, and the results out_row and
// out_step.
template <int M, int R, int kSums = sums_of(M * R), typename T, typename S>
void add_dots(const T* a, int64_t a_row, const S* b, int64_t b_row, int64_t size, T* out, int64_t out_row,
              int64_t out_step) {
  using V = Vec<T>;
  constexpr int64_t W = V::size();
  V sum[M][R][kSums];
#pragma GCC unroll 4
  for (int m = 0; m < M; ++m)
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r)
      for (int n = 0; n < kSums; ++n) sum[m][r][n] = V(0);
  const auto add = [&](int64_t c, int64_t n) {
    V left[M];
#pragma GCC unroll 4
    for (int m = 0; m < M; ++m) left[m] = V::loadu(a + m * a_row + c);
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      const V right = load_numbers(b + r * b_row + c);
#pragma GCC unroll 4
      for (int m = 0; m < M; ++m) sum[m][r][n] = fmadd(left[m], right, sum[m][r][n]);
    }
  };
  int64_t c = 0;
  for (; c + kSums * W <= size; c += kSums * W)
#pragma GCC unroll 4
    for (int64_t n = 0; n < kSums; ++n) add(c + n * W, n);
  for (; c + W <= size; c += W) add(c, 0);
#pragma GCC unroll 4
  for (int m = 0; m < M; ++m)
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      V all = sum[m][r][0];
      for (int n = 1; n < kSums; ++n) all = all + sum[m][r][n];
      T total = sum_of(all);
      for (int64_t n = c; n < size; ++n) total += a[m * a_row + n] * b[r * b_row + n];
      out[m * out_row + r * out_step] += total;
    }
}

// Codes of a group as vectors of numbers: of 8 bits `bytes`, of 4 bits those in the low and those in the high halves.
template <typename T>
struct Codes {
  using V = Vec<T>;
  static constexpr int64_t W = V::size();

  static V bytes(const uint8_t* x) { return of<0, 255>(x); }

  static void halves(const uint8_t* x, V& low, V& high) {
#if defined(__AVX512F__)
    if constexpr (std::is_same_v<T, float>) {  // looked up: the 4 low bits of an index count
      const __m512 table = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
      const __m512i at = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(x)));
      low = _mm512_permutexvar_ps(at, table);
      high = _mm512_permutexvar_ps(_mm512_srli_epi32(at, 4), table);
      return;
    }
#endif
    low = of<0, 15>(x);
    high = of<4, 15>(x);
  }

 private:
  template <int kShift, int kMask>
  static V of(const uint8_t* x) {
#if defined(__AVX2__)
    if constexpr (std::is_same_v<T, float>) {
      __m128i all;
      if constexpr (W == 16)
        all = _mm_loadu_si128(reinterpret_cast<const __m128i*>(x));
      else
        all = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(x));
      if constexpr (kShift > 0) all = _mm_srli_epi16(all, kShift);
      if constexpr (kMask < 255) all = _mm_and_si128(all, _mm_set1_epi8(kMask));
#if defined(__AVX512F__)
      return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(all));
#else
      return _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(all));
#endif
    }
#endif
    T out[W];
    for (int64_t n = 0; n < W; ++n) out[n] = static_cast<T>((x[n] >> kShift) & kMask);
    return V::loadu(out);
  }
};

// Bytes of a dimension that are read at once, for M queries: as many as there are registers for the sums.
template <typename T, int M>
constexpr int64_t kBytes = kIsWide || M == 1 ? 32
                           : M == 2          ? 16
                                             : 8;

// Adds factor[m][d] code[d, c], summed over d, to the positions c of M sums that some bytes of each dimension hold: of
// 8 bits from `low` on; of 4 bits from `low` on those in the low halves, from `high` on those in the high ones.
template <typename T, int M, bool kIsByte, int64_t kAtOnce>
void add_codes(const T* factor, int64_t factor_row, const uint8_t* codes, int64_t stride, int64_t dims, T* low, T* high,
               int64_t row) {
  using C = Codes<T>;
  constexpr int64_t kCount = kAtOnce / C::W;
  Vec<T> lower[M][kCount], upper[M][kCount];
#pragma GCC unroll 4
  for (int m = 0; m < M; ++m)
    for (int64_t n = 0; n < kCount; ++n) {
      lower[m][n] = Vec<T>::loadu(low + m * row + n * C::W);
      if constexpr (!kIsByte) upper[m][n] = Vec<T>::loadu(high + m * row + n * C::W);
    }
  for (int64_t d = 0; d < dims; ++d, codes += stride) {
    Vec<T> scale[M];
#pragma GCC unroll 4
    for (int m = 0; m < M; ++m) scale[m] = Vec<T>(factor[m * factor_row + d]);
#pragma GCC unroll 8
    for (int64_t n = 0; n < kCount; ++n) {
      Vec<T> code, other;
      if constexpr (kIsByte)
        code = C::bytes(codes + n * C::W);
      else
        C::halves(codes + n * C::W, code, other);
#pragma GCC unroll 4
      for (int m = 0; m < M; ++m) {
        lower[m][n] = fmadd(scale[m], code, lower[m][n]);
        if constexpr (!kIsByte) upper[m][n] = fmadd(scale[m], other, upper[m][n]);
      }
    }
  }
#pragma GCC unroll 4
  for (int m = 0; m < M; ++m)
    for (int64_t n = 0; n < kCount; ++n) {
      lower[m][n].store(low + m * row + n * C::W);
      if constexpr (!kIsByte) upper[m][n].store(high + m * row + n * C::W);
    }
}

#if defined(__AVX512F__)

// Groups of 16 codes of 4 bits have half a vector of bytes for each dimension: two dimensions are read at once.
inline bool is_half_vector(int64_t bits, int64_t group_size, int64_t dims) {
  return bits == 4 && group_size == 16 && dims % 2 == 0;
}

// Of two vectors, the sums of the first 8 lanes and the last 8, side by side.
inline __m512 folded(__m512 x, __m512 y) {
  return _mm512_add_ps(_mm512_shuffle_f32x4(x, y, 0x44), _mm512_shuffle_f32x4(x, y, 0xee));
}

// Sets M sums of 16 positions to factor[m][d] code[d, c], summed over d.
template <int M>
void sums_of_16(const float* factor, int64_t row, const uint8_t* codes, int64_t dims, float* sums) {
  __m512 lower[M], upper[M];
  std::fill(lower, lower + M, _mm512_setzero_ps()), std::fill(upper, upper + M, _mm512_setzero_ps());
  for (int64_t d = 0; d < dims; d += 2) {
    Vec<float> low, high;
    Codes<float>::halves(codes + 8 * d, low, high);
#pragma GCC unroll 4
    for (int m = 0; m < M; ++m) {
      const float* const own = factor + m * row + d;
      const __m512 scale = _mm512_mask_broadcastss_ps(_mm512_set1_ps(own[0]), 0xff00, _mm_load_ss(own + 1));
      lower[m] = _mm512_fmadd_ps(scale, low.raw, lower[m]);
      upper[m] = _mm512_fmadd_ps(scale, high.raw, upper[m]);
    }
  }
#pragma GCC unroll 4
  for (int m = 0; m < M; ++m) _mm512_storeu_ps(sums + m * row, folded(lower[m], upper[m]));
}

// Adds to 8 of the lanes[m][d] numbers whose sum is that over 16 positions n of factor[m][n] (code[d, n] - middle).
template <int M>
void add_values_of_16(const float* factor, int64_t row, const uint8_t* codes, int64_t dims, float* lanes,
                      int64_t lanes_row) {
  __m512 left[M], right[M];  // of the low halves of bytes, and of the high ones, of both dimensions
#pragma GCC unroll 4
  for (int m = 0; m < M; ++m) {
    const __m512 all = _mm512_loadu_ps(factor + m * row);
    left[m] = _mm512_shuffle_f32x4(all, all, 0x44), right[m] = _mm512_shuffle_f32x4(all, all, 0xee);
  }
  const __m512 middle = _mm512_set1_ps(8);
  for (int64_t d = 0; d < dims; d += 2) {
    Vec<float> low, high;
    Codes<float>::halves(codes + 8 * d, low, high);
    const __m512 first = _mm512_sub_ps(low.raw, middle), second = _mm512_sub_ps(high.raw, middle);
#pragma GCC unroll 4
    for (int m = 0; m < M; ++m) {
      float* const to = lanes + m * lanes_row + d * 16;
      const __m512 both = _mm512_fmadd_ps(left[m], first, _mm512_mul_ps(right[m], second));
      _mm256_storeu_ps(to, _mm256_add_ps(_mm256_loadu_ps(to), _mm512_castps512_ps256(both)));
      _mm256_storeu_ps(to + 16, _mm256_add_ps(_mm256_loadu_ps(to + 16), _mm512_extractf32x8_ps(both, 1)));
    }
  }
}

#endif  // __AVX512F__

// Room for what is computed of groups, for up to `heads` queries.
template <typename T>
struct GroupRoom {
  int64_t size, dims, lanes_row;  // numbers of a query in `factor` and `sums`; dimensions; its numbers in `lanes`
  std::vector<T> factor, sums;
  std::vector<Line> lines;  // of `lanes`
  IntegerRoom integers;
  GroupRoom(int64_t heads, int64_t group_size, int64_t dims)
      : size(std::max(group_size, dims)),
        dims(dims),
        lanes_row((dims + (dims + group_size - 1) / group_size) * Codes<T>::W),
        factor(kMostHeads * size),
        sums(kMostHeads * size),
        lines(heads * lanes_row * sizeof(T) / sizeof(Line) + 1),
        integers(size, dims, kMostHeads) {}

  // Vectors whose numbers are to be summed: one for each dimension of values, then one for each group of dimensions,
  // which is added to all of them.
  T* lanes() { return reinterpret_cast<T*>(lines[0].bytes); }
  T* lanes_of_group(int64_t query, int64_t group) { return lanes() + query * lanes_row + (dims + group) * Codes<T>::W; }
};

// factor[n] = scale[n] x[n]; adds to `total` numbers whose sum is that of (zero[n] + middle scale[n]) x[n]. Asks for
// the scales and zeros `next` numbers on, which are read next: of a group there are too few for processors to foresee
// them.
template <typename T, typename S>
inline void scaled(const T* x, const S* scale, const S* zero, T middle, int64_t size, int64_t next, T* factor,
                   Vec<T>& total) {
  using V = Vec<T>;
  int64_t n = 0;
  for (; n + V::size() <= size; n += V::size()) {
    __builtin_prefetch(scale + n + next), __builtin_prefetch(zero + n + next);
    const V own = V::loadu(x + n), times = load_numbers(scale + n);
    (own * times).store(factor + n);
    total = fmadd(fmadd(V(middle), times, load_numbers(zero + n)), own, total);
  }
  T rest = 0;
  for (; n < size; ++n) {
    const T times = scale[n];
    factor[n] = x[n] * times;
    rest += (middle * times + T(zero[n])) * x[n];
  }
  if (rest != 0) total = total + V::loadu(&rest, 1);
}

// sums[m][n] = sum over d of factor[m][d] code[d, n] for the positions of a group.
template <typename T, int M>
void key_sums_by_numbers(const T* factor, int64_t size, const uint8_t* codes, const GroupSpan<T>& span,
                         int64_t group_size, T* sums) {
#if defined(__AVX512F__)
  if constexpr (std::is_same_v<T, float>)
    if (is_half_vector(span.bits, group_size, span.dims)) return sums_of_16<M>(factor, size, codes, span.dims, sums);
#endif
  for (int m = 0; m < M; ++m) std::fill(sums + m * size, sums + m * size + group_size, T(0));
  const int64_t half = group_size / 2, bytes = span.bits == 8 ? group_size : half;
  int64_t c = 0;
#if defined(__AVX2__) && !defined(__AVX512F__)
  if constexpr (std::is_same_v<T, float>)
    for (; span.bits == 4 && c + kWordBytes <= bytes; c += kWordBytes)
      add_word_sums<M>(factor, size, codes + c, bytes, span.dims, sums + c, sums + half + c, size);
#endif
  const auto add = [&]<int64_t kAtOnce>() {  // as many as there are registers for, then a vector
    for (; c + kAtOnce <= bytes; c += kAtOnce) {
      if (span.bits == 8)
        add_codes<T, M, true, kAtOnce>(factor, size, codes + c, bytes, span.dims, sums + c, nullptr, size);
      else
        add_codes<T, M, false, kAtOnce>(factor, size, codes + c, bytes, span.dims, sums + c, sums + half + c, size);
    }
  };
  if (span.bits == 8) add.template operator()<2 * kBytes<T, M>>();
  add.template operator()<kBytes<T, M>>();
  add.template operator()<Codes<T>::W>();
  for (int64_t d = 0; d < span.dims && c < bytes; ++d)
    for (int64_t n = c; n < bytes; ++n) {
      const uint8_t x = codes[d * bytes + n];
      for (int m = 0; m < M; ++m) {
        T* const own = sums + m * size;
        if (span.bits == 8) {
          own[n] += factor[m * size + d] * static_cast<T>(x);
        } else {
          own[n] += factor[m * size + d] * static_cast<T>(x & 15);
          own[half + n] += factor[m * size + d] * static_cast<T>(x >> 4);
        }
      }
    }
}

// f for codes of that number of bits and for numbers of three bytes, where `has_integers` allows them, or of two.
template <typename F>
auto by_bits(int64_t bits, bool is_wide, const F& f) {
#if defined(__AVX512F__)
  if (is_wide) return bits == 8 ? f.template operator()<true, 3>() : f.template operator()<false, 3>();
#endif
  return bits == 8 ? f.template operator()<true, 2>() : f.template operator()<false, 2>();
}

// Groups that are computed together for M queries.
template <int M>
constexpr int64_t kGroups = std::max<int64_t>(1, kMostHeads / M);

// The same for `count` groups of one level, by integers; false, and nothing done, where that cannot be.
template <int M, int G, typename T>
bool key_sums_by_integers(const T* factor, int64_t size, const uint8_t* const* codes, const GroupSpan<T>& span,
                          int64_t count, int64_t group_size, IntegerRoom& room, T* sums) {
#if defined(__AVX2__)
  if constexpr (std::is_same_v<T, float>)
    if (count == G && has_integers(group_size, span.dims, span.is_wide))
      return by_bits(span.bits, span.is_wide, [&]<bool kIsByte, int kPieces>() {
        return key_sums<M, G, kIsByte, kPieces>(factor, size, codes, span.dims, group_size, room, sums);
      });
#endif
  return false;
}

// out[m][c] = before * out[m][c] + sum over d of q[m][d] (zero[d] + scale[d] code[d, c]) for the positions of the spans
// of up to kGroups groups of a level.
template <typename T, int M>
void add_group_scores(const T* q, int64_t q_row, const GroupSpan<T>* spans, int64_t count, int64_t row,
                      int64_t group_size, GroupRoom<T>& room, T* out, int64_t out_row) {
  constexpr int64_t kMost = kGroups<M>;
  const int64_t size = room.size;
  const uint8_t* codes[kMost];
  T base[kMost][M], *const factor = room.factor.data(), *const sums = room.sums.data();
  for (int64_t g = 0; g < count; ++g) {
    const GroupSpan<T>& span = spans[g];
    const int64_t at = row * span.scale_stride;
    codes[g] = span.codes + row * span.row_stride;
    for (int m = 0; m < M; ++m) {
      Vec<T> total(T(0));
      scaled(q + m * q_row, span.scale + at, span.zero + at, T(0), span.dims, count * span.dims,
             factor + (g * M + m) * size, total);
      base[g][m] = sum_of(total);
    }
  }
  if (!key_sums_by_integers<M, kMost>(factor, size, codes, *spans, count, group_size, room.integers, sums))
    for (int64_t g = 0; g < count; ++g) {
      const T* const own = factor + g * M * size;
      T* const to = sums + g * M * size;
      if (!key_sums_by_integers<M, 1>(own, size, codes + g, *spans, 1, group_size, room.integers, to))
        key_sums_by_numbers<T, M>(own, size, codes[g], *spans, group_size, to);
    }
  for (int64_t g = 0; g < count; ++g)
    for (int m = 0; m < M; ++m) {
      using V = Vec<T>;
      const GroupSpan<T>& span = spans[g];
      T* const to = out + m * out_row + span.column;
      const T *const found = sums + (g * M + m) * size + span.skip, first = base[g][m];
      if (span.before == 0)
        map([&](V x) { return x + V(first); }, to, found, span.size);
      else
        map2([&](V x, V y) { return fmadd(V(span.before), y, x + V(first)); }, to, found, to, span.size);
    }
}

// What is taken off codes of values, so that they are about as often above 0 as below: with the zero of each token,
// which gets it back, they add up to large numbers that cancel otherwise.
constexpr int64_t middle_of(int64_t bits) { return int64_t{1} << (bits - 1); }

// Adds to lanes[m][d] numbers whose sum is that over the positions n of a group of factor[m][n] (code[d, n] - middle).
template <typename T, int M>
void add_values_by_numbers(const T* factor, int64_t size, const uint8_t* codes, int64_t bits, int64_t dims,
                           int64_t group_size, T* lanes, int64_t lanes_row) {
  using C = Codes<T>;
  using V = Vec<T>;
#if defined(__AVX512F__)
  if constexpr (std::is_same_v<T, float>)
    if (is_half_vector(bits, group_size, dims)) return add_values_of_16<M>(factor, size, codes, dims, lanes, lanes_row);
#endif
  const int64_t half = group_size / 2, bytes = bits == 8 ? group_size : half;
#if defined(__AVX2__) && !defined(__AVX512F__)
  if constexpr (std::is_same_v<T, float>)
    if (bits == 4 && half % kWordBytes == 0)
      return add_word_values<M>(factor, size, codes, dims, group_size, lanes, lanes_row);
#endif
  const T middle = static_cast<T>(middle_of(bits));
  for (int64_t d = 0; d < dims; ++d) {
    const uint8_t* const own = codes + d * bytes;
    V sum[M], other[M];
#pragma GCC unroll 4
    for (int m = 0; m < M; ++m) {
      sum[m] = V::loadu(lanes + m * lanes_row + d * C::W);
      other[m] = V(0);
    }
    int64_t c = 0;
    if (bits == 8) {
      for (; c + 2 * C::W <= bytes; c += 2 * C::W) {
        const V left = C::bytes(own + c) - V(middle), right = C::bytes(own + c + C::W) - V(middle);
#pragma GCC unroll 4
        for (int m = 0; m < M; ++m) {
          sum[m] = fmadd(V::loadu(factor + m * size + c), left, sum[m]);
          other[m] = fmadd(V::loadu(factor + m * size + c + C::W), right, other[m]);
        }
      }
      for (; c + C::W <= bytes; c += C::W) {
        const V left = C::bytes(own + c) - V(middle);
#pragma GCC unroll 4
        for (int m = 0; m < M; ++m) sum[m] = fmadd(V::loadu(factor + m * size + c), left, sum[m]);
      }
    } else {
      for (; c + C::W <= bytes; c += C::W) {
        V low, high;
        C::halves(own + c, low, high);
        low = low - V(middle), high = high - V(middle);
#pragma GCC unroll 4
        for (int m = 0; m < M; ++m) {
          sum[m] = fmadd(V::loadu(factor + m * size + c), low, sum[m]);
          other[m] = fmadd(V::loadu(factor + m * size + half + c), high, other[m]);
        }
      }
    }
#pragma GCC unroll 4
    for (int m = 0; m < M; ++m) {
      T *const to = lanes + m * lanes_row + d * C::W, total = 0;
      const T* const times = factor + m * size;
      for (int64_t n = c; n < bytes; ++n) {
        if (bits == 8)
          total += times[n] * (static_cast<T>(own[n]) - middle);
        else
          total += times[n] * (static_cast<T>(own[n] & 15) - middle) +
                   times[half + n] * (static_cast<T>(own[n] >> 4) - middle);
      }
      (sum[m] + other[m]).store(to);
      *to += total;
    }
  }
}

// The same for `count` groups of one level, by integers; false, and nothing done, where that cannot be.
template <int M, int G, typename T>
bool add_values_by_integers(const T* factor, int64_t size, const uint8_t* const* codes, const GroupSpan<T>& span,
                            int64_t count, int64_t dims, int64_t group_size, T* lanes, int64_t lanes_row) {
#if defined(__AVX2__)
  if constexpr (std::is_same_v<T, float>)
    if (count == G && has_integers(group_size, dims, span.is_wide))
      return by_bits(span.bits, span.is_wide, [&]<bool kIsByte, int kPieces>() {
        if constexpr (G <= kGroupsAtOnce<M, kIsByte, kPieces>)
          return add_value_sums<M, G, kIsByte, kPieces>(factor, size, codes, dims, group_size, lanes, lanes_row);
        return false;
      });
#endif
  return false;
}

// How many groups of values of a level are added together for M queries.
template <int M, typename T>
int64_t groups_at_once(const GroupSpan<T>& span, int64_t group_size) {
#if defined(__AVX2__)
  if constexpr (std::is_same_v<T, float>)
    if (has_integers(group_size, std::min(span.dims, group_size), span.is_wide))
      return by_bits(span.bits, span.is_wide, []<bool kIsByte, int kPieces>() -> int64_t {
        return kGroupsAtOnce<M, kIsByte, kPieces> < kGroups<M> ? 1 : kGroups<M>;
      });
#endif
  return 1;
}

// Adds the values of up to kGroups groups of a level, weighed, to the lanes of `room`: those of every `apart`-th span.
template <typename T, int M>
void add_group_values(const T* weight, int64_t weight_row, const GroupSpan<T>* spans, int64_t apart, int64_t count,
                      int64_t row, int64_t group_size, GroupRoom<T>& room) {
  using C = Codes<T>;
  const int64_t bytes = group_size * spans->bits / 8, size = room.size;
  const int64_t per_slot = (spans->dims + group_size - 1) / group_size * group_size;  // scales of all dimensions
  const uint8_t* codes[kGroups<M>];
  for (int64_t first = 0, part = 0; first < spans->dims; first += group_size, ++part) {
    const int64_t dims = std::min(group_size, spans->dims - first);
    Vec<T> base[M];
    std::fill(base, base + M, Vec<T>(T(0)));
    T* const factor = room.factor.data();
    for (int64_t g = 0; g < count; ++g) {
      const GroupSpan<T>& span = spans[g * apart];
      codes[g] = span.codes + row * span.row_stride + first * bytes;
      const int64_t at = row * span.scale_stride + part * group_size + span.skip;
      for (int m = 0; m < M; ++m) {
        T* const own = factor + (g * M + m) * size;
        std::fill(own, own + span.skip, T(0));
        scaled(weight + m * weight_row + span.column, span.scale + at, span.zero + at,
               static_cast<T>(middle_of(span.bits)), span.size, per_slot, own + span.skip, base[m]);
      }
    }
    T* const lanes = room.lanes() + first * C::W;
    if (!add_values_by_integers<M, kGroups<M>>(factor, size, codes, *spans, count, dims, group_size, lanes,
                                               room.lanes_row))
      for (int64_t g = 0; g < count; ++g) {
        const T* const own = factor + g * M * size;
        if (!add_values_by_integers<M, 1>(own, size, codes + g, *spans, 1, dims, group_size, lanes, room.lanes_row))
          add_values_by_numbers<T, M>(own, size, codes[g], spans->bits, dims, group_size, lanes, room.lanes_row);
      }
    for (int m = 0; m < M; ++m) {
      T* const of_group = room.lanes_of_group(m, part);
      (Vec<T>::loadu(of_group) + base[m]).store(of_group);
    }
  }
}

template <typename S, int M>
void add_span_scores(const Sum<S>* q, int64_t q_row, const CacheSpan<S>& span, int64_t row, Sum<S>* out,
                     int64_t out_row) {
  add_scores<S, M>(q, q_row, span.numbers + row * span.row_stride, span.stride, span.dims, span.size, span.before, out,
                   out_row);
}

template <typename S, int M>
void add_span_values(const Sum<S>* weight, int64_t weight_row, const CacheSpan<S>& span, int64_t row, Sum<S>* out,
                     int64_t out_row) {
  constexpr int R = kIsWide || M == 1 ? 4 : 2;  // rows at once, far from each other as in `add_scores`
  const int64_t apart = span.dims / R;
  for (int64_t from = 0; from < span.size; from += kChunk<M>) {
    const int64_t count = std::min(kChunk<M>, span.size - from);
    const S* const numbers = span.numbers + row * span.row_stride + from;
    for (int64_t d = 0; d < apart; ++d)
      add_dots<M, R>(weight + from, weight_row, numbers + d * span.stride, apart * span.stride, count, out + d, out_row,
                     apart);
    for (int64_t d = R * apart; d < span.dims; ++d)
      add_dots<M, 1>(weight + from, weight_row, numbers + d * span.stride, 0, count, out + d, out_row, 0);
  }
}

// The scores of one softmax, and the values that they weigh.
template <typename S, template <typename> class Span>
struct Weighed {
  int64_t columns;
  std::vector<Span<S>> keys, values;
  std::vector<GroupSpan<Sum<S>>> key_groups, value_groups;
};

// Adds what a query sees of a level from position `first` on.
template <typename S>
void add_level(const Kept& kept, const Stored& level, int64_t first, int64_t position, int64_t low, int64_t dim,
               Sum<S> before, std::vector<CacheSpan<S>>& spans, std::vector<GroupSpan<Sum<S>>>& groups) {
  const int64_t begin = level.begin(position, kept.chunk);
  int64_t exact = first;
  if (level.quantized.bits) {
    exact = std::max(first, first_exact(kept, position));
    add_groups<S>(level, first, exact, begin, low, dim, before, kept.group_size, groups);
  }
  add_spans<S>(level, exact, position, begin, low, dim, before, spans);
}

template <typename S>
void add_sink_tokens(const Kept& kept, int64_t number, int64_t dim, Sum<S> before, std::vector<CacheSpan<S>>& spans,
                     int64_t from = 0, int64_t dims = -1) {
  add_spans<S>(kept.sinks[number], 0, kept.num_sinks - 1, 0, 0, dim, before, spans, from, dims);
}

template <typename S, template <typename> class Span, typename K>
std::vector<Weighed<S, Span>> weighed(const K& kept, int64_t position, const Sum<S>* before) {
  std::vector<Weighed<S, Span>> out;
  int64_t dim = 0;
  for (const auto& levels : kept.keys) {
    const int64_t sinks = kept.num_sinks, first_seen = levels[0].seen(position, kept.chunk, sinks);
    const int64_t low = first_seen - sinks;  // the columns are sink tokens, then the positions from the first one seen
    Weighed<S, Span> one{position + 1 - low, {}, {}, {}, {}};
    for (const auto& level : levels) {
      if (sinks) add_sink_tokens<S>(kept, 0, dim, *before, one.keys, dim, level.dims);
      add_level<S>(kept, level, level.seen(position, kept.chunk, sinks), position, low, dim, *before++, one.keys,
                   one.key_groups);
      dim += level.dims;
    }
    if (sinks) add_sink_tokens<S>(kept, 1, 0, Sum<S>(0), one.values);
    int64_t value_dim = 0;
    for (size_t n = 0; n < kept.values.size(); ++n) {
      const auto& level = kept.values[n];
      // Hierarchical values have the levels of the keys; others are all that the softmax sees.
      const int64_t first = n ? level.seen(position, kept.chunk, sinks) : first_seen;
      add_level<S>(kept, level, first, position, low, value_dim, Sum<S>(0), one.values, one.value_groups);
      value_dim += level.dims;
    }
    out.push_back(std::move(one));
  }
  return out;
}

// Room of one thread for up to `heads` queries.
template <typename T>
struct StepRoom {
  int64_t dim, columns, value_dim;
  std::vector<T> scaled, sums;
  std::unique_ptr<T[]> weight;  // of all that a query sees: not set to 0 first
  GroupRoom<T> group;
  StepRoom(int64_t heads, int64_t dim, int64_t columns, int64_t value_dim, int64_t group_size)
      : dim(dim),
        columns(columns),
        value_dim(value_dim),
        scaled(heads * dim),
        sums(heads * value_dim),
        weight(new T[heads * columns]),
        group(heads, group_size, std::max(dim, value_dim)) {}
};

// How many of some spans, one after the other, are of the level of the first.
template <typename T>
int64_t like_the_first(const GroupSpan<T>* spans, int64_t count) {
  int64_t found = 1;
  while (found < count && spans[found].first == spans->first) ++found;
  return found;
}

// The sums of M queries that read the same rows of keys and values, from `room.scaled` into `room.sums`.
template <typename S, int M, template <typename> class Span>
void attend_together(const std::vector<Weighed<S, Span>>& softmaxes, int64_t key_row, int64_t value_row,
                     int64_t group_size, StepRoom<Sum<S>>& room) {
  using T = Sum<S>;
  T *const q = room.scaled.data(), *const weight = room.weight.get(), *const sums = room.sums.data();
  std::fill(room.sums.begin(), room.sums.end(), T(0));
  for (const Weighed<S, Span>& one : softmaxes) {
    // Levels in their order: what one adds changes the scale of the sum so far.
    const auto& key_groups = one.key_groups;
    size_t group = 0;
    const auto add_groups_to = [&](int64_t first) {  // of the levels up to the one with these dimensions
      while (group < key_groups.size() && key_groups[group].first <= first) {
        const GroupSpan<T>* const spans = key_groups.data() + group;
        const int64_t left = key_groups.size() - group;
        const int64_t count = like_the_first(spans, std::min<int64_t>(kGroups<M>, left));
        add_group_scores<T, M>(q + spans->first, room.dim, spans, count, key_row, group_size, room.group, weight,
                               room.columns);
        group += count;
      }
    };
    for (const Span<S>& span : one.keys) {
      add_groups_to(span.first);
      add_span_scores<S, M>(q + span.first, room.dim, span, key_row, weight + span.column, room.columns);
    }
    add_groups_to(room.dim);  // where a query sees codes only
    // The sums so far are multiplied by the sum of the weights, since all are divided by it afterwards.
    T total[M];
    for (int m = 0; m < M; ++m) {
      total[m] = weigh<T>(weight + m * room.columns, one.columns);
      T* const own = sums + m * room.value_dim;
      for (int64_t d = 0; d < room.value_dim && &one != softmaxes.data(); ++d) own[d] *= total[m];
    }
    for (const Span<S>& span : one.values)
      add_span_values<S, M>(weight + span.column, room.columns, span, value_row, sums + span.first, room.value_dim);
    T* const lanes = room.group.lanes();
    const auto& groups = one.value_groups;
    for (size_t n = 0; n < groups.size();) {  // the groups of a level
      const GroupSpan<T>* const spans = groups.data() + n;
      const int64_t count = like_the_first(spans, groups.size() - n);
      const int64_t at_once = groups_at_once<M>(*spans, group_size), apart = count / at_once;
      const auto add = [&](int64_t first, int64_t some) {
        add_group_values<T, M>(weight, room.columns, spans + first, apart, some, value_row, group_size, room.group);
      };
      int64_t g = 0;
      do {  // some at a time, so that sums of long contexts are sums of sums
        std::fill_n(lanes, M * room.group.lanes_row, T(0));
        // Those that are added together are far from each other, as rows in `add_scores` are.
        for (const int64_t end = std::min(apart, g + 64); g < end; ++g) add(g, at_once);
        if (g == apart)
          for (int64_t rest = at_once * apart; rest < count; ++rest) add(rest, 1);
        for (int m = 0; m < M; ++m) {
          T* const to = sums + m * room.value_dim + spans->first;
          T of_group = 0;
          for (int64_t d = 0; d < spans->dims; ++d) {
            if (d % group_size == 0) of_group = sum_of(Vec<T>::loadu(room.group.lanes_of_group(m, d / group_size)));
            to[d] += sum_of(Vec<T>::loadu(lanes + m * room.group.lanes_row + d * Codes<T>::W)) + of_group;
          }
        }
      } while (g < apart);
      n += count;
    }
    for (int m = 0; m < M; ++m)
      for (int64_t d = 0; d < room.value_dim; ++d) sums[m * room.value_dim + d] /= total[m];
  }
}

// How the rows of queries are divided: into units that read the same keys and values, and these into pieces, fewer rows
// each where that leaves a thread without a piece.
struct Division {
  int64_t per_key, per_value;  // rows of queries of a key head, and of a value head
  int64_t unit, most, pieces;  // rows of a unit, and at most of a piece; pieces of a unit

  Division(int64_t rows, int64_t key_rows, int64_t value_rows, int64_t at_once)
      : per_key(rows / key_rows), per_value(rows / value_rows), unit(std::gcd(per_key, per_value)) {
    most = std::clamp<int64_t>(rows / num_threads(), 1, std::min(unit, at_once));
    pieces = (unit + most - 1) / most;
  }

  // Whether each piece has a key head and a value head of its own.
  bool is_by_head() const { return pieces == 1 && per_key == per_value; }
};

// Room for each thread of `attend`. All of it is there before the first number is computed, so that nothing fails
// later.
template <typename T>
class StepRooms {
 public:
  template <typename S, template <typename> class Span>
  StepRooms(const Tensor& query, const std::vector<std::vector<Weighed<S, Span>>>& lists, const Division& division,
            int64_t group_size, int64_t value_dim) {
    int64_t columns = 0, size = 1;  // groups may be larger than any memory while nothing is in one
    for (const auto& softmaxes : lists)
      for (const auto& one : softmaxes) {
        columns = std::max(columns, one.columns);
        if (!one.key_groups.empty() || !one.value_groups.empty()) size = group_size;
      }
    const int64_t pieces = query.size(0) * query.size(1) / division.unit * division.pieces;
    for (int64_t n = std::min(num_threads(), pieces); n > 0; --n)
      rooms_.emplace_back(division.most, query.size(3), columns, value_dim, size);
  }

  // One that no other thread has.
  StepRoom<T>& take() { return rooms_.at(taken_++); }

 private:
  std::vector<StepRoom<T>> rooms_;
  std::atomic<int64_t> taken_ = 0;
};

// Weighted sums (B, H, 1, value dims) of queries (B, H, 1, D), times `factors` (D). The query heads of a key (or value)
// head read its row: of all in one list of softmaxes, or those of each b in its own. `before(row)` is called for the
// first row of queries of each piece, before it is computed.
template <typename S, template <typename> class Span, typename F>
void attend(const Tensor& query, const Order& order, const Sum<S>* factors,
            const std::vector<std::vector<Weighed<S, Span>>>& lists, const Division& division, int64_t group_size,
            StepRooms<Sum<S>>& rooms, const F& before, Tensor& out) {
  using T = Sum<S>;
  const int64_t heads = query.size(1), rows = query.size(0) * heads, dim = query.size(3), value_dim = out.size(3);
  const int64_t unit = division.unit, most = division.most, pieces = division.pieces;
  const S* q = query.const_data_ptr<S>();
  S* to = out.data_ptr<S>();
  parallel_for(rows / unit * pieces, [&](int64_t begin, int64_t end) {
    StepRoom<T>& room = rooms.take();
    for (int64_t piece = begin; piece < end; ++piece) {
      const int64_t first = piece / pieces * unit + piece % pieces * most;
      const int64_t count = std::min(most, unit - piece % pieces * most);
      before(first);
      for (int64_t m = 0; m < count; ++m) {
        const int64_t r = first + m, *const at = order.of(r % heads, heads);
        const S* from = q + r / heads * query.stride(0) + r % heads * query.stride(1);
        for (int64_t d = 0; d < dim; ++d)
          room.scaled[m * dim + d] = static_cast<T>(from[(at ? at[d] : d) * query.stride(3)]) * factors[d];
      }
      const int64_t number = lists.size() == 1 ? 0 : first / heads, earlier = number * heads;
      const auto together = [&](auto count) {
        attend_together<S, count()>(lists[number], (first - earlier) / division.per_key,
                                    (first - earlier) / division.per_value, group_size, room);
      };
      if (count == 1) together(std::integral_constant<int, 1>());
      if constexpr (kHeads<S> == 4) {
        if (count == 2) together(std::integral_constant<int, 2>());
        if (count == 3) together(std::integral_constant<int, 3>());
        if (count == 4) together(std::integral_constant<int, 4>());
      }
      converted<T, T, S>(room.sums.data(), nullptr, count * value_dim, to + first * value_dim);
    }
  });
}

// Whether queries (B, H, 1, D) can read keys and values of so many heads, with a factor for each dimension and for each
// level of some softmaxes.
template <typename L>
void check_queries(const Tensor& q, const std::vector<std::vector<L>>& levels, const Tensor& factors, int64_t batch,
                   int64_t key_heads, int64_t value_heads, int64_t dim) {
  int64_t count = dim;
  for (const std::vector<L>& of_softmax : levels) count += static_cast<int64_t>(of_softmax.size());
  check(has_sizes(q, {batch, -1, 1, dim}) && q.size(1) > 0 && q.size(1) % key_heads == 0 &&
            q.size(1) % value_heads == 0 && factors.is_contiguous() && factors.numel() == count,
        "structattn_native: the queries or their factors do not fit the keys and values");
}

// Writes a token into what a cache keeps, and returns its attention to all tokens there are; without a query, nothing.
// What was in the slots of the token goes to `old`, with the number of the step in front of the plan, which says that
// it is there.
template <typename S>
Tensor stepped(const std::optional<Tensor>& q, const Tensor& k, const Tensor& v, const Tensor& factors,
               const std::optional<Tensor>& order, const std::vector<Tensor>& pages, const Tensor& plan,
               const Tensor& old, int64_t position, int64_t number) {
  check(!order || (order->is_contiguous() && order->dim() == 2 && k.size(1) % order->size(0) == 0 &&
                   order->size(1) == k.size(3)),
        "an order of dimensions does not fit the keys");
  const Kept kept(plan, pages);
  kept.check_tokens(k, v, position);
  check(old.is_contiguous() && old.numel() >= k.numel() + v.numel(), Kept::kWrong);
  if (q) check_queries(*q, kept.keys, factors, k.size(0), k.size(1), v.size(1), k.size(3));
  Tensor out = q ? empty({q->size(0), q->size(1), 1, v.size(3)}, q->dtype()) : empty({0}, k.dtype());
  std::vector<Stored> keys;
  for (const std::vector<Stored>& levels : kept.keys) keys.insert(keys.end(), levels.begin(), levels.end());
  S* const before = old.data_ptr<S>();
  const Token<S> key(k, Order(order), keys, position, kept.chunk, before);
  const Token<S> value(v, Order(std::nullopt), kept.values, position, kept.chunk, before + k.numel());
  const auto exchange = [&](int64_t from, int64_t to) {
    for (int64_t row = from; row < std::min(to, key.rows()); ++row) key.exchange(row);
    for (int64_t row = from; row < std::min(to, value.rows()); ++row) value.exchange(row);
  };
  const int64_t all = std::max(key.rows(), value.rows());
  int64_t& newest = *plan.data_ptr<int64_t>();
  if (!q) {
    newest = number;
    exchange(0, all);
    return out;
  }
  const Division division(q->size(0) * q->size(1), key.rows(), value.rows(), kHeads<S>);
  // By the thread that reads the row: in the caches of its core are the lines that the token goes into.
  const bool is_by_head = division.is_by_head();
  const Sum<S>* const factor = factors.const_data_ptr<Sum<S>>();
  const std::vector<std::vector<Weighed<S, CacheSpan>>> lists = {
      weighed<S, CacheSpan>(kept, position, factor + q->size(3))};
  StepRooms<Sum<S>> rooms(*q, lists, division, kept.group_size, v.size(3));
  const Order of_queries(order);
  newest = number;
  if (!is_by_head) exchange(0, all);
  attend<S, CacheSpan>(
      *q, of_queries, factor, lists, division, kept.group_size, rooms,
      [&](int64_t first) {
        if (is_by_head) exchange(first / division.per_key, first / division.per_key + 1);
      },
      out);
  return out;
}

}  // namespace structattn
