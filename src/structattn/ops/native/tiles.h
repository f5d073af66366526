// Tiles of queries and keys, and which levels their pairs share: of each query the keys of a level are one interval of
// positions.
#pragma once

#include "products.h"
#include "tensor.h"

#include <array>
#include <limits>
#include <map>
#include <tuple>
#include <vector>

namespace structattn {

constexpr int64_t kRows = 64;   // queries of a tile
constexpr int64_t kCols = 64;   // keys of a tile
constexpr int64_t kStrip = 16;  // columns whose rows are noted together, at least a vector

// A sequence: its batch row, its first query and key there, how many it has, and the position of its first query,
// counted from its first key.
struct Span {
  int64_t row, query, key, num_queries, num_keys, position;
};

// The slices of the levels of keys or values: level l has the numbers numbers[l] ... numbers[l + 1], and begins with an
// operand of its own.
template <typename T>
struct Slices {
  std::vector<int64_t> numbers{0}, operands{0};
  std::vector<T> factors;  // of the products of each level

  int64_t size() const { return numbers.back(); }
  int64_t depth() const { return operands.back(); }
  void add(int64_t rank, int64_t operand, T factor) {
    numbers.push_back(size() + rank);
    operands.push_back(depth() + (rank + operand - 1) / operand);
    factors.push_back(factor);
  }
};

// Rows of x as pairs, (rows, depth): the slice of each level begins with a pair, its last one may have a 0.
inline void pad(const BFloat16* x, int64_t stride, int64_t rows, const Slices<float>& slices, Pair* out) {
  const int64_t levels = static_cast<int64_t>(slices.factors.size()), depth = slices.depth();
  for (int64_t l = 0, end = 0; l < levels; l = end) {  // levels of which only the last is odd lie side by side
    while (end < levels && (slices.numbers[end + 1] - slices.numbers[end]) % 2 == 0) ++end;
    end = std::min(end + 1, levels);
    const int64_t begin = slices.numbers[l], count = slices.numbers[end] - begin;
    const BFloat16* from = x + begin;
    Pair* to = out + slices.operands[l];
    for (int64_t i = 0; i < rows; ++i, from += stride, to += depth) {
      if (count % 2 != 0) to[count / 2] = Pair();
      std::memcpy(static_cast<void*>(to), from, count * sizeof(BFloat16));
    }
  }
}

// What all tiles of a call share. Queries are multiplied by the factors of the levels before they are numbers of a
// product; as halves of pairs they would be rounded, and the products are multiplied.
template <typename P>
struct Layout {
  using T = Sum<P>;

  int64_t levels;
  Slices<T> keys, values;
  std::vector<T> per_dim, per_count;  // the factor of the level of each dimension of the keys; of each number of levels
  bool has_sinks;                     // sink tokens, whose pairs share all levels: an entry more after the levels
  const int32_t *low, *high;          // (levels, positions): the keys of each level, for every position of a query
  int64_t first_position, num_positions;

  int64_t dim() const { return keys.size(); }
  int64_t value_dim() const { return values.size(); }

