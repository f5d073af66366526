// Structured attention on a CPU: forward and backward in one pass over tiles of queries and keys, in memory linear in
// their numbers.
//
// The weights are those of an online softmax, and are computed again from the log-sum-exp in the backward pass (Dao et
// al. 2022, FlashAttention).
#include "decode.h"
#include "operators.h"
#include "paged.h"
#include "quantize.h"
#include "terms.h"
#include "tiles.h"

#include <tuple>

namespace structattn {
namespace {

template <typename T>
constexpr T kNone = -std::numeric_limits<T>::infinity();

// So many tiles are added up before their sums are added to those of the tiles before: the error of a single sum grows
// with the number of its terms.
constexpr int64_t kTilesPerSum = 16;

// Adds numbers to others, and sets them to 0.
template <typename T>
inline void add_up(T* some, int64_t size, T* all) {
  map2([](Vec<T> a, Vec<T> b) { return a + b; }, all, all, some, size);
  std::fill_n(some, size, T(0));
}

template <typename T>
struct View {  // of (..., B, H, T, D), with rows of neighbouring numbers
  T* data;
  int64_t batch, head, row;
  explicit View(const Tensor& x)
      : batch(x.stride(x.dim() - 4)), head(x.stride(x.dim() - 3)), row(x.stride(x.dim() - 2)) {
    check(x.size(x.dim() - 1) == 1 || x.stride(x.dim() - 1) == 1,
          "structattn_native: the numbers of a row must be neighbours");
    if constexpr (std::is_const_v<T>)
      data = x.const_data_ptr<std::remove_const_t<T>>();
    else
      data = x.data_ptr<T>();
  }
  T* at(int64_t b, int64_t h, int64_t t) const { return data + b * batch + h * head + t * row; }
};

struct Work {  // a tile of queries of some heads of a sequence, which read the same keys
  int64_t span, head, num_heads, first;
};

std::vector<Span> spans_of(const Tensor& x) {
  std::vector<Span> out;
  const int64_t* p = x.const_data_ptr<int64_t>();
  for (int64_t n = 0; n < x.size(0); ++n, p += 6) out.push_back({p[0], p[1], p[2], p[3], p[4], p[5]});
  return out;
}

// Where spans with the same keys begin, those of a row with queries before its padding, and last the number of spans.
std::vector<int64_t> runs_of(const std::vector<Span>& spans) {
  std::vector<int64_t> runs;
  for (size_t n = 0; n < spans.size(); ++n)
    if (n == 0 || spans[n].row != spans[n - 1].row || spans[n].key != spans[n - 1].key)
      runs.push_back(static_cast<int64_t>(n));
  runs.push_back(static_cast<int64_t>(spans.size()));
  return runs;
}

// Memory for results (B, H, T, size) of some spans, with `rows` rows in each head: 0 only where there are more, which
// nothing writes. The order of heads and rows in memory is that of an input: projections of hidden states have the
// heads of a token side by side, and get gradients of this form without a copy. With several parts (parts, B, H, T,
// size). No views: autograd refuses changes in place of some.
template <typename R>
Tensor results(const Tensor& like, int64_t size, int64_t rows, int64_t parts = 1) {
  const int64_t batch = like.size(0), heads = like.size(1), length = like.size(2), numbers = heads * length * size;
  const bool by_token = like.stride(1) > 0 && like.stride(1) < like.stride(2);
  std::vector<int64_t> sizes{batch, heads, length, size},
      strides{numbers, by_token ? size : length * size, by_token ? heads * size : size, 1};
  if (parts > 1) {
    sizes.insert(sizes.begin(), parts);
    strides.insert(strides.begin(), batch * numbers);
  }
  Tensor found = empty_strided(sizes, strides, dtype_of<R>());
  if (rows != batch * length) std::fill_n(found.data_ptr<R>(), parts * batch * numbers, R(0));
  return found;
}

int64_t queries_in(const std::vector<Span>& spans) {
  int64_t rows = 0;
  for (const Span& span : spans) rows += span.num_queries;
  return rows;
}

// What is kept of the keys (or values) of all spans and heads, `per_tile` for each tile: fill(head, span, to) writes
// it. Heads that are one in memory are kept once.
template <typename S>
class Packed {
 public:
  template <typename F>
  Packed(const std::vector<Span>& spans, const Tensor& x, int64_t per_tile, const F& fill)
      : heads_(x.stride(1) == 0 ? std::min<int64_t>(x.size(1), 1) : x.size(1)),
        per_tile_(per_tile),
        first_(begins(spans)),
        memory_(first_.back()) {
    parallel_for(static_cast<int64_t>(spans.size()) * heads_, [&](int64_t begin, int64_t end) {
      for (int64_t n = begin; n < end; ++n)
        fill(n % heads_, spans[n / heads_], at(n / heads_, n % heads_, spans[n / heads_]));
    });
  }

  S* at(int64_t number, int64_t head, const Span& span) const {
    return memory_.data() + first_[number] + head % heads_ * tiles_of(span.num_keys, kCols) * per_tile_;
  }

 private:
  // Where that of each span begins, and last where it ends.
  std::vector<int64_t> begins(const std::vector<Span>& spans) const {
    std::vector<int64_t> out{0};
    for (const Span& span : spans) out.push_back(out.back() + tiles_of(span.num_keys, kCols) * per_tile_ * heads_);
    return out;
  }

