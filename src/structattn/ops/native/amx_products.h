// Products of pairs of bfloat16 numbers by the tile registers of AMX, for the sizes that fill these.
#pragma once

#include "amx.h"
#include "operands.h"

#include <algorithm>

namespace structattn {

#if defined(STRUCTATTN_HAS_AMX)
#if !defined(__AVX512BF16__)
#error "products by AMX leave small sizes to AVX512-BF16: compile for both"
#endif
constexpr bool kHasAmx = true;
#else
constexpr bool kHasAmx = false;
#endif

// Whether products of these operands use tile registers.
template <typename P>
constexpr bool kUsesAmx = kHasAmx && kIsPair<P>;

// While it lives, products of P may use the tile registers of this thread. They are released at its end, also where an
// exception ends it: other libraries configure them for themselves.
template <typename P>
class RegistersFor {
 public:
  RegistersFor() {
#if defined(STRUCTATTN_HAS_AMX)
    if constexpr (kUsesAmx<P>) amx::configure();
#endif
  }
  ~RegistersFor() {
#if defined(STRUCTATTN_HAS_AMX)
    if constexpr (kUsesAmx<P>) amx::release();
#endif
  }
  RegistersFor(const RegistersFor&) = delete;
  RegistersFor& operator=(const RegistersFor&) = delete;
};

#if defined(STRUCTATTN_HAS_AMX)
namespace amx {

// The smallest products that are computed here: one whole register of sums, and half the pairs that a multiplication
// adds up. A multiplication takes the same time however few numbers are not 0, and sums travel through memory.
// These are reasoned from the sizes and latencies of the instructions, not measured.
constexpr int64_t kLeastRows = kRows, kLeastCols = kNumbers, kLeastDepth = kNumbers / 2;

constexpr int64_t kBlockRows = 2 * kRows, kBlockCols = 2 * kNumbers;  // four registers of sums
constexpr int64_t kMostTransposed = 2 * kNumbers;                     // pairs of depth: of a tile of 64 rows, all

// A left side of up to kBlockRows rows: whole steps of depth, and the step after them, which has zeros where it is not
// whole.
struct Left {
  const Pair* rows;
  int64_t stride;
  const Pair* last;
  int64_t last_stride;
};

// c (M registers, N registers) = a b, plus c where `add`.
template <int M, int N>
inline void block(int64_t depth, Left a, const Pair* b, int64_t ldb, float* c, int64_t ldc, bool add) {
  if (add) {
    load<0>(c, ldc);
    if constexpr (N == 2) load<1>(c + kNumbers, ldc);
    if constexpr (M == 2) load<2>(c + kRows * ldc, ldc);
    if constexpr (M == 2 && N == 2) load<3>(c + kRows * ldc + kNumbers, ldc);
  } else {
    zero<0>();
    if constexpr (N == 2) zero<1>();
    if constexpr (M == 2) zero<2>();
    if constexpr (M == 2 && N == 2) zero<3>();
  }
  const auto step = [](const Pair* left, int64_t left_stride, const Pair* right, int64_t right_stride) {
    load<4>(left, left_stride);
    load<6>(right, right_stride);
    multiply<0, 4, 6>();
    if constexpr (N == 2) {
      load<7>(right + kNumbers, right_stride);
      multiply<1, 4, 7>();
    }
    if constexpr (M == 2) {
      load<5>(left + kRows * left_stride, left_stride);
      multiply<2, 5, 6>();
    }
    if constexpr (M == 2 && N == 2) multiply<3, 5, 7>();
  };
  int64_t k = 0;
  for (; k + kNumbers <= depth; k += kNumbers) step(a.rows + k, a.stride, b + k * ldb, ldb);
  if (k < depth) {
    Vec<Pair> right[kRows * N];
    for (int64_t i = 0; i < kRows; ++i)
      for (int64_t n = 0; n < N; ++n)
        right[i * N + n] = k + i < depth ? Vec<Pair>::loadu(b + (k + i) * ldb + n * kNumbers) : Vec<Pair>(Pair());
    step(a.last, a.last_stride, reinterpret_cast<const Pair*>(right), N * kNumbers);
  }
  store<0>(c, ldc);
  if constexpr (N == 2) store<1>(c + kNumbers, ldc);
  if constexpr (M == 2) store<2>(c + kRows * ldc, ldc);
  if constexpr (M == 2 && N == 2) store<3>(c + kRows * ldc + kNumbers, ldc);
}

// Rows of pairs as a left side; the last step of depth is copied where it is not whole.
inline Left in_rows(const Pair* a, int64_t am, int64_t rows, int64_t depth, Pair* room) {
  const int64_t whole = depth / kNumbers * kNumbers;
  if (whole < depth)
    for (int64_t i = 0; i < rows; ++i) Vec<Pair>::loadu(a + i * am + whole, depth - whole).store(room + i * kNumbers);
  return {a, am, room, kNumbers};
}

// Columns of pairs, a (depth, rows) with at most kMostTransposed of depth, as a left side.
inline Left in_columns(const Pair* a, int64_t ak, int64_t rows, int64_t depth, Pair* room) {
  const int64_t whole = depth / kNumbers * kNumbers;
  if (whole < depth)
    for (int64_t i = 0; i < rows; ++i) Vec<Pair>(Pair()).store(room + i * kMostTransposed + whole);
  for (int64_t k = 0; k < depth; k += kNumbers)
    for (int64_t i = 0; i < rows; i += kRows)  // a pair has the size of a float
      transpose<float>(reinterpret_cast<const float*>(a + k * ak + i), ak, std::min(kNumbers, depth - k), kRows,
                       reinterpret_cast<float*>(room + i * kMostTransposed + k), kMostTransposed);
  return {room, kMostTransposed, room + whole, kMostTransposed};
}

inline void product(int64_t rows, int64_t cols, int64_t depth, const Pair* a, int64_t am, int64_t ak, const Pair* b,
                    int64_t ldb, float* c, int64_t ldc, bool add, float factor);

// Whether this machine's registers give the sums of products of small whole numbers, which have no rounding, for left
// sides in rows and in columns. It is asked once, by a thread whose registers are configured; where it is not so, all
// products are left to vectors.
inline bool are_right() {
  static const bool found = [] {
    constexpr int64_t kRowsHere = 3 * kRows, kColsHere = 3 * kNumbers, kDepthHere = kNumbers + 5;
    Pair a[kRowsHere * kDepthHere], turned[kRowsHere * kDepthHere], b[kDepthHere * kColsHere];
    float c[kRowsHere * kColsHere], d[kRowsHere * kColsHere];
    const auto number = [](int64_t n) { return static_cast<float>(n * n % 13 - 6); };
    const auto pair = [&](int64_t n) {
      return Pair{BFloat16(number(n)).bits | static_cast<uint32_t>(BFloat16(number(n + 5)).bits) << 16};
    };
    for (int64_t m = 0; m < kRowsHere; ++m)
      for (int64_t k = 0; k < kDepthHere; ++k) turned[k * kRowsHere + m] = a[m * kDepthHere + k] = pair(m + 7 * k);
    for (int64_t n = 0; n < kDepthHere * kColsHere; ++n) b[n] = pair(n);
    for (int64_t n = 0; n < kRowsHere * kColsHere; ++n) c[n] = 1;
    product(kRowsHere, kColsHere, kDepthHere, a, kDepthHere, 1, b, kColsHere, c, kColsHere, true, 2);
    product(kRowsHere, kColsHere, kDepthHere, turned, 1, kRowsHere, b, kColsHere, d, kColsHere, false, 1);
    for (int64_t m = 0; m < kRowsHere; ++m)
      for (int64_t n = 0; n < kColsHere; ++n) {
        float sum = 0;
        for (int64_t k = 0; k < kDepthHere; ++k) {
          const int64_t left = m + 7 * k, right = k * kColsHere + n;
          sum += number(left) * number(right) + number(left + 5) * number(right + 5);
        }
        if (c[m * kColsHere + n] != 2 * (1 + sum) || d[m * kColsHere + n] != sum) return false;
      }
    return true;
  }();
  return found;
}

// Whether a product is large enough, and its left side in rows or in columns.
inline bool fits(int64_t rows, int64_t cols, int64_t depth, int64_t am, int64_t ak) {
  return rows >= kLeastRows && cols >= kLeastCols && depth >= kLeastDepth && (ak == 1 || am == 1) && are_right();
}

// `product` for whole registers of sums: rows and columns are multiples of 16. Nothing beyond them or beyond the depth
// is read.
inline void product(int64_t rows, int64_t cols, int64_t depth, const Pair* a, int64_t am, int64_t ak, const Pair* b,
                    int64_t ldb, float* c, int64_t ldc, bool add, float factor) {
  Vec<Pair> vectors[kBlockRows * kMostTransposed / kNumbers];  // which are not set to 0, as pairs would be
  Pair* const room = reinterpret_cast<Pair*>(vectors);
  const int64_t most = ak == 1 ? depth : kMostTransposed;
  for (int64_t m = 0; m < rows; m += kBlockRows) {
    const int64_t some = std::min(kBlockRows, rows - m);
    float* const to = c + m * ldc;
    for (int64_t first = 0; first < depth; first += most) {
      const int64_t count = std::min(most, depth - first);
      const Pair* const from = a + m * am + first * ak;
      const Left left = ak == 1 ? in_rows(from, am, some, count, room) : in_columns(from, ak, some, count, room);
      const auto columns = [&]<int M>(std::integral_constant<int, M>) {
        const Pair* const right = b + first * ldb;
        int64_t n = 0;
        for (; n + kBlockCols <= cols; n += kBlockCols)
          block<M, 2>(count, left, right + n, ldb, to + n, ldc, add || first > 0);
        if (n < cols) block<M, 1>(count, left, right + n, ldb, to + n, ldc, add || first > 0);
      };
      if (some == kBlockRows)
        columns(std::integral_constant<int, 2>());
      else
        columns(std::integral_constant<int, 1>());
    }
    if (factor != 1)
      for (int64_t i = 0; i < some; ++i)
        for (int64_t n = 0; n < cols; n += kNumbers)
          (Vec<float>::loadu(to + i * ldc + n) * Vec<float>(factor)).store(to + i * ldc + n);
  }
}

}  // namespace amx
#endif

}  // namespace structattn
