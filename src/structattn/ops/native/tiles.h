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

// What all tiles of a call share. Slices of level l: dims[l] ... dims[l + 1] of the keys, value_dims[l] ... of the
// values.
template <typename T>
struct Layout {
  int64_t levels;
  std::vector<int64_t> dims, value_dims;
  std::vector<T> per_dim, per_count;  // the factor of the level of each dimension of the keys; of each number of levels
  bool has_sinks;                     // sink tokens, whose pairs share all levels: an entry more after the levels
  const int32_t *low, *high;          // (levels, positions): the keys of each level, for every position of a query
  int64_t first_position, num_positions;
  bool is_narrow = false;  // a slice may be added transposed, see Tile::add_to_columns

  int64_t dim() const { return dims.back(); }
  int64_t value_dim() const { return value_dims.back(); }

  Layout(const std::vector<int64_t>& ranks, const std::vector<int64_t>& value_ranks, const std::vector<double>& a,
         const std::vector<double>& c, const Tensor& intervals, int64_t first)
      : levels(static_cast<int64_t>(ranks.size())),
        dims{0},
        value_dims{0},
        has_sinks(intervals.size(1) > levels),
        first_position(first),
        num_positions(intervals.size(2)) {
    low = intervals.const_data_ptr<int32_t>();
    high = low + intervals.size(1) * num_positions;
    for (int64_t l = 0; l < levels; ++l) {
      dims.push_back(dims.back() + ranks[l]);
      value_dims.push_back(value_dims.back() + value_ranks[l]);
      per_dim.insert(per_dim.end(), ranks[l], static_cast<T>(a[l]));
      per_count.push_back(static_cast<T>(c[l]));
      for (const int64_t size : {ranks[l], value_ranks[l]})
        is_narrow = is_narrow || (size > 0 && size < 2 * Vec<T>::size());
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
template <typename T>
class Tile {
 public:
  int64_t from, cols, all;

  Tile(int64_t rows, int64_t first, int64_t last, int64_t all_share)
      : from(first), cols(last - first), all(all_share), rows_(rows) {}

  // The last level of those that are computed first, for all pairs that share any, counted from 0; the steps after it
  // are added.
  int64_t base() const { return (all > 0 ? all : steps_[0].last) - 1; }

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
    const int64_t noted = static_cast<int64_t>(column_groups_.size()), stripped = static_cast<int64_t>(strips_.size());
    const Interval none{static_cast<int32_t>(rows_), 0};
    column_groups_.resize(noted + num_groups(cols), none);
    strips_.resize(stripped + num_strips(), none);
    for (int64_t m = 0; m < rows_; m += kGroup) {
      Interval of_group{static_cast<int32_t>(cols), 0};
      for (int64_t i = m; i < std::min(m + kGroup, rows_); ++i) {
        const Interval own = interval(num_steps() - 1, i);
        if (own.is_empty()) continue;
        of_group = {std::min(of_group.low, own.low), std::max(of_group.high, own.high)};
        const auto add = [&](Interval& rows) {
          rows = {std::min(rows.low, static_cast<int32_t>(i)), static_cast<int32_t>(i + 1)};
        };
        for (int64_t n = own.low / kGroup; n <= (own.high - 1) / kGroup; ++n) add(column_groups_[noted + n]);
        for (int64_t n = own.low / kStrip; n <= (own.high - 1) / kStrip; ++n) add(strips_[stripped + n]);
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

  // Products of rows a (stride lda) and columns of b (dims, kCols), in the dimensions that each pair has; `ends` are
  // the slices of the levels. Levels that are added are scaled by `factors`, with what was there before; that of
  // `base()` is in a.
  void products(const std::vector<int64_t>& ends, const T* factors, const T* a, int64_t lda, const T* b, T* out) const {
    if (all > 0) {
      product<T>(rows_, rounded(cols, Vec<T>::size()), ends[all], a, lda, 1, b, kCols, out, kCols, false);
    } else {
      groups(0, [&](int64_t m, int64_t some, Interval c) {
        product<T>(some, c.high - c.low, ends[base() + 1], a + m * lda, lda, 1, b + c.low, kCols,
                   out + m * kCols + c.low, kCols, false);
      });
    }
    T found[kGroup * kCols];
    for (int64_t step = first_added(); step < num_steps(); ++step) {
      const auto [first, last] = steps_[step];
      const int64_t begin = ends[first], depth = ends[last] - begin;
      // a has the factor of `base()` in it.
      const T before = factors == nullptr ? T(1) : ratio(factors, last - 1, first - 1);
      const T factor = factors == nullptr ? T(1) : ratio(factors, last - 1, base());
      if (depth == 0 && before == 1) continue;
      groups(step, [&](int64_t m, int64_t some, Interval c) {
        if (depth > 0)
          product<T>(some, c.high - c.low, depth, a + m * lda + begin, lda, 1, b + begin * kCols + c.low, kCols,
                     found + c.low, kCols, false);
        for (int64_t i = 0; i < some; ++i)
          add_scaled<T>(interval(step, m + i), before, factor, depth > 0 ? found + i * kCols : nullptr,
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
  void walk(const std::vector<int64_t>& ends, T* x, const F& f) const {
    f(first_added() - 1, 0, ends[base() + 1]);
    for (int64_t step = first_added(); step < num_steps(); ++step) {
      const int64_t begin = ends[steps_[step].first], count = ends[steps_[step].last] - begin;
      if (count == 0) continue;
      for (int64_t i = 0; i < rows_; ++i) keep<T>(interval(step, i), 0, x + i * kCols);
      f(step, begin, count);
    }
  }

  // c (rows, size) += x b, with x as `walk` has it at a step.
  void add_to_rows(int64_t step, const T* x, const T* b, int64_t ldb, int64_t size, T* c, int64_t ldc) const {
    if (step == kAll) {
      product<T>(rows_, size, cols, x, kCols, 1, b, ldb, c, ldc, true);
      return;
    }
    groups(step, [&](int64_t m, int64_t some, Interval of) {
      product<T>(some, size, std::min<int64_t>(of.high, cols) - of.low, x + m * kCols + of.low, kCols, 1,
                 b + of.low * ldb, ldb, c + m * ldc, ldc, true);
    });
  }

  // c (columns, size) += x^T b, with x as `walk` has it at a step; or, where vectors of few dimensions would be nearly
  // empty, its transpose c_t (size, kCols), in which the columns fill them.
  void add_to_columns(int64_t step, const T* x, const T* b, int64_t ldb, int64_t size, T* c, int64_t ldc,
                      T* c_t) const {
    if (size < (step == kAll ? 2 : 1) * Vec<T>::size()) {
      add_to_columns_t(step, x, b, ldb, size, c_t);
      return;
    }
    if (step == kAll) {
      product<T>(cols, size, rows_, x, 1, kCols, b, ldb, c, ldc, true);
      return;
    }
    const Interval* rows = column_groups_.data() + step * num_groups(cols);
    for (int64_t n = 0; n < cols; n += kGroup, ++rows)
      if (!rows->is_empty())
        product<T>(std::min(kGroup, cols - n), size, rows->high - rows->low, x + rows->low * kCols + n, 1, kCols,
                   b + rows->low * ldb, ldb, c + n * ldc, ldc, true);
  }

 private:
  void add_to_columns_t(int64_t step, const T* x, const T* b, int64_t ldb, int64_t size, T* c_t) const {
    constexpr int64_t W = Vec<T>::size();
    static_assert(kStrip % W == 0 && kCols % kStrip == 0);
    if (step == kAll) {
      product<T>(size, rounded(cols, W), rows_, b, 1, ldb, x, kCols, c_t, kCols, true);
      return;
    }
    const Interval* rows = strips_.data() + step * num_strips();
    for (int64_t n = 0; n < cols; n += kStrip, ++rows)
      if (!rows->is_empty())
        product<T>(size, std::min(kStrip, rounded(cols - n, W)), rows->high - rows->low, b + rows->low * ldb, 1, ldb,
                   x + rows->low * kCols + n, kCols, c_t + n, kCols, true);
  }

  static int64_t num_groups(int64_t n) { return (n + kGroup - 1) / kGroup; }
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
    for (int64_t m = 0; m < rows_; m += kGroup, ++of_group)
      if (!of_group->is_empty()) f(m, std::min(kGroup, rows_ - m), *of_group);
  }

  static constexpr int64_t kAll = -1;
  struct Step {
    int64_t first, last;  // the levels first ... last - 1, counted from 0
  };

  int64_t rows_;
  std::vector<Step> steps_;
  std::vector<Interval> intervals_, groups_;      // of each step
  std::vector<Interval> column_groups_, strips_;  // the rows that any of some columns shares each step with
};

// The tiles of some queries, with all keys that they see. Those of a few positions are kept: other heads and sequences
// ask for them again.
template <typename T>
class Tiles {
 public:
  explicit Tiles(const Layout<T>& layout)
      : layout_(layout), low_((layout.levels + 1) * kRows), high_((layout.levels + 1) * kRows) {}

  // Valid until the next call.
  const std::vector<Tile<T>>& of(const Span& span, int64_t first, int64_t rows) {
    const int64_t start = span.position + first - layout_.first_position;
    const Key key{start, rows, span.num_keys};
    if (const auto found = known_.find(key); found != known_.end()) return found->second;
    if (key == last_key_) return last_;
    const bool is_kept = known_.size() < kKnown;
    if (!is_kept) last_key_ = key;
    std::vector<Tile<T>>& tiles = is_kept ? known_[key] : last_;
    tiles.clear();
    struct Ends {
      int64_t least_low, most_low, least_high, most_high;
    };
    std::vector<Ends> ends;
    for (int64_t l = 0; l < layout_.levels + layout_.has_sinks; ++l) {
      Ends e{span.num_keys, 0, span.num_keys, 0};
      for (int64_t i = 0; i < rows; ++i) {
        const int64_t at = l * layout_.num_positions + start + i;
        const int64_t low = low_[l * kRows + i] = std::min<int64_t>(layout_.low[at], span.num_keys);
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

  const Layout<T>& layout_;
  std::vector<int64_t> low_, high_;
  std::map<Key, std::vector<Tile<T>>> known_;  // of the first positions that were asked for
  Key last_key_{-1, -1, -1};
  std::vector<Tile<T>> last_;  // of the last one that is not among them
};

// x (count, dim), its rows `stride` apart, transposed by tiles of kCols rows: (tiles, dim, kCols), zero beyond the
// last.
template <typename T>
void pack(const T* x, int64_t stride, int64_t count, int64_t dim, T* out) {
  constexpr int64_t S = kSquare<T>;
  for (int64_t first = 0; first < count; first += kCols, out += dim * kCols) {
    const int64_t rows = std::min(kCols, count - first);
    if (rows < kCols) std::fill(out, out + dim * kCols, T(0));
    for (int64_t d = 0; d < dim; d += S)
      for (int64_t j = 0; j < rows; j += S)
        transpose<T>(x + (first + j) * stride + d, stride, std::min(S, rows - j), std::min(S, dim - d),
                     out + d * kCols + j, kCols);
  }
}

// Adds what `pack` would make of count rows to such rows: out (count, dim), its rows `stride` apart.
template <typename T>
void add_unpacked(const T* x, int64_t count, int64_t dim, T* out, int64_t stride) {
  constexpr int64_t S = kSquare<T>;
  for (int64_t first = 0; first < count; first += kCols, x += dim * kCols) {
    const int64_t rows = std::min(kCols, count - first);
    for (int64_t d = 0; d < dim; d += S) {
      for (int64_t j = 0; j < rows; j += S) {
        const int64_t some = std::min(S, rows - j), dims = std::min(S, dim - d);
        T square[S * S];
        transpose<T>(x + d * kCols + j, kCols, dims, some, square, S);
        for (int64_t n = 0; n < some; ++n)
          for (int64_t i = 0; i < dims; ++i) out[(first + j + n) * stride + d + i] += square[n * S + i];
      }
    }
  }
}

inline int64_t tiles_of(int64_t count, int64_t size) { return (count + size - 1) / size; }

}  // namespace structattn