  int64_t heads_, per_tile_;
  std::vector<int64_t> first_;
  Buffer<S> memory_;
};

// Numbers of pairs over the keys of a tile, which are kept in this order; others are read as they are.
template <typename I>
int64_t stacked_size(int64_t size) {
  return kIsPair<Operand<I>> ? size * kCols / 2 : 0;
}

// out = x times one number.
template <typename T, typename O>
inline void multiplied(const T* x, T factor, int64_t size, O* out) {
  constexpr int64_t W = Vec<T>::size();
  int64_t n = 0;
  for (; n + W <= size; n += W) store_numbers(Vec<T>::loadu(x + n) * Vec<T>(factor), out + n);
  for (; n < size; ++n) out[n] = O(x[n] * factor);
}

// Rows as operands: `stride` apart.
template <typename P>
struct Rows {
  const P* data;
  int64_t stride;
};

// Queries of a tile, or gradients of their outputs, as operands; where they are whole numbers, times a factor of each
// dimension.
template <typename I>
class Query {
 public:
  using P = Operand<I>;
  using T = Sum<P>;

  Query(const Slices<T>& slices, const T* factors, bool is_stacked)
      : slices_(slices),
        factors_(factors),
        rows_(kRows * slices.depth()),
        stacked_(kIsPair<P> && is_stacked ? kRows / 2 * slices.size() : 0) {}

  void set(const I* x, int64_t stride, int64_t rows) {
    if constexpr (kIsPair<P>) {
      pad(x, stride, rows, slices_, rows_.data());
      if (!stacked_.empty()) stack(x, stride, rows, slices_.size(), stacked_.data());
    } else {
      for (int64_t i = 0; i < rows; ++i)
        converted<T, I, T>(x + i * stride, factors_, slices_.size(), rows_.data() + i * slices_.size());
    }
  }

  // For sums over dimensions.
  Rows<P> rows() const { return {rows_.data(), slices_.depth()}; }
  // For sums over rows, (rows / kDepth, dimensions).
  Rows<P> stacked() const { return {stacked_.empty() ? rows_.data() : stacked_.data(), slices_.size()}; }

 private:
  const Slices<T>& slices_;
  const T* factors_;
  std::vector<P> rows_, stacked_;
};

// Keys (or values) of a tile as operands: numbers that are computed in another type are converted here.
template <typename I>
class Keys {
 public:
  using P = Operand<I>;

  // `numbers` of a tile.
  explicit Keys(int64_t numbers) : memory_(std::is_same_v<PackedAs<I>, P> ? 0 : numbers) {}

  // What `pack` has made of a tile, (depth, kCols).
  const P* packed(const PackedAs<I>* x, int64_t depth) {
    if constexpr (std::is_same_v<PackedAs<I>, P>) {
      return x;
    } else {
      converted<P, I, P>(x, nullptr, depth * kCols, memory_.data());
      return memory_.data();
    }
  }

  // The rows of a tile, for sums over keys: what `stack` has made of them where pairs are computed, else x.
  Rows<P> rows(const PackedAs<I>* stacked, const I* x, int64_t stride, int64_t cols, int64_t size) {
    if constexpr (kIsPair<P>) {
      return {stacked, size};
    } else if constexpr (std::is_same_v<I, P>) {
      return {x, stride};
    } else {
      for (int64_t j = 0; j < cols; ++j) converted<P, I, P>(x + j * stride, nullptr, size, memory_.data() + j * size);
      return {memory_.data(), size};
    }
  }

 private:
  std::vector<P> memory_;
};

// The numbers of a tile as operands of a product: those of a tile of their own where pairs are computed.
template <typename P>
class Weights {
 public:
  using T = Sum<P>;

  Weights(bool has_columns, bool has_rows)
      : over_columns_(kIsPair<P> && has_columns ? kRows * kCols / 2 : 0),
        over_rows_(kIsPair<P> && has_rows ? kRows * kCols / 2 : 0) {}

  Sides<P> of(T* x, int64_t rows) {
    if constexpr (kIsPair<P>) {
      const Sides<P> out{over_columns_.empty() ? nullptr : over_columns_.data(),
                         over_rows_.empty() ? nullptr : over_rows_.data()};
      to_pairs(x, rows, out);
      return out;
    } else {
      return {x, x};
    }
  }

