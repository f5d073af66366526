// A token into what a cache keeps, and its attention.
#pragma once

#include "products.h"
#include "storage.h"

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>

#include <cmath>
#include <optional>
#include <vector>

namespace structattn {

constexpr int64_t kChunk = 512;  // positions whose scores stay in the first cache while all dimensions are added

// out[c] = before * out[c] + sum over d of q[d] x[d stride + c].
template <typename T>
void add_scores(const T* q, const T* x, int64_t stride, int64_t dims, int64_t size, T before, T* out) {
  using V = Vec<T>;
  constexpr int64_t W = V::size();
  for (int64_t from = 0; from < size; from += kChunk) {
    const int64_t count = std::min(kChunk, size - from);
    T* to = out + from;
    if (before == 0)
      std::fill(to, to + count, T(0));
    else if (before != 1)
      for (int64_t c = 0; c < count; ++c) to[c] *= before;
    int64_t d = 0;
    for (; d + 4 <= dims; d += 4) {
      const T *a = x + d * stride + from, *b = a + stride, *e = b + stride, *f = e + stride;
      const V qa(q[d]), qb(q[d + 1]), qe(q[d + 2]), qf(q[d + 3]);
      int64_t c = 0;
      for (; c + W <= count; c += W) {
        V sum = at::vec::fmadd(qa, V::loadu(a + c), V::loadu(to + c));
        V other = qb * V::loadu(b + c);
        sum = at::vec::fmadd(qe, V::loadu(e + c), sum);
        other = at::vec::fmadd(qf, V::loadu(f + c), other);
        (sum + other).store(to + c);
      }
      for (; c < count; ++c) to[c] += q[d] * a[c] + q[d + 1] * b[c] + q[d + 2] * e[c] + q[d + 3] * f[c];
    }
    for (; d < dims; ++d)
      for (int64_t c = 0; c < count; ++c) to[c] += q[d] * x[d * stride + from + c];
  }
}

// Makes scores weights that sum to 1.
template <typename T>
void softmax(T* x, int64_t size) {
  using V = Vec<T>;
  constexpr int64_t W = V::size();
  T most = x[0];
  int64_t c = 0;
  if (size >= W) {
    V top = V::loadu(x);
    for (c = W; c + W <= size; c += W) top = at::vec::maximum(top, V::loadu(x + c));
    most = at::vec::vec_reduce_all<T>([](V a, V b) { return at::vec::maximum(a, b); }, top);
  }
  for (; c < size; ++c) most = std::max(most, x[c]);
  const V shift(most);
  V added(0);
  T total = 0;
  for (c = 0; c + W <= size; c += W) {
    const V e = exponential<T>(V::loadu(x + c), shift);
    e.store(x + c);
    added = added + e;
  }
  for (; c < size; ++c) total += x[c] = std::exp(x[c] - most);
  total += at::vec::vec_reduce_all<T>([](V a, V b) { return a + b; }, added);
  const T factor = 1 / total;
  for (c = 0; c < size; ++c) x[c] *= factor;
}

template <typename T>
T dot(const T* a, const T* b, int64_t size) {
  using V = Vec<T>;
  constexpr int64_t W = V::size();
  V sum[4] = {V(0), V(0), V(0), V(0)};
  int64_t c = 0;
  for (; c + 4 * W <= size; c += 4 * W)
    for (int64_t n = 0; n < 4; ++n) sum[n] = at::vec::fmadd(V::loadu(a + c + n * W), V::loadu(b + c + n * W), sum[n]);
  for (; c + W <= size; c += W) sum[0] = at::vec::fmadd(V::loadu(a + c), V::loadu(b + c), sum[0]);
  T total = at::vec::vec_reduce_all<T>([](V x, V y) { return x + y; }, (sum[0] + sum[1]) + (sum[2] + sum[3]));
  for (; c < size; ++c) total += a[c] * b[c];
  return total;
}

// The scores of one softmax, and the values that they weigh.
template <typename T>
struct Weighed {
  int64_t columns;
  std::vector<CacheSpan<T>> keys, values;
};

template <typename T>
std::vector<Weighed<T>> weighed(const Kept& kept, int64_t position, const T* before) {
  std::vector<Weighed<T>> out;
  int64_t dim = 0;
  for (const std::vector<Stored>& levels : kept.keys) {
    const int64_t sinks = kept.num_sinks, first_seen = levels[0].seen(position, kept.chunk, sinks);
    const int64_t low = first_seen - sinks;  // the columns are sink tokens, then the positions from the first one seen
    Weighed<T> one{position + 1 - low, {}, {}};
    for (const Stored& level : levels) {
      if (sinks) add_spans<T>(kept.sinks[0], 0, sinks - 1, 0, 0, dim, *before, one.keys, dim, level.dims);
      add_spans<T>(level, level.seen(position, kept.chunk, sinks), position, level.begin(position, kept.chunk), low, dim,
                   *before++, one.keys);
      dim += level.dims;
    }
    if (sinks) add_spans<T>(kept.sinks[1], 0, sinks - 1, 0, 0, 0, T(0), one.values);
    int64_t value_dim = 0;
    for (size_t n = 0; n < kept.values.size(); ++n) {
      const Stored& level = kept.values[n];
      // Hierarchical values have the levels of the keys; others are all that the softmax sees.
      const int64_t first = n ? level.seen(position, kept.chunk, sinks) : first_seen;
      add_spans<T>(level, first, position, level.begin(position, kept.chunk), low, value_dim, T(0), one.values);
      value_dim += level.dims;
    }
    out.push_back(std::move(one));
  }
  return out;
}

// Weighted sums (B, H, 1, value dims) of queries (B, H, 1, D), times `factors` (D). The query heads of a key (or value)
// head read its row.
template <typename T>
void attend(const at::Tensor& query, const Order& order, const T* factors, const std::vector<Weighed<T>>& softmaxes,
            int64_t key_rows, int64_t value_rows, at::Tensor& out) {
  const int64_t heads = query.size(1), rows = query.size(0) * heads, dim = query.size(3), value_dim = out.size(3);
  const int64_t per_key = rows / key_rows, per_value = rows / value_rows;
  const T* q = query.const_data_ptr<T>();
  T* to = out.data_ptr<T>();
  int64_t columns = 0;
  for (const Weighed<T>& one : softmaxes) columns = std::max(columns, one.columns);
  at::parallel_for(0, rows, 1, [&](int64_t begin, int64_t end) {
    std::vector<T> scaled(dim), weight(columns);
    for (int64_t r = begin; r < end; ++r) {
      const T* from = q + r / heads * query.stride(0) + r % heads * query.stride(1);
      const int64_t* at = order.of(r % heads, heads);
      for (int64_t d = 0; d < dim; ++d) scaled[d] = from[(at ? at[d] : d) * query.stride(3)] * factors[d];
      T* sums = to + r * value_dim;
      std::fill(sums, sums + value_dim, T(0));
      for (const Weighed<T>& one : softmaxes) {
        for (const CacheSpan<T>& span : one.keys)
          add_scores<T>(scaled.data() + span.first, span.numbers + r / per_key * span.row_stride, span.stride,
                        span.dims, span.size, span.before, weight.data() + span.column);
        softmax<T>(weight.data(), one.columns);
        for (const CacheSpan<T>& span : one.values) {
          const T* numbers = span.numbers + r / per_value * span.row_stride;
          for (int64_t d = 0; d < span.dims; ++d)
            sums[span.first + d] += dot<T>(weight.data() + span.column, numbers + d * span.stride, span.size);
        }
      }
    }
  });
}

// Writes a token into what a cache keeps, and returns its attention to all tokens there are; without a query, nothing.
// What was in the slots of the token goes to `old`, with the number of the step in front of the plan, which says that
// it is there.
template <typename T>
at::Tensor stepped(const std::optional<at::Tensor>& q, const at::Tensor& k, const at::Tensor& v,
                   const at::Tensor& factors, const std::optional<at::Tensor>& order, const at::TensorList pages,
                   const at::Tensor& plan, const at::Tensor& old, int64_t position, int64_t number) {
  TORCH_CHECK(!order || (order->is_contiguous() && order->dim() == 2 && k.size(1) % order->size(0) == 0 &&
                         order->size(1) == k.size(3)),
              "an order of dimensions does not fit the keys");
  const Kept kept(plan, pages);
  at::Tensor out = q ? at::empty({q->size(0), q->size(1), 1, v.size(3)}, q->options()) : at::empty({0}, k.options());
  std::vector<Stored> keys;
  for (const std::vector<Stored>& levels : kept.keys) keys.insert(keys.end(), levels.begin(), levels.end());
  T* const before = old.data_ptr<T>();
  exchange<T>(k, Order(order), keys, position, kept.chunk, before);
  exchange<T>(v, Order(std::nullopt), kept.values, position, kept.chunk, before + k.numel());
  *plan.data_ptr<int64_t>() = number;
  if (!q) return out;
  const T* const factor = factors.const_data_ptr<T>();
  attend<T>(*q, Order(order), factor, weighed<T>(kept, position, factor + q->size(3)), keys[0].rows(),
            kept.values[0].rows(), out);
  return out;
}

}  // namespace structattn
