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

template <typename T>
struct View {  // of (..., B, H, T, D), with rows of neighbouring numbers
  T* data;
  int64_t batch, head, row;
  explicit View(const Tensor& x)
      : batch(x.stride(x.dim() - 4)), head(x.stride(x.dim() - 3)), row(x.stride(x.dim() - 2)) {
    if constexpr (std::is_const_v<T>)
      data = x.const_data_ptr<std::remove_const_t<T>>();
    else
      data = x.data_ptr<T>();
  }
  T* at(int64_t b, int64_t h, int64_t t) const { return data + b * batch + h * head + t * row; }
};

struct Work {  // a tile of queries of a head of a sequence
  int64_t span, head, first;
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
template <typename T>
Tensor results(const Tensor& like, int64_t size, int64_t rows, int64_t parts = 1) {
  const int64_t batch = like.size(0), heads = like.size(1), length = like.size(2), numbers = heads * length * size;
  const bool by_token = like.stride(1) > 0 && like.stride(1) < like.stride(2);
  std::vector<int64_t> sizes{batch, heads, length, size},
      strides{numbers, by_token ? size : length * size, by_token ? heads * size : size, 1};
  if (parts > 1) {
    sizes.insert(sizes.begin(), parts);
    strides.insert(strides.begin(), batch * numbers);
  }
  Tensor found = empty_strided(sizes, strides, like.dtype());
  if (rows != batch * length) std::fill_n(found.data_ptr<T>(), parts * batch * numbers, T(0));
  return found;
}

template <typename T>
void clear(T* x, int64_t stride, int64_t rows, int64_t size) {
  for (int64_t i = 0; i < rows; ++i) std::fill_n(x + i * stride, size, T(0));
}

int64_t queries_in(const std::vector<Span>& spans) {
  int64_t rows = 0;
  for (const Span& span : spans) rows += span.num_queries;
  return rows;
}

// Keys (or values) of all spans and heads, transposed, and where those of each begin. Heads that are one in memory are
// kept once.
template <typename T>
class Packed {
 public:
  Packed(const std::vector<Span>& spans, const Tensor& x)
      : heads_(x.stride(1) == 0 ? std::min<int64_t>(x.size(1), 1) : x.size(1)),
        dim_(x.size(3)),
        first_(begins(spans)),
        memory_(first_.back()) {
    const View<const T> view(x);
    parallel_for(static_cast<int64_t>(spans.size()) * heads_, [&](int64_t begin, int64_t end) {
      for (int64_t n = begin; n < end; ++n) {
        const Span& span = spans[n / heads_];
        pack<T>(view.at(span.row, n % heads_, span.key), view.row, span.num_keys, dim_,
                at(n / heads_, n % heads_, span));
      }
    });
  }

  T* at(int64_t number, int64_t head, const Span& span) const {
    return memory_.data() + first_[number] + head % heads_ * tiles_of(span.num_keys, kCols) * dim_ * kCols;
  }

 private:
  // Where the numbers of each span begin, and last where they end.
  std::vector<int64_t> begins(const std::vector<Span>& spans) const {
    std::vector<int64_t> out{0};
    for (const Span& span : spans) out.push_back(out.back() + tiles_of(span.num_keys, kCols) * dim_ * kCols * heads_);
    return out;
  }

  int64_t heads_, dim_;
  std::vector<int64_t> first_;
  Buffer<T> memory_;
};

// out = x times one number.
template <typename T>
inline void multiplied(const T* x, T factor, int64_t size, T* out) {
  map([factor](Vec<T> a) { return a * Vec<T>(factor); }, out, x, size);
}

// out = x times the factor of each level.
template <typename T>
void scaled(const Layout<T>& layout, const T* x, int64_t stride, int64_t rows, T* out, int64_t out_stride) {
  for (int64_t i = 0; i < rows; ++i)
    map2([](Vec<T> a, Vec<T> b) { return a * b; }, out + i * out_stride, x + i * stride, layout.per_dim.data(),
         layout.dim());
}

// Queries of a tile, also times the factor of a number of levels, which changes a few times only from the farthest keys
// to the nearest.
template <typename T>
class Query {
 public:
  explicit Query(const Layout<T>& layout) : layout_(layout), own_(kRows * layout.dim()), counted_(own_) {}

  void set(const T* x, int64_t stride, int64_t rows) {
    rows_ = rows, base_ = -1;
    scaled<T>(layout_, x, stride, rows, own_.data(), layout_.dim());
  }

  const T* data() const { return own_.data(); }

  const T* counted(int64_t base) {
    if (layout_.per_count[base] == 1) return own_.data();
    if (base != base_) {
      base_ = base;
      multiplied<T>(own_.data(), layout_.per_count[base], rows_ * layout_.dim(), counted_.data());
    }
    return counted_.data();
  }