  Layout(const std::vector<int64_t>& ranks, const std::vector<int64_t>& value_ranks, const std::vector<double>& a,
         const std::vector<double>& c, const Tensor& intervals, int64_t first)
      : levels(static_cast<int64_t>(ranks.size())),
        has_sinks(intervals.size(1) > levels),
        first_position(first),
        num_positions(intervals.size(2)) {
    low = intervals.const_data_ptr<int32_t>();
    high = low + intervals.size(1) * num_positions;
    for (int64_t l = 0; l < levels; ++l) {
      keys.add(ranks[l], kDepth<P>, kIsPair<P> ? static_cast<T>(a[l]) : T(1));
      values.add(value_ranks[l], kDepth<P>, 1);
      per_dim.insert(per_dim.end(), ranks[l], static_cast<T>(a[l]));
      per_count.push_back(static_cast<T>(c[l]));
    }
  }
};

// The columns low ... high of a tile.
struct Interval {
  int32_t low = 0, high = 0;
  bool is_empty() const { return low >= high; }
  bool operator==(const Interval&) const = default;
};

template <typename T>
constexpr std::array<T, kCols> numbered() {
  std::array<T, kCols> out{};
  for (int64_t c = 0; c < kCols; ++c) out[c] = static_cast<T>(c);
  return out;
}

template <typename T>
inline constexpr std::array<T, kCols> kColumns = numbered<T>();  // Vec::arange computes each number by itself

// Which of the columns from c on an interval holds, as many as a vector has.
template <typename T>
inline typename Vec<T>::Mask holds(Interval own, int32_t c) {
  const Vec<T> column = Vec<T>::loadu(kColumns<T>.data() + c);
  return (column >= Vec<T>(static_cast<T>(own.low))) & (column < Vec<T>(static_cast<T>(own.high)));
}

// Keeps the columns of an interval in a row of a tile; others in their vectors become `hidden`, and all beyond 0.
// Returns these whole vectors.
template <typename T>
inline Interval keep(Interval own, T hidden, T* row) {
  using V = Vec<T>;
  constexpr int32_t W = V::size();
  const Interval whole =
      own.is_empty() ? Interval{0, 0} : Interval{own.low / W * W, static_cast<int32_t>(rounded(own.high, W))};
  for (int32_t c = 0; c < kCols; c += W) {
    if (c + W <= whole.low || c >= whole.high)
      V(T(0)).store(row + c);
    else if (c < own.low || c + W > own.high)
      blend(V(hidden), V::loadu(row + c), holds<T>(own, c)).store(row + c);
  }
  return whole;
}

// The numbers of a tile as left sides of products: over its columns, (rows, kCols / kDepth), and over its rows,
// (rows / kDepth, kCols). Those of whole numbers are one; of pairs one may be missing.
template <typename P>
struct Sides {
  P *over_columns, *over_rows;
};

#if defined(__AVX512BF16__)
// The columns from c on that an interval holds, as bits; at most as many as there are bits.
inline uint32_t bits_of(Interval own, int32_t c, int32_t count) {
  const auto below = [&](int32_t end) {
    return end - c >= count ? ~uint32_t{0} >> (32 - count) : end > c ? (uint32_t{1} << (end - c)) - 1 : uint32_t{0};
  };
  return own.is_empty() ? 0 : below(own.high) & ~below(own.low);
}

// Keeps the columns of an interval in a row of a tile of pairs over its columns; all others become 0.
inline void keep_pairs(Interval own, Pair* row) {
  for (int32_t c = 0; c < kCols; c += 32) {
    Pair* const x = row + c / 2;
    _mm512_storeu_si512(x, _mm512_maskz_loadu_epi16(bits_of(own, c, 32), x));
  }
}

// The same of two rows, as pairs over the rows.
inline void keep_rows(Interval even, Interval odd, Pair* row) {
  for (int32_t c = 0; c < kCols; c += 16) {
    const __m512i x = _mm512_loadu_si512(row + c);
    const __m512i low = _mm512_maskz_and_epi32(bits_of(even, c, 16), x, _mm512_set1_epi32(0xffff));
    const __m512i high = _mm512_maskz_andnot_epi32(bits_of(odd, c, 16), _mm512_set1_epi32(0xffff), x);
    _mm512_storeu_si512(row + c, _mm512_or_si512(low, high));
  }
}

// Adds up the rounded numbers of the rows of a tile, each row into a vector of sums.
inline void add_pairs(const Pair* x, int64_t rows, float* sums) {
  const __m512bh ones = reinterpret_cast<__m512bh>(_mm512_set1_epi16(0x3f80));
  for (int64_t i = 0; i < rows; ++i, sums += 16) {
    __m512 sum = _mm512_loadu_ps(sums);
    for (int64_t c = 0; c < kCols / 2; c += 16, x += 16)
      sum = _mm512_dpbf16_ps(sum, reinterpret_cast<__m512bh>(_mm512_loadu_si512(x)), ones);
    _mm512_storeu_ps(sums, sum);
  }
}

// Rounds the rows of a tile to the sides that are there.
inline void to_pairs(const float* x, int64_t rows, Sides<Pair> out) {
  const auto rounded = [](__m512 low, __m512 high) {
    return reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(high, low));
  };
  const __m512i alternate = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6,
                                             21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
  if (out.over_columns != nullptr)
    for (int64_t n = 0; n < rows * kCols; n += 32)
      _mm512_storeu_si512(out.over_columns + n / 2, rounded(_mm512_loadu_ps(x + n), _mm512_loadu_ps(x + n + 16)));
  if (out.over_rows == nullptr) return;
  for (int64_t i = 0; i < rows; i += 2, out.over_rows += kCols)
    for (int64_t c = 0; c < kCols; c += 16) {
      const float* row = x + i * kCols + c;
      const __m512 odd = i + 1 < rows ? _mm512_loadu_ps(row + kCols) : _mm512_setzero_ps();
      _mm512_storeu_si512(out.over_rows + c, _mm512_permutexvar_epi16(alternate, rounded(_mm512_loadu_ps(row), odd)));
    }
}
#endif

