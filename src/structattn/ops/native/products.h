// Small matrix products on rows of vector registers, with strides of their own for the left side: what every tile is
// made of.
#pragma once

#include <ATen/cpu/vec/functional.h>  // map and reductions; vec.h alone has the latter with AVX2 only
#include <ATen/cpu/vec/vec.h>

#include <algorithm>
#include <cstdint>
#include <type_traits>

namespace structattn {

template <typename T>
using Vec = at::vec::Vectorized<T>;

template <typename T>
constexpr bool kIsWide = sizeof(Vec<T>) == 64;  // AVX-512, which has 32 registers, not 16

// Rows that are computed together: their sums fit into the registers, with 2 vectors each; with 4 for the second
// number, on AVX-512 only.
constexpr int64_t kGroup = kIsWide<float> ? 8 : 6, kWideRows = 6;

inline int64_t rounded(int64_t n, int64_t step) { return (n + step - 1) / step * step; }

// c[m][n] = sum over k of a[m am + k ak] b[k ldb + n], added to c where `add`; the last of N vectors has `last` numbers
// where Partial.
template <typename T, int M, int N, bool Partial>
inline void block(int64_t depth, const T* a, int64_t am, int64_t ak, const T* b, int64_t ldb, T* c, int64_t ldc,
                  bool add, int64_t last) {
  constexpr int64_t W = Vec<T>::size();
  Vec<T> sum[M][N];
#pragma GCC unroll 16
  for (int m = 0; m < M; ++m) {
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) {
      if (!add)
        sum[m][n] = Vec<T>(0);
      else if (Partial && n == N - 1)
        sum[m][n] = Vec<T>::loadu(c + m * ldc + n * W, last);
      else
        sum[m][n] = Vec<T>::loadu(c + m * ldc + n * W);
    }
  }
  for (int64_t k = 0; k < depth; ++k) {
    Vec<T> right[N];
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) {
      const T* from = b + k * ldb + n * W;
      right[n] = Partial && n == N - 1 ? Vec<T>::loadu(from, last) : Vec<T>::loadu(from);
    }
#pragma GCC unroll 16
    for (int m = 0; m < M; ++m) {
      const Vec<T> left(a[m * am + k * ak]);
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n) sum[m][n] = at::vec::fmadd(left, right[n], sum[m][n]);
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

template <typename T, int M>
void columns(int64_t cols, int64_t depth, const T* a, int64_t am, int64_t ak, const T* b, int64_t ldb, T* c,
             int64_t ldc, bool add) {
  constexpr int64_t W = Vec<T>::size();
  int64_t n = 0;
  if constexpr (kIsWide<T> && M <= kWideRows)
    for (; n + 4 * W <= cols; n += 4 * W) block<T, M, 4, false>(depth, a, am, ak, b + n, ldb, c + n, ldc, add, W);
  for (; n + 2 * W <= cols; n += 2 * W) block<T, M, 2, false>(depth, a, am, ak, b + n, ldb, c + n, ldc, add, W);
  if (n + W <= cols) {
    block<T, M, 1, false>(depth, a, am, ak, b + n, ldb, c + n, ldc, add, W);
    n += W;
  }
  if (n < cols) block<T, M, 1, true>(depth, a, am, ak, b + n, ldb, c + n, ldc, add, cols - n);
}

// c (rows, cols) = a b, or c + a b: a[m am + k ak] with k < depth, rows of b and c ldb and ldc apart.
template <typename T>
void product(int64_t rows, int64_t cols, int64_t depth, const T* a, int64_t am, int64_t ak, const T* b, int64_t ldb,
             T* c, int64_t ldc, bool add) {
  constexpr int64_t W = Vec<T>::size();
  int64_t m = 0;
  if (cols <= W)  // one vector for each row: with kGroup sums alone, additions would wait for the ones before them
    for (; m + 2 * kGroup <= rows; m += 2 * kGroup) {
      if (cols == W)
        block<T, 2 * kGroup, 1, false>(depth, a + m * am, am, ak, b, ldb, c + m * ldc, ldc, add, W);
      else
        block<T, 2 * kGroup, 1, true>(depth, a + m * am, am, ak, b, ldb, c + m * ldc, ldc, add, cols);
    }
  const int64_t most = kIsWide<T> && cols >= 4 * W ? kWideRows : kGroup;
  while (m < rows) {
    const int64_t left = rows - m, some = left > most && left < 2 * most
                                              ? (left + 1) / 2
                                              : std::min(left, most);  // 10 are 5 and 5, not 8 and 2
    const T* from = a + m * am;
    T* to = c + m * ldc;
    switch (some) {
      case 1:
        columns<T, 1>(cols, depth, from, am, ak, b, ldb, to, ldc, add);
        break;
      case 2:
        columns<T, 2>(cols, depth, from, am, ak, b, ldb, to, ldc, add);
        break;
      case 3:
        columns<T, 3>(cols, depth, from, am, ak, b, ldb, to, ldc, add);
        break;
      case 4:
        columns<T, 4>(cols, depth, from, am, ak, b, ldb, to, ldc, add);
        break;
      case 5:
        columns<T, 5>(cols, depth, from, am, ak, b, ldb, to, ldc, add);
        break;
      case 6:
        columns<T, 6>(cols, depth, from, am, ak, b, ldb, to, ldc, add);
        break;
      case 7:
        columns<T, 7>(cols, depth, from, am, ak, b, ldb, to, ldc, add);
        break;
      default:
        columns<T, kGroup>(cols, depth, from, am, ak, b, ldb, to, ldc, add);
    }
    m += some;
  }
}

// e^(x - shift) for x up to `shift`, or a little above: the weights of softmax. It is 1 for x = shift, and 0 for what
// is hidden, -infinity.
//
// In float32 to 22 bits near `shift` and 18 far below, where PyTorch's own attention on a CPU has 20, and 0 below
// 2^-126. It takes y = (x - shift) / ln 2 apart into the nearest whole number n and r: 2^r is a polynomial, and n + 127
// are the bits of an exponent. The functions of PyTorch also take large numbers, in twice the instructions.
template <typename T>
inline Vec<T> exponential(const Vec<T>& x, const Vec<T>& shift) {
  if constexpr (std::is_same_v<T, float>) {
    using V = Vec<float>;
    const V y = at::vec::clamp_min((x - shift) * V(1.44269504f), V(-127.f));  // the exponent of -127 is that of 0
    const V whole(12582912.f +
                  127.f);  // 1.5 x 2^23: a sum with it has no bits for fractions, and the exponent as its last bits
    const V n = y + whole, r = y - (n - whole);
    // The coefficients are those with the least largest relative error, 1.1e-7, of the polynomials that are 1 at 0.
    V power = at::vec::fmadd(r, V(0.0013264727f), V(0.009671513f));
    power = at::vec::fmadd(r, power, V(0.055507336f));
    power = at::vec::fmadd(r, power, V(0.24022242f));
    power = at::vec::fmadd(r, power, V(0.693147f));
    power = at::vec::fmadd(r, power, V(1.f));
    return power * at::vec::cast<float>(at::vec::cast<int32_t>(n)
                                        << Vec<int32_t>(23));  // a product: what is no number stays none
  } else {
    return (x - shift).exp();
  }
}

}  // namespace structattn