 private:
  const Layout<T>& layout_;
  int64_t rows_ = 0, base_ = -1;
  std::vector<T> own_, counted_;
};

// Makes the scores of a row weights, and adds them up, into a vector of sums: only the last of them takes its numbers
// together. What was summed before is scaled where a larger score comes.
template <typename T>
void weigh(T* row, int64_t first, int64_t last, T* sums, int64_t size, T& most, T* total) {
  using V = Vec<T>;
  constexpr int64_t W = V::size();
  if (first == last) return;
  V top = V::loadu(row + first);
  for (int64_t c = first + W; c < last; c += W) top = maximum(top, V::loadu(row + c));
  if (!all_at_most(top, V(most))) {  // a larger one, or one that is not a number
    const T largest = largest_of(top);
    const T factor = most == kNone<T> ? T(0) : exponential(most - largest);
    (V::loadu(total) * V(factor)).store(total);
    if (most != kNone<T>) multiplied<T>(sums, factor, size, sums);
    most = largest;
  } else if (most == kNone<T>) {
    std::fill(row + first, row + last, T(0));
    return;
  }
  const V shift(most);
  V added = V::loadu(total);
  for (int64_t c = first; c < last; c += W) {
    const V weight = exponential(V::loadu(row + c), shift);
    weight.store(row + c);
    added = added + weight;
  }
  added.store(total);
}

template <typename T>
std::tuple<Tensor, Tensor> forward_of(const Tensor& q, const Tensor& k, const Tensor& v, const Layout<T>& layout,
                                      const Terms<T>& terms, const std::vector<Span>& spans) {
  using V = Vec<T>;
  constexpr int64_t W = V::size();
  const int64_t heads = q.size(1), share = heads / k.size(1), size = layout.value_dim();
  Tensor out = results<T>(q, size, queries_in(spans));
  Tensor lse = empty({q.size(0), heads, q.size(2)}, q.dtype());
  const Packed<T> keys(spans, k);
  const View<const T> queries_of(q), values(v);
  const View<T> outs(out);
  T* const lses = lse.data_ptr<T>();
  std::fill_n(lses, lse.numel(), kNone<T>);
  const int64_t num_queries = q.size(2);
  std::vector<Work> work;
  for (size_t n = 0; n < spans.size(); ++n) {
    const int64_t tiles = tiles_of(spans[n].num_queries, kRows);
    for (int64_t h = 0; h < heads; ++h)
      for (int64_t i = 0; i < tiles;
           ++i)  // the first and the last in turn: their work differs, that of the threads should not
        work.push_back({static_cast<int64_t>(n), h, (i % 2 ? tiles - 1 - i / 2 : i / 2) * kRows});
  }
  parallel_for(static_cast<int64_t>(work.size()), [&](int64_t begin, int64_t end) {
    std::vector<T> score(kRows * kCols), sums(kRows * size), most(kRows), total(kRows * W);
    Query<T> query(layout);
    Tiles<T> tiles(layout);
    for (int64_t n = begin; n < end; ++n) {
      const auto [number, head, first] = work[n];
      const Span& span = spans[number];
      const int64_t rows = std::min(kRows, span.num_queries - first);
      query.set(queries_of.at(span.row, head, span.query + first), queries_of.row, rows);
      std::fill_n(sums.begin(), rows * size, T(0));
      std::fill_n(most.begin(), rows, kNone<T>);
      std::fill_n(total.begin(), rows * W, T(0));
      const T* packed = keys.at(number, head / share, span);
      for (const Tile<T>& tile : tiles.of(span, first, rows)) {
        const T* key_t = packed + tile.from * layout.dim();
        tile.products(layout.dims, layout.per_count.data(), query.counted(tile.base()), layout.dim(), key_t,
                      score.data());
        terms.add(span, head, first, rows, tile, score.data(), nullptr);
        for (int64_t i = 0; i < rows; ++i) {
          const auto [low, high] = tile.seen(i, kNone<T>, score.data() + i * kCols);
          weigh<T>(score.data() + i * kCols, low, high, sums.data() + i * size, size, most[i], total.data() + i * W);
        }
        const T* value = values.at(span.row, head / share, span.key + tile.from);
        tile.walk(layout.value_dims, score.data(), [&](int64_t step, int64_t begin, int64_t count) {
          tile.add_to_rows(step, score.data(), value + begin, values.row, count, sums.data() + begin, size);
        });
      }
      T* const to_lse = lses + (span.row * heads + head) * num_queries + span.query + first;
      for (int64_t i = 0; i < rows; ++i) {
        const T weights = sum_of(V::loadu(total.data() + i * W));
        T* const to = outs.at(span.row, head, span.query + first + i);
        if (weights == 0) {  // it sees nothing
          std::fill_n(to, size, T(0));
          continue;
        }
        multiplied<T>(sums.data() + i * size, 1 / weights, size, to);
        to_lse[i] = most[i] + logarithm(weights);
      }
    }
  });
  return {std::move(out), std::move(lse)};
}

// The sum of the parts of `results`.
template <typename T>
Tensor sum_of_parts(const Tensor& like, const Tensor& parts, int64_t size, int64_t count, int64_t numbers) {
  constexpr int64_t kAtOnce = 4096;
  Tensor out = results<T>(like, size, like.size(0) * like.size(2));
  const T* const from = parts.const_data_ptr<T>();
  T* const to = out.data_ptr<T>();
  parallel_for(tiles_of(numbers, kAtOnce), [&](int64_t begin, int64_t end) {
    for (int64_t first = begin * kAtOnce; first < std::min(end * kAtOnce, numbers); first += kAtOnce) {
      const int64_t some = std::min(kAtOnce, numbers - first);
      std::copy_n(from + first, some, to + first);
      for (int64_t n = 1; n < count; ++n)
        map2([](Vec<T> a, Vec<T> b) { return a + b; }, to + first, to + first, from + n * numbers + first, some);
    }
  });
  return out;
}

template <typename T>
std::tuple<Tensor, Tensor, Tensor> backward_of(const Tensor& grad_out, const Tensor& q, const Tensor& k,
                                               const Tensor& v, const Tensor& lse, const Tensor& delta,
                                               const Layout<T>& layout, const Terms<T>& terms,
                                               const std::vector<Span>& spans) {
  using V = Vec<T>;
  constexpr int64_t W = V::size();
  const int64_t heads = q.size(1), groups = k.size(1), share = heads / groups, dim = layout.dim(),
                size = layout.value_dim();
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
  Tensor grad_q = results<T>(q, dim, queries_in(spans)), grad_k = results<T>(k, dim, num_keys, splits),
         grad_v = results<T>(v, size, num_keys, splits);
  const int64_t part_k = k.size(0) * groups * k.size(2) * dim, part_v = k.size(0) * groups * k.size(2) * size;
  const Packed<T> keys_t(spans, k), values_t(spans, v);
  const View<const T> queries_of(q), keys(k), outward(grad_out);
  const View<T> to_q(grad_q), to_k(grad_k), to_v(grad_v);
  const T *const lses = lse.const_data_ptr<T>(), *const deltas = delta.const_data_ptr<T>();
  parallel_for(pairs * splits, [&](int64_t begin, int64_t end) {
    std::vector<T> weight(kRows * kCols), change(kRows * kCols), sums(kRows * dim), shift(kRows),
        slope(terms.has_softcap() ? kRows * kCols : 0);
    // Gradients of a sequence and its key head, packed: what is added to narrow slices.
    std::vector<T> packed_k(layout.is_narrow ? most_keys * dim : 0), packed_v(layout.is_narrow ? most_keys * size : 0);
    Query<T> query(layout);
    Tiles<T> tiles(layout);
    for (int64_t n = begin; n < end; ++n) {
      const int64_t run = n / splits / groups, group = n / splits % groups, split = n % splits;
      const Span& keys_of = spans[runs[run]];
      clear(to_k.at(keys_of.row, group, keys_of.key) + split * part_k, to_k.row, keys_of.num_keys, dim);
      clear(to_v.at(keys_of.row, group, keys_of.key) + split * part_v, to_v.row, keys_of.num_keys, size);
      for (int64_t number = runs[run]; number < runs[run + 1]; ++number) {
        const Span& span = spans[number];
        const T *key_t = keys_t.at(number, group, span), *value_t = values_t.at(number, group, span);
        T* const own_k = to_k.at(span.row, group, span.key) + split * part_k;
        T* const own_v = to_v.at(span.row, group, span.key) + split * part_v;
        std::fill(packed_k.begin(), packed_k.end(), T(0));
        std::fill(packed_v.begin(), packed_v.end(), T(0));
        for (int64_t head = group * share; head < (group + 1) * share; ++head) {
          for (int64_t first = split * kRows; first < span.num_queries; first += splits * kRows) {
            const int64_t rows = std::min(kRows, span.num_queries - first),
                          at = (span.row * heads + head) * q.size(2) + span.query + first;
            query.set(queries_of.at(span.row, head, span.query + first), queries_of.row, rows);
            std::fill(sums.begin(), sums.end(), T(0));
            for (int64_t i = 0; i < rows; ++i) {  // a row that sees nothing has weights 0
              const T found = lses[at + i];
              shift[i] = found == kNone<T> ? -kNone<T> : found;
            }
            const T* drop = deltas + at;
            const T* own = outward.at(span.row, head, span.query + first);
            for (const Tile<T>& tile : tiles.of(span, first, rows)) {
              const T* factors = layout.per_count.data();
              tile.products(layout.dims, factors, query.counted(tile.base()), dim, key_t + tile.from * dim,
                            weight.data());
              terms.add(span, head, first, rows, tile, weight.data(), slope.empty() ? nullptr : slope.data());
              tile.products(layout.value_dims, nullptr, own, outward.row, value_t + tile.from * size, change.data());
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
              T *const of_values = own_v + tile.from * to_v.row, *const of_values_t =
                                                                     packed_v.data() + tile.from * size;
              tile.walk(layout.value_dims, weight.data(), [&](int64_t step, int64_t begin, int64_t count) {
                tile.add_to_columns(step, weight.data(), own + begin, outward.row, count, of_values + begin, to_v.row,
                                    of_values_t + begin * kCols);
              });
              tile.scale(factors, change.data());
              T *const of_keys = own_k + tile.from * to_k.row, *const of_keys_t = packed_k.data() + tile.from * dim;
              const T* key = keys.at(span.row, group, span.key + tile.from);
              tile.walk(layout.dims, change.data(), [&](int64_t step, int64_t begin, int64_t count) {
                tile.add_to_rows(step, change.data(), key + begin, keys.row, count, sums.data() + begin, dim);
                tile.add_to_columns(step, change.data(), query.data() + begin, dim, count, of_keys + begin, to_k.row,
                                    of_keys_t + begin * kCols);
              });
            }
            scaled<T>(layout, sums.data(), dim, rows, to_q.at(span.row, head, span.query + first), to_q.row);
          }
        }
        if (layout.is_narrow) {
          add_unpacked<T>(packed_k.data(), span.num_keys, dim, own_k, to_k.row);
          add_unpacked<T>(packed_v.data(), span.num_keys, size, own_v, to_v.row);
        }
      }
    }
  });
  if (splits > 1)
    return {std::move(grad_q), sum_of_parts<T>(k, grad_k, dim, splits, part_k),
            sum_of_parts<T>(v, grad_v, size, splits, part_v)};
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
  return q.dtype() == dtype_of<double>() ? f(double()) : f(float());
}

std::tuple<Tensor, Tensor> forward(const Tensor& q, const Tensor& k, const Tensor& v, STRUCTATTN_CALL) {
  return by_dtype(q, [&](auto zero) {
    using T = decltype(zero);
    const Layout<T> layout(ranks, value_ranks, per_level, per_count, intervals, first_position);
    return forward_of<T>(q, k, v, layout, Terms<T>(softcap, slopes, bias, mask), spans_of(spans));
  });
}

std::tuple<Tensor, Tensor, Tensor> backward(const Tensor& grad_out, const Tensor& q, const Tensor& k, const Tensor& v,
                                            const Tensor& lse, const Tensor& delta, STRUCTATTN_CALL) {
  return by_dtype(q, [&](auto zero) {
    using T = decltype(zero);
    const Layout<T> layout(ranks, value_ranks, per_level, per_count, intervals, first_position);
    return backward_of<T>(grad_out, q, k, v, lse, delta, layout, Terms<T>(softcap, slopes, bias, mask),
                          spans_of(spans));
  });
}

Tensor step(const std::optional<Tensor>& q, const Tensor& k, const Tensor& v, const Tensor& factors,
            const std::optional<Tensor>& order, const std::vector<Tensor>& pages, const Tensor& plan, const Tensor& old,
            int64_t position, int64_t number) {
  const auto of = [&](auto zero) {
    return stepped<decltype(zero)>(q, k, v, factors, order, pages, plan, old, position, number);
  };
  if (k.dtype() == dtype_of<BFloat16>()) return of(BFloat16());
  return k.dtype() == dtype_of<Half>() ? of(Half()) : by_dtype(k, of);
}

Tensor attend_pages(const Tensor& q, const Tensor& factors, const std::vector<Tensor>& parts,
                    const std::vector<Tensor>& tables, const Tensor& positions, const Tensor& plan, int64_t value_dim) {
  const auto of = [&](auto zero) {
    return attended<decltype(zero)>(q, factors, parts, tables, positions, plan, value_dim);
  };
  if (q.dtype() == dtype_of<BFloat16>()) return of(BFloat16());
  return q.dtype() == dtype_of<Half>() ? of(Half()) : by_dtype(q, of);
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
  out.add<backward>("backward(Tensor grad_out, Tensor q, Tensor k, Tensor v, Tensor lse, Tensor delta, " + call +
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