// x = x times `before` in the columns of an interval, plus `factor` times y where it is given.
template <typename T>
inline void add_scaled(Interval own, T before, T factor, const T* y, T* x) {
  using V = Vec<T>;
  constexpr int32_t W = V::size();
  for (int32_t c = own.low / W * W; c < own.high; c += W) {
    const V old = V::loadu(x + c);
    V next = old * V(before);
    if (y != nullptr) next = fmadd(V(factor), V::loadu(y + c), next);
    if (c < own.low || c + W > own.high) next = blend(old, next, holds<T>(own, c));
    next.store(x + c);
  }
}

// Some keys for the queries of a tile: `from` and the `cols` after it. Numbers of a pair lie kCols apart by row.
//
// All pairs share `all` levels; where `all` is 0, some are hidden. Some pairs share more, in steps: levels that the
// same pairs share.
template <typename P>
class Tile {
 public:
  using T = Sum<P>;

  int64_t from, cols, all;

  Tile(int64_t rows, int64_t first, int64_t last, int64_t all_share)
      : from(first), cols(last - first), all(all_share), rows_(rows) {}

  // The last level of those that are computed first, for all pairs that share any, counted from 0; the steps after it
  // are added.
  int64_t base() const { return (all > 0 ? all : steps_[0].last) - 1; }

  // Whether all pairs share the same levels.
  bool is_even() const { return all > 0 && steps_.empty(); }

  // Notes the keys that each row shares the next level with: once for every level from `all` to the last that any pair
  // shares.
  void note(const int64_t* low, const int64_t* high) {
    constexpr int64_t W = Vec<T>::size();
    const int64_t level = steps_.empty() ? all : steps_.back().last;
    for (int64_t i = 0; i < rows_; ++i) {
      Interval own;
      own.low = static_cast<int32_t>(std::clamp<int64_t>(low[i] - from, 0, cols));
      own.high = static_cast<int32_t>(std::clamp<int64_t>(high[i] - from, own.low, cols));
      intervals_.push_back(own);
    }
    if (!steps_.empty() && std::equal(intervals_.end() - rows_, intervals_.end(), intervals_.end() - 2 * rows_)) {
      intervals_.resize(intervals_.size() - rows_);
      steps_.back().last = level + 1;
      return;
    }
    steps_.push_back({level, level + 1});
    const int64_t stripped = static_cast<int64_t>(strips_.size());
    strips_.resize(stripped + num_strips(), Interval{static_cast<int32_t>(rows_), 0});
    for (int64_t m = 0; m < rows_; m += kRowGroup<P>) {
      Interval of_group{static_cast<int32_t>(cols), 0};
      for (int64_t i = m; i < std::min(m + kRowGroup<P>, rows_); ++i) {
        const Interval own = interval(num_steps() - 1, i);
        if (own.is_empty()) continue;
        of_group = {std::min(of_group.low, own.low), std::max(of_group.high, own.high)};
        for (int64_t n = own.low / kStrip; n <= (own.high - 1) / kStrip; ++n) {
          Interval& rows = strips_[stripped + n];
          rows = {std::min(rows.low, static_cast<int32_t>(i)), static_cast<int32_t>(i + 1)};
        }
      }
      if (of_group.is_empty()) of_group = {0, 0};
      groups_.push_back({static_cast<int32_t>(of_group.low / W * W), static_cast<int32_t>(rounded(of_group.high, W))});
    }
  }

