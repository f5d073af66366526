// Attention of the last tokens over what a cache keeps: pages of (rows, dims, slots), whose numbers lie side by side over positions.
#pragma once

#include "products.h"

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include <cmath>
#include <vector>

namespace structattn {

constexpr int64_t kChunk = 512;  // positions whose scores stay in the first cache while all dimensions are added

// Positions that lie side by side in a page, and the columns of the scores that they are. `first` is the first of the dimensions.
template <typename T>
struct CacheSpan {
  const T* numbers;
  int64_t stride, row_stride, dims, size, column, first;
  T before;  // what the scores of these columns are multiplied by before this level is added; 0 where nothing was
};

template <typename T>
std::vector<CacheSpan<T>> cache_spans(const at::TensorList pages, at::IntArrayRef places, at::ArrayRef<double> before) {
  std::vector<CacheSpan<T>> out;
  for (size_t n = 0; n < pages.size(); ++n) {
    const int64_t* p = places.data() + 4 * n;  // slot, size, column, first dimension
    const at::Tensor& x = pages[n];
    out.push_back({x.const_data_ptr<T>() + p[0], x.stride(1), x.stride(0), x.size(1), p[1], p[2], p[3], before.empty() ? T(0) : static_cast<T>(before[n])});
  }
  return out;
}

// out[c] = before * out[c] + sum over d of q[d] x[d stride + c].
template <typename T>
void add_scores(const T* q, const T* x, int64_t stride, int64_t dims, int64_t size, T before, T* out) {
  using V = Vec<T>;
  constexpr int64_t W = V::size();
  for (int64_t from = 0; from < size; from += kChunk) {
    const int64_t count = std::min(kChunk, size - from);
    T* to = out + from;
    if (before == 0) std::fill(to, to + count, T(0));
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
    const V e = exponential<T>(V::loadu(x + c) - shift);
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

// Weighted sums (query rows, value_dim). A row of `query` (key rows * m, dims), times `factors` (dims), reads the row of the pages that its m rows
// share, and so of values.
template <typename T>
at::Tensor decoded(const at::Tensor& query, const at::Tensor& factors, int64_t columns, int64_t value_dim, int64_t key_rows, int64_t value_rows,
                   const std::vector<CacheSpan<T>>& keys, const std::vector<CacheSpan<T>>& values) {
  const int64_t rows = query.size(0), dim = query.size(1), per_key = rows / key_rows, per_value = rows / value_rows;
  at::Tensor out = at::empty({rows, value_dim}, query.options());
  const T *q = query.const_data_ptr<T>(), *factor = factors.const_data_ptr<T>();
  T* to = out.data_ptr<T>();
  at::parallel_for(0, rows, 1, [&](int64_t begin, int64_t end) {
    std::vector<T> scaled(dim), weight(columns);
    for (int64_t r = begin; r < end; ++r) {
      for (int64_t d = 0; d < dim; ++d) scaled[d] = q[r * query.stride(0) + d * query.stride(1)] * factor[d];
      for (const CacheSpan<T>& span : keys)
        add_scores<T>(scaled.data() + span.first, span.numbers + r / per_key * span.row_stride, span.stride, span.dims, span.size, span.before,
                      weight.data() + span.column);
      softmax<T>(weight.data(), columns);
      T* sums = to + r * value_dim;
      std::fill(sums, sums + value_dim, T(0));
      for (const CacheSpan<T>& span : values) {
        const T* numbers = span.numbers + r / per_value * span.row_stride;
        for (int64_t d = 0; d < span.dims; ++d)
          sums[span.first + d] += dot<T>(weight.data() + span.column, numbers + d * span.stride, span.size);
      }
    }
  });
  return out;
}

// Writes one token into a slot of each page (rows, dims, slots), and returns what was there, if it is to be kept. `tokens` are (rows, dims), and
// have the dims of all pages in their order.
template <typename T>
std::vector<at::Tensor> exchanged(const at::TensorList tokens, const at::TensorList pages, at::IntArrayRef slots, bool keep) {
  std::vector<at::Tensor> out;
  size_t n = 0;
  for (const at::Tensor& x : tokens) {
    const int64_t rows = x.size(0), dims = x.size(1);
    if (keep) out.push_back(at::empty({rows, dims}, x.options()));
    T* const old = keep ? out.back().data_ptr<T>() : nullptr;
    for (int64_t first = 0; first < dims; ++n) {
      const at::Tensor& page = pages[n];
      T* const to = page.data_ptr<T>() + slots[n] * page.stride(2);
      const T* const from = x.const_data_ptr<T>() + first * x.stride(1);
      for (int64_t row = 0; row < rows; ++row)
        for (int64_t d = 0; d < page.size(1); ++d) {
          T& place = to[row * page.stride(0) + d * page.stride(1)];
          if (keep) old[row * dims + first + d] = place;
          place = from[row * x.stride(0) + d * x.stride(1)];
        }
      first += page.size(1);
    }
  }
  return out;
}

}  // namespace structattn
