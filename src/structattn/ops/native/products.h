// Small matrix products on rows of vector registers, with strides of their own for the left side: what every tile is
// made of.
#pragma once

#include "amx_products.h"
#include "operands.h"

#include <algorithm>
#include <cstdint>

namespace structattn {

constexpr bool kIsWide = kVectorBytes == 64;  // AVX-512, which has 32 registers, not 16

// Rows that are computed together: their sums fit into the registers, with 2 vectors each; with 4 for the second
// number, on AVX-512 only.
constexpr int64_t kGroup = kIsWide ? 8 : 6, kWideRows = 6;

// Rows of a tile of queries and keys that are computed together in the columns that any of them sees: those of a block
// of vectors, or of a tile register.
template <typename P>
constexpr int64_t kRowGroup = kUsesAmx<P> ? 16 : kGroup;

inline int64_t rounded(int64_t n, int64_t step) { return (n + step - 1) / step * step; }

// c[m][n] = factor times the sum over k of a[m am + k ak] b[k ldb + n], and of c where `add`; the last of N vectors has
// `last` numbers where Partial.
template <typename P, int M, int N, bool Partial>
inline void block(int64_t depth, const P* a, int64_t am, int64_t ak, const P* b, int64_t ldb, Sum<P>* c, int64_t ldc,
                  bool add, Sum<P> factor, int64_t last) {
  using V = Vec<Sum<P>>;
  constexpr int64_t W = V::size();
  V sum[M][N];
#pragma GCC unroll 16
  for (int m = 0; m < M; ++m) {
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) {
      if (!add)
        sum[m][n] = V(Sum<P>(0));
      else if (Partial && n == N - 1)
        sum[m][n] = V::loadu(c + m * ldc + n * W, last);
      else
        sum[m][n] = V::loadu(c + m * ldc + n * W);
    }
  }
  for (int64_t k = 0; k < depth; ++k) {
    Vec<P> right[N];
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) {
      const P* from = b + k * ldb + n * W;
      right[n] = Partial && n == N - 1 ? Vec<P>::loadu(from, last) : Vec<P>::loadu(from);
    }
#pragma GCC unroll 16
    for (int m = 0; m < M; ++m) {
      const Vec<P> left(a[m * am + k * ak]);
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n) sum[m][n] = fmadd(left, right[n], sum[m][n]);
    }
  }
  if (factor != 1) {
#pragma GCC unroll 16
    for (int m = 0; m < M; ++m) {
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n) sum[m][n] = sum[m][n] * V(factor);
    }
  }
#pragma GCC unroll 16
  for (int m = 0; m < M; ++m) {
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) {
      if (Partial && n == N - 1)
        sum[m][n].store(c + m * ldc + n * W, last);
      else
        sum[m][n].store(c + m * ldc + n * W);
    }
  }
}

template <typename P, int M>
void columns(int64_t cols, int64_t depth, const P* a, int64_t am, int64_t ak, const P* b, int64_t ldb, Sum<P>* c,
             int64_t ldc, bool add, Sum<P> factor) {
  constexpr int64_t W = Vec<Sum<P>>::size();
  int64_t n = 0;
  if constexpr (kIsWide && M <= kWideRows)
    for (; n + 4 * W <= cols; n += 4 * W)
      block<P, M, 4, false>(depth, a, am, ak, b + n, ldb, c + n, ldc, add, factor, W);
  for (; n + 2 * W <= cols; n += 2 * W) block<P, M, 2, false>(depth, a, am, ak, b + n, ldb, c + n, ldc, add, factor, W);
  if (n + W <= cols) {
    block<P, M, 1, false>(depth, a, am, ak, b + n, ldb, c + n, ldc, add, factor, W);
    n += W;
  }
  if (n < cols) block<P, M, 1, true>(depth, a, am, ak, b + n, ldb, c + n, ldc, add, factor, cols - n);
}

// c (rows, cols) = factor times a b, or times c + a b: a[m am + k ak] with k < depth, rows of b and c ldb and ldc
// apart.
template <typename P>
void product(int64_t rows, int64_t cols, int64_t depth, const P* a, int64_t am, int64_t ak, const P* b, int64_t ldb,
             Sum<P>* c, int64_t ldc, bool add, Sum<P> factor = 1) {
#if defined(STRUCTATTN_HAS_AMX)
  if constexpr (kUsesAmx<P>) {
    if (amx::fits(rows, cols, depth, am, ak)) {  // the rows and columns that fill no register are left to vectors
      const int64_t whole_rows = rows / amx::kRows * amx::kRows, whole_cols = cols / amx::kNumbers * amx::kNumbers;
      amx::product(whole_rows, whole_cols, depth, a, am, ak, b, ldb, c, ldc, add, factor);
      if (whole_cols < cols)
        product<P>(whole_rows, cols - whole_cols, depth, a, am, ak, b + whole_cols, ldb, c + whole_cols, ldc, add,
                   factor);
      if (whole_rows < rows)
        product<P>(rows - whole_rows, cols, depth, a + whole_rows * am, am, ak, b, ldb, c + whole_rows * ldc, ldc, add,
                   factor);
      return;
    }
  }
#endif
  constexpr int64_t W = Vec<Sum<P>>::size();
  int64_t m = 0;
  if (cols <= W)  // one vector for each row: with kGroup sums alone, additions would wait for the ones before them
    for (; m + 2 * kGroup <= rows; m += 2 * kGroup) {
      if (cols == W)
        block<P, 2 * kGroup, 1, false>(depth, a + m * am, am, ak, b, ldb, c + m * ldc, ldc, add, factor, W);
      else
        block<P, 2 * kGroup, 1, true>(depth, a + m * am, am, ak, b, ldb, c + m * ldc, ldc, add, factor, cols);
    }
  const int64_t most = kIsWide && cols >= 4 * W ? kWideRows : kGroup;
  while (m < rows) {
    const int64_t left = rows - m, some = left > most && left < 2 * most
                                              ? (left + 1) / 2
                                              : std::min(left, most);  // 10 are 5 and 5, not 8 and 2
    const P* from = a + m * am;
    Sum<P>* to = c + m * ldc;
    switch (some) {
      case 1:
        columns<P, 1>(cols, depth, from, am, ak, b, ldb, to, ldc, add, factor);
        break;
      case 2:
        columns<P, 2>(cols, depth, from, am, ak, b, ldb, to, ldc, add, factor);
        break;
      case 3:
        columns<P, 3>(cols, depth, from, am, ak, b, ldb, to, ldc, add, factor);
        break;
      case 4:
        columns<P, 4>(cols, depth, from, am, ak, b, ldb, to, ldc, add, factor);
        break;
      case 5:
        columns<P, 5>(cols, depth, from, am, ak, b, ldb, to, ldc, add, factor);
        break;
      case 6:
        columns<P, 6>(cols, depth, from, am, ak, b, ldb, to, ldc, add, factor);
        break;
      case 7:
        columns<P, 7>(cols, depth, from, am, ak, b, ldb, to, ldc, add, factor);
        break;
      default:
        columns<P, kGroup>(cols, depth, from, am, ak, b, ldb, to, ldc, add, factor);
    }
    m += some;
  }
}

}  // namespace structattn