  // The columns, in whole vectors, that row i sees; those of them that it does not see become `hidden`, all others 0.
  Interval seen(int64_t i, T hidden, T* row) const {
    if (all > 0 && cols == kCols) return {0, kCols};
    return keep<T>(all > 0 ? Interval{0, static_cast<int32_t>(cols)} : interval(0, i), hidden, row);
  }

  // Products of rows a (stride lda) and columns of b (depth, kCols), in the slices of the levels that each pair has,
  // times `factors` of the number of these levels, where they are given.
  void products(const Slices<T>& slices, const T* factors, const P* a, int64_t lda, const P* b, T* out) const {
    const T factor = factors == nullptr ? T(1) : factors[base()];
    if (all > 0) {
      sliced(slices, 0, all, rows_, rounded(cols, Vec<T>::size()), factor, a, lda, b, out);
    } else {
      groups(0, [&](int64_t m, int64_t some, Interval c) {
        sliced(slices, 0, base() + 1, some, c.high - c.low, factor, a + m * lda, lda, b + c.low,
               out + m * kCols + c.low);
      });
    }
    T added[kRowGroup<P> * kCols];
    for (int64_t step = first_added(); step < num_steps(); ++step) {
      const auto [first, last] = steps_[step];
      const bool is_empty = slices.numbers[first] == slices.numbers[last];
      const T before = factors == nullptr ? T(1) : ratio(factors, last - 1, first - 1);
      const T after = factors == nullptr ? T(1) : factors[last - 1];
      if (is_empty && before == 1) continue;
      groups(step, [&](int64_t m, int64_t some, Interval c) {
        if (!is_empty) sliced(slices, first, last, some, c.high - c.low, 1, a + m * lda, lda, b + c.low, added + c.low);
        for (int64_t i = 0; i < some; ++i)
          add_scaled<T>(interval(step, m + i), before, after, is_empty ? nullptr : added + i * kCols,
                        out + (m + i) * kCols);
      });
    }
  }

  // Times the factor of the number of levels that each pair shares, over that of `base()`.
  void scale(const T* factors, T* x) const {
    for (int64_t step = first_added(); step < num_steps(); ++step) {
      const T before = ratio(factors, steps_[step].last - 1, steps_[step].first - 1);
      if (before == 1) continue;
      for (int64_t i = 0; i < rows_; ++i) add_scaled<T>(interval(step, i), before, 0, nullptr, x + i * kCols);
    }
  }

  // Calls f(step, first dimension, dimensions) for the slices of the levels that pairs share, those of `base()` and
  // before as one, whose step is kAll where all pairs share them; x is 0 then where they do not share the levels.
  template <typename F>
  void walk(const std::vector<int64_t>& ends, const Sides<P>& x, const F& f) const {
    f(first_added() - 1, 0, ends[base() + 1]);
    for (int64_t step = first_added(); step < num_steps(); ++step) {
      const int64_t begin = ends[steps_[step].first], count = ends[steps_[step].last] - begin;
      if (count == 0) continue;
      keep_step(step, x);
      f(step, begin, count);
    }
  }