 private:
  std::vector<P> over_columns_, over_rows_;
};

// Heads whose queries are computed together, where they read the same keys: their sums stay near.
constexpr int64_t kMostTogether = 8;
const std::vector<Span> kNoSpans;

// How much a score may be above the one that weights are relative to. Their sums stay far from the largest number, and
// seldom need another scale: only where a score comes that is larger than that.
constexpr int kSlack = 8;
// How often weights are halved, so that they are 1 at most: otherwise sums of values of 2^115 could be infinite.
constexpr int kHalvings = 12;

// Makes the scores of a row weights, and adds them up, into a vector of sums: only the last of them takes its numbers
// together. What was summed before, `sums` and the vectors of `totals`, is scaled where a much larger score comes.
template <typename T, size_t N>
void weigh(T* row, int64_t first, int64_t last, T* sums, int64_t size, T& most, const std::array<T*, N>& totals) {
  using V = Vec<T>;
  constexpr int64_t W = V::size();
  if (first == last) return;
  V top = V::loadu(row + first);
  for (int64_t c = first + W; c < last; c += W) top = maximum(top, V::loadu(row + c));
  if (!all_at_most(top, V(most + kSlack))) {  // a much larger one, or one that is not a number
    const T largest = largest_of(top);
    const T factor = most == kNone<T> ? T(0) : exponential(most - largest);
    for (T* total : totals) (V::loadu(total) * V(factor)).store(total);
    if (most != kNone<T>) multiplied<T>(sums, factor, size, sums);
    most = largest;
  } else if (most == kNone<T>) {
    std::fill(row + first, row + last, T(0));
    return;
  }
  const V shift(most);
  V added = V::loadu(totals[0]);
  for (int64_t c = first; c < last; c += W) {
    const V weight = exponential<kHalvings>(V::loadu(row + c), shift);
    weight.store(row + c);
    added = added + weight;
  }
  added.store(totals[0]);
}

// f(std::integral_constant<int, M>, first) for up to four rows at a time.
template <typename F>
void by_four(int64_t rows, const F& f) {
  int64_t m = 0;
  for (; m + 4 <= rows; m += 4) f(std::integral_constant<int, 4>(), m);
  if (rows - m == 3) f(std::integral_constant<int, 3>(), m);
  if (rows - m == 2) f(std::integral_constant<int, 2>(), m);
  if (rows - m == 1) f(std::integral_constant<int, 1>(), m);
}

// score (rows, kCols) = the products of `size` dimensions of queries, `q_row` apart, and some keys, `stride` apart; 0
// after the last.
template <typename T, typename I>
void score_keys(const T* q, int64_t q_row, int64_t rows, const I* keys, int64_t stride, int64_t count, int64_t size,
                T* score) {
  std::fill_n(score, rows * kCols, T(0));
  by_four(rows, [&](auto some, int64_t m) {
    // Two sums for each score, whatever M is: how many heads are together does not change a score.
    constexpr int M = some(), R = M == 1 ? 4 : M == 2 ? (kIsWide ? 4 : 2) : (kIsWide ? 2 : 1);
    int64_t j = 0;
    for (; j + R <= count; j += R)
      add_dots<M, R, 2>(q + m * q_row, q_row, keys + j * stride, stride, size, score + m * kCols + j, kCols, 1);
    for (; j < count; ++j)
      add_dots<M, 1, 2>(q + m * q_row, q_row, keys + j * stride, 0, size, score + m * kCols + j, kCols, 1);
  });
}

// sums (rows, size), `own` apart, += weights (rows, kCols) times some values, which lie `stride` apart.
template <typename T, typename I>
void add_weighed(const T* weights, int64_t rows, const I* values, int64_t stride, int64_t count, int64_t size, T* sums,
                 int64_t own) {
  using V = Vec<T>;
  constexpr int64_t W = V::size();
  by_four(rows, [&](auto some, int64_t m) {
    constexpr int M = some(), N = kIsWide || M == 1 ? 4 : 2;
    const auto add = [&]<int kVectors>(std::integral_constant<int, kVectors>, int64_t d) {
      V sum[M][kVectors];
#pragma GCC unroll 4
      for (int i = 0; i < M; ++i)
#pragma GCC unroll 4
        for (int n = 0; n < kVectors; ++n) sum[i][n] = V::loadu(sums + (m + i) * own + d + n * W);
      for (int64_t j = 0; j < count; ++j) {
        V value[kVectors];
#pragma GCC unroll 4
        for (int n = 0; n < kVectors; ++n) value[n] = load_numbers(values + j * stride + d + n * W);
#pragma GCC unroll 4
        for (int i = 0; i < M; ++i) {
          const V weight(weights[(m + i) * kCols + j]);
#pragma GCC unroll 4
          for (int n = 0; n < kVectors; ++n) sum[i][n] = fmadd(weight, value[n], sum[i][n]);
        }
      }
#pragma GCC unroll 4
      for (int i = 0; i < M; ++i)
#pragma GCC unroll 4
        for (int n = 0; n < kVectors; ++n) sum[i][n].store(sums + (m + i) * own + d + n * W);
    };
    int64_t d = 0;
    for (; d + N * W <= size; d += N * W) add(std::integral_constant<int, N>(), d);
    for (; d + W <= size; d += W) add(std::integral_constant<int, 1>(), d);
    for (; d < size; ++d)
      for (int i = 0; i < M; ++i)
        for (int64_t j = 0; j < count; ++j)
          sums[(m + i) * own + d] += weights[(m + i) * kCols + j] * static_cast<T>(values[j * stride + d]);
  });
}

template <typename I>
std::tuple<Tensor, Tensor> forward_of(const Tensor& q, const Tensor& k, const Tensor& v,
                                      const Layout<Operand<I>>& layout, const Terms<Sum<Operand<I>>>& terms,
                                      const std::vector<Span>& spans) {
  using P = Operand<I>;
  using T = Sum<P>;
  using V = Vec<T>;
  constexpr int64_t W = V::size();
  const int64_t heads = q.size(1), share = heads / k.size(1), dim = layout.dim(), size = layout.value_dim();
  const int64_t depth = layout.keys.depth(), stacked = stacked_size<I>(size);
  Tensor out = results<I>(q, size, queries_in(spans));
  Tensor lse = empty({q.size(0), heads, q.size(2)}, dtype_of<T>());
  const View<const I> queries_of(q), keys_of(k), values_of(v);
  const View<I> outs(out);
  // Where one tile has all queries of a head, each tile of keys is packed when it is read, for heads that share it:
  // no copy of all keys is made for few queries.
  int64_t most_rows = 0;
  for (const Span& span : spans) most_rows = std::max(most_rows, std::min(span.num_queries, kRows + 1));
  const bool is_read_once = most_rows <= kRows;
  const std::vector<Span>& packed = is_read_once ? kNoSpans : spans;
  const Packed<PackedAs<I>> keys(packed, k, depth * kCols, [&](int64_t head, const Span& span, PackedAs<I>* to) {
    pack<I>(keys_of.at(span.row, head, span.key), keys_of.row, span.num_keys, layout.keys, to);
  });
  const Packed<PackedAs<I>> values(packed, v, stacked, [&](int64_t head, const Span& span, PackedAs<I>* to) {
    if constexpr (kIsPair<P>) stack(values_of.at(span.row, head, span.key), values_of.row, span.num_keys, size, to);
  });
  T* const lses = lse.data_ptr<T>();
  std::fill_n(lses, lse.numel(), kNone<T>);
  const int64_t num_queries = q.size(2);
  int64_t together = 1;  // heads
  if (is_read_once) {
    most_rows = std::max<int64_t>(most_rows, 1);
    const int64_t all = static_cast<int64_t>(spans.size()) * heads;
    together = std::clamp<int64_t>(all / num_threads(), 1, std::min(share, kMostTogether));
  } else {
    most_rows = kRows;
  }
  std::vector<Work> work;
  for (size_t n = 0; n < spans.size(); ++n) {
    const int64_t tiles = tiles_of(spans[n].num_queries, kRows);
    for (int64_t h = 0, next = 0; h < heads; h = next) {
      next = std::min(h + together, (h / share + 1) * share);
      for (int64_t i = 0; i < tiles;
           ++i)  // the first and the last in turn: their work differs, that of the threads should not
        work.push_back({static_cast<int64_t>(n), h, next - h, (i % 2 ? tiles - 1 - i / 2 : i / 2) * kRows});
    }
  }
  const ShownTiles shown(spans, heads, terms.mask());
  parallel_for(static_cast<int64_t>(work.size()), [&](int64_t begin, int64_t end) {
    const RegistersFor<P> registers;
    // Of weights that are rounded, the sums of these divide the outputs: so a weight that outdoes all others is exact,
    // whatever it is rounded to.
    constexpr size_t kTotals = kIsPair<P> ? 2 : 1;
    // Of each row the sums over the last tiles, and after them those over all before, with their totals: of long rows
    // sums of sums.
    const int64_t own = 2 * size + static_cast<int64_t>(kTotals) * W, most_of_all = together * most_rows;
    std::vector<T> score(std::max(most_rows, together) * kCols), sums(most_of_all * own), most(most_of_all),
        total(kTotals * most_of_all * W), single(together * dim);
    T* const rounded = total.data() + (kTotals - 1) * most_of_all * W;
    std::vector<Query<I>> queries;
    for (int64_t h = 0; h < together; ++h) queries.emplace_back(layout.keys, layout.per_dim.data(), false);
    Keys<I> tile_keys(is_read_once ? 0 : dim * kCols), tile_values(size * kCols);
    const Buffer<P> own_keys(is_read_once ? depth * kCols : 0);
    const Buffer<PackedAs<I>> own_values(is_read_once ? stacked : 0);
    Weights<P> weights(true, false);
    Tiles<P> tiles(layout);
    const auto flush = [&](int64_t rows) {
      for (int64_t i = 0; i < rows; ++i) {
        T* const last = sums.data() + i * own;
        add_up(last, size, last + size);
        for (size_t n = 0; n < kTotals; ++n)
          add_up(total.data() + (n * most_of_all + i) * W, W, last + 2 * size + n * W);
      }
    };
    for (int64_t n = begin; n < end; ++n) {
      const auto [number, head, num_heads, first] = work[n];
      const Span& span = spans[number];
      const int64_t rows = std::min(kRows, span.num_queries - first), all_rows = num_heads * rows;
      for (int64_t h = 0; h < num_heads; ++h) {
        const I* const from = queries_of.at(span.row, head + h, span.query + first);
        queries[h].set(from, queries_of.row, rows);
        if (rows == 1) converted<T, I, T>(from, layout.per_dim.data(), dim, single.data() + h * dim);
      }
      std::fill_n(sums.begin(), all_rows * own, T(0));
      int64_t recent = 0;
      std::fill_n(most.begin(), all_rows, kNone<T>);
      std::fill(total.begin(), total.end(), T(0));
      for (const Tile<P>& tile : tiles.of(span, first, rows)) {
        if (!shown.has(number, head, num_heads, span, first, tile.from)) continue;
        const P* key = own_keys.data();
        const PackedAs<I>* value_rows = own_values.data();
        const I* const from = values_of.at(span.row, head / share, span.key + tile.from);
        if (is_read_once && rows == 1 && tile.is_even()) {  // one query of each head: nothing is packed
          const int64_t shared = layout.keys.numbers[tile.all], weighed = layout.values.numbers[tile.all];
          score_keys(single.data(), dim, num_heads, keys_of.at(span.row, head / share, span.key + tile.from),
                     keys_of.row, tile.cols, shared, score.data());
          const V factor(layout.per_count[tile.all - 1]);
          for (int64_t h = 0; h < num_heads; ++h) {
            T* const row = score.data() + h * kCols;
            map([&](V x) { return x * factor; }, row, row, kCols);
            terms.add(span, head + h, first, rows, tile, row, nullptr);
            const auto [low, high] = tile.seen(0, kNone<T>, row);
            std::array<T*, kTotals> totals{total.data() + h * W};
            totals.back() = rounded + h * W;
            weigh(row, low, high, sums.data() + h * own, own, most[h], totals);
            if constexpr (kTotals > 1)  // these weights are not rounded
              for (int64_t c = low; c < high; c += W)
                (V::loadu(totals.back()) + V::loadu(row + c)).store(totals.back());
          }
          add_weighed(score.data(), num_heads, from, values_of.row, tile.cols, weighed, sums.data(), own);
          if (++recent % kTilesPerSum == 0) flush(all_rows);
          continue;
        }
        if (is_read_once) {
          pack<I>(keys_of.at(span.row, head / share, span.key + tile.from), keys_of.row, tile.cols, layout.keys,
                  own_keys.data());
          if constexpr (kIsPair<P>) stack(from, values_of.row, tile.cols, size, own_values.data());
        } else {
          key = tile_keys.packed(keys.at(number, head / share, span) + tile.from * depth, depth);
          value_rows = values.at(number, head / share, span) + tile.from / kCols * stacked;
        }
        const auto [value, stride] = tile_values.rows(value_rows, from, values_of.row, tile.cols, size);
        for (int64_t h = 0; h < num_heads; ++h) {
          const int64_t at = h * rows;
          const auto [query_rows, query_stride] = queries[h].rows();
          tile.products(layout.keys, layout.per_count.data(), query_rows, query_stride, key, score.data());
          terms.add(span, head + h, first, rows, tile, score.data(), nullptr);
          for (int64_t i = 0; i < rows; ++i) {
            const auto [low, high] = tile.seen(i, kNone<T>, score.data() + i * kCols);
            std::array<T*, kTotals> totals{total.data() + (at + i) * W};
            totals.back() = rounded + (at + i) * W;
            weigh(score.data() + i * kCols, low, high, sums.data() + (at + i) * own, own, most[at + i], totals);
          }
          const Sides<P> sides = weights.of(score.data(), rows);
#if defined(__AVX512BF16__)
          if constexpr (kIsPair<P>) add_pairs(sides.over_columns, rows, rounded + at * W);
#endif
          tile.walk(layout.values.numbers, sides, [&](int64_t step, int64_t begin, int64_t count) {
            tile.add_to_rows(step, sides, value + begin, stride, count, sums.data() + at * own + begin, own);
          });
        }
        if (++recent % kTilesPerSum == 0) flush(all_rows);
      }
      flush(all_rows);
      for (int64_t n = 0; n < all_rows; ++n) {
        const int64_t h = head + n / rows, i = n % rows;
        const T* const all = sums.data() + n * own + size;
        const T weight = sum_of(V::loadu(all + size)), divisor = sum_of(V::loadu(all + size + (kTotals - 1) * W));
        I* const to = outs.at(span.row, h, span.query + first + i);
        if (divisor == 0) {  // it sees nothing
          std::fill_n(to, size, I(0));
          continue;
        }
        multiplied<T>(all, 1 / divisor, size, to);
        lses[(span.row * heads + h) * num_queries + span.query + first + i] =
            most[n] + logarithm(weight * (1 << kHalvings));
      }
    }
  });
  return {std::move(out), std::move(lse)};
}

// The sum of the parts of `results`.
template <typename T, typename I>
Tensor sum_of_parts(const Tensor& like, const Tensor& parts, int64_t size, int64_t count, int64_t numbers) {
  constexpr int64_t kAtOnce = 4096;
  Tensor out = results<I>(like, size, like.size(0) * like.size(2));
  const T* const from = parts.const_data_ptr<T>();
  I* const to = out.data_ptr<I>();
  parallel_for(tiles_of(numbers, kAtOnce), [&](int64_t begin, int64_t end) {
    std::vector<T> sum(kAtOnce);
    for (int64_t first = begin * kAtOnce; first < std::min(end * kAtOnce, numbers); first += kAtOnce) {
      const int64_t some = std::min(kAtOnce, numbers - first);
      std::copy_n(from + first, some, sum.data());
      for (int64_t n = 1; n < count; ++n)
        map2([](Vec<T> a, Vec<T> b) { return a + b; }, sum.data(), sum.data(), from + n * numbers + first, some);
      converted<T, T, I>(sum.data(), nullptr, some, to + first);
    }
  });
  return out;
}

template <typename I>
std::tuple<Tensor, Tensor, Tensor> backward_of(const Tensor& grad_out, const Tensor& q, const Tensor& k,
                                               const Tensor& v, const Tensor& out, const Tensor& lse,
                                               const std::optional<Tensor>& grad_lse, const Layout<Operand<I>>& layout,
                                               const Terms<Sum<Operand<I>>>& terms, const std::vector<Span>& spans) {
  using P = Operand<I>;
  using T = Sum<P>;
  using V = Vec<T>;
  constexpr int64_t W = V::size();
  const int64_t heads = q.size(1), groups = k.size(1), share = heads / groups, dim = layout.dim(),
                size = layout.value_dim(), depth = layout.keys.depth(), value_depth = layout.values.depth(),
                stacked = stacked_size<I>(dim);
  const std::vector<int64_t> runs = runs_of(spans);  // one thread adds to the gradients of the keys of a run
  const int64_t pairs = static_cast<int64_t>(runs.size() - 1) * groups, threads = num_threads();
  // Where there are fewer key heads than threads, each adds up gradients of keys and values of its own for a part of
  // the queries.
  int64_t splits = 1, most_tiles = 1, most_keys = 0;
  for (const Span& span : spans) {
    most_tiles = std::max(most_tiles, tiles_of(span.num_queries, kRows));
    most_keys = std::max(most_keys, tiles_of(span.num_keys, kCols) * kCols);
  }
  if (pairs == 0)
    splits = 1;  // all rows are padding
  else if (pairs < threads)
    splits = tiles_of(threads, pairs);
  else if (pairs % threads != 0 && pairs < 4 * threads)
    splits = tiles_of(4 * threads, pairs);
  splits = std::min(splits, most_tiles);
  int64_t num_keys = 0;
  for (size_t n = 0; n + 1 < runs.size(); ++n) num_keys += spans[runs[n]].num_keys;
  Tensor grad_q = results<I>(q, dim, queries_in(spans));
  // Parts are sums, which are rounded once all are added.
  Tensor grad_k = splits > 1 ? results<T>(k, dim, num_keys, splits) : results<I>(k, dim, num_keys);
  Tensor grad_v = splits > 1 ? results<T>(v, size, num_keys, splits) : results<I>(v, size, num_keys);
  const int64_t part_k = k.size(0) * groups * k.size(2) * dim, part_v = k.size(0) * groups * k.size(2) * size;
  const View<const I> queries_of(q), keys_of(k), values_of(v), outs(out), outward_of(grad_out);
  const View<I> to_q(grad_q);
  const T* const lses = lse.const_data_ptr<T>();
  const T* const grad_lses = grad_lse.has_value() ? grad_lse->const_data_ptr<T>() : nullptr;
  const ShownTiles shown(spans, heads, terms.mask());
  parallel_for(pairs * splits, [&](int64_t begin, int64_t end) {
    const RegistersFor<P> registers;
    std::vector<T> weight(kRows * kCols), change(kRows * kCols), sums(kRows * 2 * dim), shift(kRows), drop(kRows),
        slope(terms.has_softcap() ? kRows * kCols : 0);
    // Of a sequence and its key head: keys and values as `pack` and `stack` make them, and the gradients as `pack`
    // would.
    const Buffer<PackedAs<I>> key_t(most_keys * depth), value_t(most_keys * value_depth),
        key_rows(most_keys / kCols * stacked);
    std::vector<T> sums_k(most_keys * dim), sums_v(most_keys * size);
    // As sums of rows: those over the last tiles are added to these. 16 bits are rounded more than sums are.
    constexpr bool kAddsSums = std::is_same_v<I, float>;
    std::vector<T> all_k(kAddsSums ? most_keys * dim : 0), all_v(kAddsSums ? most_keys * size : 0);
    const auto add_sums = [&] {
      if constexpr (kAddsSums) {
        add_up(sums_k.data(), static_cast<int64_t>(sums_k.size()), all_k.data());
        add_up(sums_v.data(), static_cast<int64_t>(sums_v.size()), all_v.data());
      }
    };
    const auto flush = [&](int64_t rows) {
      for (int64_t i = 0; i < rows; ++i) {
        T* const own = sums.data() + i * 2 * dim;
        add_up(own, dim, own + dim);
      }
    };
    Query<I> query(layout.keys, layout.per_dim.data(), true), outward(layout.values, nullptr, true);
    Keys<I> tile_keys(dim * kCols), tile_key_rows(dim * kCols), tile_values(size * kCols);
    Weights<P> weights(false, true), changes(true, true);
    Tiles<P> tiles(layout);
    for (int64_t n = begin; n < end; ++n) {
      const int64_t run = n / splits / groups, group = n / splits % groups, split = n % splits;
      const Span& keys = spans[runs[run]];
      const I* const key = keys_of.at(keys.row, group, keys.key);
      const I* const value = values_of.at(keys.row, group, keys.key);
      pack<I>(key, keys_of.row, keys.num_keys, layout.keys, key_t.data());
      pack<I>(value, values_of.row, keys.num_keys, layout.values, value_t.data());
      if constexpr (kIsPair<P>) stack(key, keys_of.row, keys.num_keys, dim, key_rows.data());
      std::fill(sums_k.begin(), sums_k.end(), T(0));
      std::fill(sums_v.begin(), sums_v.end(), T(0));
      std::fill(all_k.begin(), all_k.end(), T(0));
      std::fill(all_v.begin(), all_v.end(), T(0));
      int64_t summed = 0;
      for (int64_t number = runs[run]; number < runs[run + 1]; ++number) {
        const Span& span = spans[number];
        for (int64_t head = group * share; head < (group + 1) * share; ++head) {
          for (int64_t first = split * kRows; first < span.num_queries; first += splits * kRows) {
            const int64_t rows = std::min(kRows, span.num_queries - first),
                          at = (span.row * heads + head) * q.size(2) + span.query + first;
            query.set(queries_of.at(span.row, head, span.query + first), queries_of.row, rows);
            const I* const own = outward_of.at(span.row, head, span.query + first);
            outward.set(own, outward_of.row, rows);
            std::fill(sums.begin(), sums.end(), T(0));
            for (int64_t i = 0; i < rows; ++i) {  // a row that sees nothing has weights 0
              shift[i] = lses[at + i] == kNone<T> ? -kNone<T> : lses[at + i];
              drop[i] =
                  sum_of_products<T>(own + i * outward_of.row, outs.at(span.row, head, span.query + first + i), size);
              if (grad_lses != nullptr) drop[i] -= grad_lses[at + i];
            }
            int64_t recent = 0;
            for (const Tile<P>& tile : tiles.of(span, first, rows)) {
              if (!shown.has(number, head, 1, span, first, tile.from)) continue;
              const T* factors = layout.per_count.data();
              const auto [query_rows, query_stride] = query.rows();
              tile.products(layout.keys, factors, query_rows, query_stride,
                            tile_keys.packed(key_t.data() + tile.from * depth, depth), weight.data());
              terms.add(span, head, first, rows, tile, weight.data(), slope.empty() ? nullptr : slope.data());
              const auto [outward_rows, outward_stride] = outward.rows();
              tile.products(layout.values, nullptr, outward_rows, outward_stride,
                            tile_values.packed(value_t.data() + tile.from * value_depth, value_depth), change.data());
              for (int64_t i = 0; i < rows; ++i) {
                T *w = weight.data() + i * kCols, *d = change.data() + i * kCols;
                const auto [low, high] = tile.seen(i, kNone<T>, w);
                tile.seen(i, T(0), d);
                const V lower(shift[i]), less(drop[i]), factor(factors[tile.base()]);
                for (int64_t c = low; c < high; c += W) {
                  const V p = exponential(V::loadu(w + c), lower);
                  p.store(w + c);
                  (p * (V::loadu(d + c) - less) * factor).store(d + c);
                }
                if (!slope.empty())  // what is hidden may be no number
                  for (int64_t c = low; c < high; ++c) d[c] = w[c] == 0 ? T(0) : d[c] * slope[i * kCols + c];
              }
              const Sides<P> weight_sides = weights.of(weight.data(), rows);
              const auto [stacked_out, stacked_out_stride] = outward.stacked();
              T* const of_values = sums_v.data() + tile.from * size;
              tile.walk(layout.values.numbers, weight_sides, [&](int64_t step, int64_t begin, int64_t count) {
                tile.add_to_columns(step, weight_sides, stacked_out + begin, stacked_out_stride, count,
                                    of_values + begin * kCols);
              });
              tile.scale(factors, change.data());
              const Sides<P> sides = changes.of(change.data(), rows);
              const auto [stacked_query, stacked_query_stride] = query.stacked();
              const auto [stacked_key, stacked_key_stride] =
                  tile_key_rows.rows(key_rows.data() + tile.from / kCols * stacked, key + tile.from * keys_of.row,
                                     keys_of.row, tile.cols, dim);
              T* const of_keys = sums_k.data() + tile.from * dim;
              tile.walk(layout.keys.numbers, sides, [&](int64_t step, int64_t begin, int64_t count) {
                tile.add_to_rows(step, sides, stacked_key + begin, stacked_key_stride, count, sums.data() + begin,
                                 2 * dim);
                tile.add_to_columns(step, sides, stacked_query + begin, stacked_query_stride, count,
                                    of_keys + begin * kCols);
              });
              if (++recent % kTilesPerSum == 0) flush(rows);
            }
            flush(rows);
            if (++summed % kTilesPerSum == 0) add_sums();
            for (int64_t i = 0; i < rows; ++i)
              converted<T, T, I>(sums.data() + (2 * i + 1) * dim, layout.per_dim.data(), dim,
                                 to_q.at(span.row, head, span.query + first + i));
          }
        }
      }
      add_sums();
      // Queries that are pairs do not have the factors of the levels in them.
      const T* const per_dim = kIsPair<P> ? layout.per_dim.data() : nullptr;
      const auto write = [&](const auto& to_k, const auto& to_v) {
        unpack<T>((kAddsSums ? all_k : sums_k).data(), keys.num_keys, dim, per_dim,
                  to_k.at(keys.row, group, keys.key) + split * part_k, to_k.row);
        unpack<T>((kAddsSums ? all_v : sums_v).data(), keys.num_keys, size, static_cast<const T*>(nullptr),
                  to_v.at(keys.row, group, keys.key) + split * part_v, to_v.row);
      };
      if (splits > 1)
        write(View<T>(grad_k), View<T>(grad_v));
      else
        write(View<I>(grad_k), View<I>(grad_v));
    }
  });
  if (splits > 1)
    return {std::move(grad_q), sum_of_parts<T, I>(k, grad_k, dim, splits, part_k),
            sum_of_parts<T, I>(v, grad_v, size, splits, part_v)};
  return {std::move(grad_q), std::move(grad_k), std::move(grad_v)};
}

// The arguments of a call. Of its layout: ranks, value ranks, factors per level and per number of levels, intervals (2,
// levels, positions), the position of their first. Of its scores: the soft cap, 0 for none; slopes (1 or B, H); bias
// and mask (B, H, T, S).
#define STRUCTATTN_CALL                                                                                             \
  const Tensor &spans, const std::vector<int64_t>&ranks, const std::vector<int64_t>&value_ranks,                    \
      const std::vector<double>&per_level, const std::vector<double>&per_count, const Tensor &intervals,            \
      int64_t first_position, double softcap, const std::optional<Tensor>&slopes, const std::optional<Tensor>&bias, \
      const std::optional<Tensor>&mask

template <typename F>
auto by_dtype(const Tensor& q, const F& f) {
  if (q.dtype() == dtype_of<double>()) return f(double());
  if (q.dtype() == dtype_of<BFloat16>()) return f(BFloat16());
  return q.dtype() == dtype_of<Half>() ? f(Half()) : f(float());
}

// Whether the tensors of a call fit each other: nothing else guards their memory.
void check_call(const Tensor& q, const Tensor& k, const Tensor& v, STRUCTATTN_CALL) {
  check(q.dim() == 4 && has_sizes(k, {q.size(0), -1, -1, q.size(3)}) &&
            has_sizes(v, {q.size(0), k.size(1), k.size(2), -1}) && k.size(1) > 0 && q.size(1) % k.size(1) == 0,
        "structattn_native: q, k and v are not (B, H, T, D), (B, G, S, D) and (B, G, S, V)");
  const int64_t batch = q.size(0), heads = q.size(1), num_queries = q.size(2), num_keys = k.size(2);
  const size_t levels = ranks.size();
  const auto sum_up = [](const std::vector<int64_t>& some, int64_t all) {
    for (const int64_t one : some) all = one < 0 || one > all ? -1 : all - one;
    return all == 0;
  };
  check(levels > 0 && value_ranks.size() == levels && per_level.size() == levels && per_count.size() == levels &&
            sum_up(ranks, q.size(3)) && sum_up(value_ranks, v.size(3)),
        "structattn_native: the ranks of the levels do not sum to the dimensions");
  check(
      intervals.dim() == 3 && intervals.size(0) == 2 && intervals.is_contiguous() &&
          (intervals.size(1) == static_cast<int64_t>(levels) || intervals.size(1) == static_cast<int64_t>(levels) + 1),
      "structattn_native: the intervals are not (2, levels, positions)");
  check(has_sizes(spans, {-1, 6}) && spans.is_contiguous(), "structattn_native: the spans are not (spans, 6)");
  const auto is_within = [](int64_t first, int64_t count, int64_t size) {
    return first >= 0 && count >= 0 && count <= size && first <= size - count;
  };
  for (const Span& span : spans_of(spans))
    check(is_within(span.row, 1, batch) && is_within(span.query, span.num_queries, num_queries) &&
              is_within(span.key, span.num_keys, num_keys) &&
              is_within(span.position - first_position, span.num_queries, intervals.size(2)),
          "structattn_native: a span is not within the queries, the keys and the intervals");
  check(!slopes || (has_sizes(*slopes, {-1, heads}) && (slopes->size(0) == 1 || slopes->size(0) == batch)),
        "structattn_native: the slopes are not (1 or B, H)");
  for (const std::optional<Tensor>* pairs : {&bias, &mask})
    check(!*pairs || has_sizes(**pairs, {batch, heads, num_queries, num_keys}),
          "structattn_native: the bias or the mask is not (B, H, T, S)");
}

std::tuple<Tensor, Tensor> forward(const Tensor& q, const Tensor& k, const Tensor& v, STRUCTATTN_CALL) {
  check_call(q, k, v, spans, ranks, value_ranks, per_level, per_count, intervals, first_position, softcap, slopes, bias,
             mask);
  return by_dtype(q, [&](auto zero) {
    using I = decltype(zero);
    const Layout<Operand<I>> layout(ranks, value_ranks, per_level, per_count, intervals, first_position);
    return forward_of<I>(q, k, v, layout, {softcap, slopes, bias, mask}, spans_of(spans));
  });
}

std::tuple<Tensor, Tensor, Tensor> backward(const Tensor& grad_out, const Tensor& q, const Tensor& k, const Tensor& v,
                                            const Tensor& out, const Tensor& lse, const std::optional<Tensor>& grad_lse,
                                            STRUCTATTN_CALL) {
  check_call(q, k, v, spans, ranks, value_ranks, per_level, per_count, intervals, first_position, softcap, slopes, bias,
             mask);
  for (const Tensor* x : {&grad_out, &out})
    check(has_sizes(*x, {q.size(0), q.size(1), q.size(2), v.size(3)}),
          "structattn_native: an output or its gradient is not (B, H, T, V)");
  for (const Tensor* x : {&lse, grad_lse ? &*grad_lse : &lse})
    check(has_sizes(*x, {q.size(0), q.size(1), q.size(2)}) && x->is_contiguous(),
          "structattn_native: a log-sum-exp or its gradient is not (B, H, T), contiguous");
  return by_dtype(q, [&](auto zero) {
    using I = decltype(zero);
    const Layout<Operand<I>> layout(ranks, value_ranks, per_level, per_count, intervals, first_position);
    return backward_of<I>(grad_out, q, k, v, out, lse, grad_lse, layout, {softcap, slopes, bias, mask},
                          spans_of(spans));
  });
}

Tensor step(const std::optional<Tensor>& q, const Tensor& k, const Tensor& v, const Tensor& factors,
            const std::optional<Tensor>& order, const std::vector<Tensor>& pages, const Tensor& plan, const Tensor& old,
            int64_t position, int64_t number) {
  return by_dtype(k, [&](auto zero) {
    return stepped<decltype(zero)>(q, k, v, factors, order, pages, plan, old, position, number);
  });
}

Tensor attend_pages(const Tensor& q, const Tensor& factors, const std::vector<Tensor>& parts,
                    const std::vector<Tensor>& tables, const Tensor& positions, const Tensor& plan, int64_t value_dim) {
  return by_dtype(
      q, [&](auto zero) { return attended<decltype(zero)>(q, factors, parts, tables, positions, plan, value_dim); });
}

std::tuple<Tensor, Tensor, Tensor> quantize(const Tensor& tokens, int64_t group_size, int64_t bits, int64_t per_token,
                                            const std::vector<int64_t>& hidden) {
  const auto of = [&](auto zero) { return quantized<decltype(zero)>(tokens, group_size, bits, per_token, hidden); };
  if (tokens.dtype() == dtype_of<BFloat16>()) return of(BFloat16());
  return tokens.dtype() == dtype_of<Half>() ? of(Half()) : of(float());
}

const Library library = [] {
  const std::string call =
      "Tensor spans, int[] ranks, int[] value_ranks, float[] per_level, float[] per_count, Tensor intervals, "
      "int first_position, float softcap, Tensor? slopes, Tensor? bias, Tensor? mask)";
  const Library out("structattn_native");
  out.add<forward>("forward(Tensor q, Tensor k, Tensor v, " + call + " -> (Tensor, Tensor)");
  out.add<backward>(
      "backward(Tensor grad_out, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor? grad_lse, " + call +
      " -> (Tensor, Tensor, Tensor)");
  out.add<step>(
      "step(Tensor? q, Tensor k, Tensor v, Tensor factors, Tensor? order, Tensor[](a!) pages, Tensor(b!) plan, "
      "Tensor(c!) old, int position, int number) -> Tensor");
  out.add<attend_pages>(
      "attend_pages(Tensor q, Tensor factors, Tensor[] parts, Tensor[] tables, Tensor positions, Tensor plan, int "
      "value_dim) -> Tensor");
  out.add<quantize>(
      "quantize(Tensor(a!) tokens, int group_size, int bits, int per_token, int[] hidden) -> (Tensor, Tensor, "
      "Tensor)");
  return out;
}();

}  // namespace
}  // namespace structattn