  // c (rows, size) += x b, with x as `walk` has it at a step, and b (columns / kDepth, size).
  void add_to_rows(int64_t step, const Sides<P>& x, const P* b, int64_t ldb, int64_t size, T* c, int64_t ldc) const {
    constexpr int64_t kWidth = kCols / kDepth<P>;
    if (step == kAll) {
      product<P>(rows_, size, operands(cols), x.over_columns, kWidth, 1, b, ldb, c, ldc, true);
      return;
    }
    groups(step, [&](int64_t m, int64_t some, Interval of) {
      const int64_t low = of.low / kDepth<P>;
      product<P>(some, size, operands(std::min<int64_t>(of.high, cols)) - low, x.over_columns + m * kWidth + low,
                 kWidth, 1, b + low * ldb, ldb, c + m * ldc, ldc, true);
    });
  }

  // c (size, kCols) += b^T x, with x as `walk` has it at a step, and b (rows / kDepth, size). Its rows are dimensions:
  // the columns fill vectors, however few dimensions there are.
  void add_to_columns(int64_t step, const Sides<P>& x, const P* b, int64_t ldb, int64_t size, T* c) const {
    constexpr int64_t W = Vec<T>::size();
    static_assert(kStrip % W == 0 && kCols % kStrip == 0);
    if (step == kAll) {
      product<P>(size, rounded(cols, W), operands(rows_), b, 1, ldb, x.over_rows, kCols, c, kCols, true);
      return;
    }
    const Interval* rows = strips_.data() + step * num_strips();
    for (int64_t n = 0; n < cols; n += kStrip, ++rows) {
      if (rows->is_empty()) continue;
      const int64_t low = rows->low / kDepth<P>;
      product<P>(size, std::min(kStrip, rounded(cols - n, W)), operands(rows->high) - low, b + low * ldb, 1, ldb,
                 x.over_rows + low * kCols + n, kCols, c + n, kCols, true);
    }
  }

 private:
  // out = factor times the products of some levels. Levels with the same factor are one product.
  static void sliced(const Slices<T>& slices, int64_t first, int64_t last, int64_t rows, int64_t cols, T factor,
                     const P* a, int64_t lda, const P* b, T* out) {
    for (int64_t level = first, end = first; level < last; level = end) {
      const T own = slices.factors[level];
      while (end < last && slices.factors[end] == own) ++end;
      const int64_t begin = slices.operands[level];
      product<P>(rows, cols, slices.operands[end] - begin, a + begin, lda, 1, b + begin * kCols, kCols, out, kCols,
                 level > first, end < last ? own / slices.factors[end] : own * factor);
    }
  }

  void keep_step(int64_t step, const Sides<P>& x) const {
#if defined(__AVX512BF16__)
    if constexpr (kIsPair<P>) {
      for (int64_t i = 0; i < rows_ && x.over_columns != nullptr; ++i)
        keep_pairs(interval(step, i), x.over_columns + i * kCols / 2);
      for (int64_t i = 0; i < rows_ && x.over_rows != nullptr; i += 2)
        keep_rows(interval(step, i), i + 1 < rows_ ? interval(step, i + 1) : Interval(), x.over_rows + i / 2 * kCols);
      return;
    }
#endif
    if constexpr (!kIsPair<P>)
      for (int64_t i = 0; i < rows_; ++i) keep<T>(interval(step, i), 0, x.over_rows + i * kCols);
  }

  static int64_t operands(int64_t numbers) { return (numbers + kDepth<P> - 1) / kDepth<P>; }
  static int64_t num_groups(int64_t n) { return (n + kRowGroup<P> - 1) / kRowGroup<P>; }
  int64_t num_strips() const { return (cols + kStrip - 1) / kStrip; }

  int64_t num_steps() const { return static_cast<int64_t>(steps_.size()); }
  int64_t first_added() const { return all > 0 ? 0 : 1; }

  // The columns that row i shares the levels of a step with.
  Interval interval(int64_t step, int64_t i) const { return intervals_[step * rows_ + i]; }

  // The factor of one level over that of another, 1 where that is 0.
  static T ratio(const T* factors, int64_t level, int64_t of) {
    return factors[of] == 0 ? T(1) : factors[level] / factors[of];
  }

  // Calls f(first row, rows, columns) for groups of rows and the columns, in whole vectors, that any of them shares the
  // levels of a step with.
  template <typename F>
  void groups(int64_t step, const F& f) const {
    const Interval* of_group = groups_.data() + step * num_groups(rows_);
    for (int64_t m = 0; m < rows_; m += kRowGroup<P>, ++of_group)
      if (!of_group->is_empty()) f(m, std::min(kRowGroup<P>, rows_ - m), *of_group);
  }

  static constexpr int64_t kAll = -1;
  struct Step {
    int64_t first, last;  // the levels first ... last - 1, counted from 0
  };

  int64_t rows_;
  std::vector<Step> steps_;
  std::vector<Interval> intervals_, groups_;  // of each step
  std::vector<Interval> strips_;              // the rows that any of kStrip columns shares each step with
};

// The tiles of some queries, with all keys that they see. Those of a few positions are kept: other heads and sequences
// ask for them again.
template <typename P>
class Tiles {
 public:
  explicit Tiles(const Layout<P>& layout)
      : layout_(layout), low_((layout.levels + 1) * kRows), high_((layout.levels + 1) * kRows) {}

  // Valid until the next call.
  const std::vector<Tile<P>>& of(const Span& span, int64_t first, int64_t rows) {
    const int64_t start = span.position + first - layout_.first_position;
    const Key key{start, rows, span.num_keys};
    if (const auto found = known_.find(key); found != known_.end()) return found->second;
    if (key == last_key_) return last_;
    const bool is_kept = known_.size() < kKnown;
    if (!is_kept) last_key_ = key;
    std::vector<Tile<P>>& tiles = is_kept ? known_[key] : last_;
    tiles.clear();
    struct Ends {
      int64_t least_low, most_low, least_high, most_high;
    };
    std::vector<Ends> ends;
    for (int64_t l = 0; l < layout_.levels + layout_.has_sinks; ++l) {
      Ends e{span.num_keys, 0, span.num_keys, 0};
      for (int64_t i = 0; i < rows; ++i) {
        const int64_t at = l * layout_.num_positions + start + i;
        const int64_t low = low_[l * kRows + i] = std::clamp<int64_t>(layout_.low[at], 0, span.num_keys);
        const int64_t high = high_[l * kRows + i] = std::min<int64_t>(layout_.high[at], span.num_keys);
        e = {std::min(e.least_low, low), std::max(e.most_low, low), std::min(e.least_high, high),
             std::max(e.most_high, high)};
      }
      ends.push_back(e);
    }
    if (layout_.has_sinks) {
      const Ends& e = ends[layout_.levels];
      const int64_t *low = low_.data() + layout_.levels * kRows, *high = high_.data() + layout_.levels * kRows;
      for (int64_t from = 0; from < e.most_high; from += kCols) {
        const int64_t to = std::min(from + kCols, e.most_high), all = e.least_high >= to ? layout_.levels : 0;
        tiles.emplace_back(rows, from, to, all);
        for (int64_t l = all; l < layout_.levels; ++l) tiles.back().note(low, high);
      }
    }
    for (int64_t from = ends[0].least_low / kCols * kCols; from < ends[0].most_high; from += kCols) {
      const int64_t to = std::min(from + kCols, span.num_keys);
      int64_t all = 0;
      while (all < layout_.levels && ends[all].most_low <= from && ends[all].least_high >= to) ++all;
      int64_t any = all;
      while (any < layout_.levels && ends[any].least_low < to && ends[any].most_high > from) ++any;
      if (any == 0) continue;
      tiles.emplace_back(rows, from, to, all);
      for (int64_t l = all; l < any; ++l) tiles.back().note(low_.data() + l * kRows, high_.data() + l * kRows);
    }
    return tiles;
  }

 private:
  using Key = std::tuple<int64_t, int64_t, int64_t>;  // first position, number of queries, number of keys
  static constexpr size_t kKnown = 64;                // 4,096 positions

  const Layout<P>& layout_;
  std::vector<int64_t> low_, high_;
  std::map<Key, std::vector<Tile<P>>> known_;  // of the first positions that were asked for
  Key last_key_{-1, -1, -1};
  std::vector<Tile<P>> last_;  // of the last one that is not among them
};

// x (count, size), its rows `stride` apart, transposed by tiles of kCols rows: (tiles, depth, kCols), zero beyond the
// last.
template <typename I, typename O>
void pack(const I* x, int64_t stride, int64_t count, const Slices<Sum<Operand<I>>>& slices, O* out) {
  using T = Sum<Operand<I>>;
  constexpr int64_t S = kSquare<T>;
  const int64_t depth = slices.depth();
  std::vector<O> row(kIsPair<Operand<I>> ? S * depth : 0);
  for (int64_t first = 0; first < count; first += kCols, out += depth * kCols) {
    const int64_t rows = std::min(kCols, count - first);
    if (rows < kCols) std::fill(out, out + depth * kCols, O());
    for (int64_t j = 0; j < rows; j += S) {
      const I* const from = x + (first + j) * stride;
      const int64_t some = std::min(S, rows - j);
      if constexpr (kIsPair<Operand<I>>) pad(from, stride, some, slices, row.data());
      for (int64_t d = 0; d < depth; d += S) {
        const int64_t dims = std::min(S, depth - d);
        O* const to = out + d * kCols + j;
        if constexpr (kIsPair<Operand<I>>) {  // a pair has the size of a float
          transpose<float>(reinterpret_cast<const float*>(row.data() + d), depth, some, dims,
                           reinterpret_cast<float*>(to), kCols);
        } else if constexpr (std::is_same_v<I, T>) {
          transpose<T>(from + d, stride, some, dims, to, kCols);
        } else {
          T square[S * S];
          for (int64_t n = 0; n < some; ++n) converted<T, I, T>(from + n * stride + d, nullptr, dims, square + n * S);
          if constexpr (std::is_same_v<O, T>) {
            transpose<T>(square, S, some, dims, to, kCols);
          } else {
            T transposed[S * S];
            transpose<T>(square, S, some, dims, transposed, S);
            for (int64_t n = 0; n < dims; ++n) converted<T, T, O>(transposed + n * S, nullptr, some, to + n * kCols);
          }
        }
      }
    }
  }
}

// out (count, dim), its rows `stride` apart, = what `pack` would make of them, times the factor of each dimension where
// these are given.
template <typename T, typename O>
void unpack(const T* x, int64_t count, int64_t dim, const T* factors, O* out, int64_t stride) {
  constexpr int64_t S = kSquare<T>;
  for (int64_t first = 0; first < count; first += kCols, x += dim * kCols) {
    const int64_t rows = std::min(kCols, count - first);
    for (int64_t d = 0; d < dim; d += S) {
      for (int64_t j = 0; j < rows; j += S) {
        const int64_t some = std::min(S, rows - j), dims = std::min(S, dim - d);
        T square[S * S];
        transpose<T>(x + d * kCols + j, kCols, dims, some, square, S);
        for (int64_t n = 0; n < some; ++n)
          converted<T, T, O>(square + n * S, factors == nullptr ? nullptr : factors + d, dims,
                             out + (first + j + n) * stride + d);
      }
    }
  }
}

inline int64_t tiles_of(int64_t count, int64_t size) { return (count + size - 1) / size; }

}  // namespace structattn
