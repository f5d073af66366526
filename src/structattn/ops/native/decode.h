// A token into what a cache keeps, and its attention.
#pragma once

#include "products.h"
#include "storage.h"

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>

#include <cmath>
#include <cstring>
#include <optional>
#include <vector>

namespace structattn {

constexpr int64_t kChunk = 512;  // positions whose scores stay in the first cache while all dimensions are added

// As many numbers as a vector has, in the type that they are computed in.
template <typename S>
inline Vec<Sum<S>> load_numbers(const S* x) {
  if constexpr (std::is_same_v<S, Sum<S>>) {
    return Vec<S>::loadu(x);
  } else {
#if defined(CPU_CAPABILITY_AVX512)
    const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x));
    if constexpr (std::is_same_v<S, at::Half>) return _mm512_cvtph_ps(bits);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
#elif defined(CPU_CAPABILITY_AVX2)
    const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(x));
    if constexpr (std::is_same_v<S, at::Half>) return _mm256_cvtph_ps(bits);
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
#else
    float numbers[Vec<float>::size()];
    for (int64_t n = 0; n < Vec<float>::size(); ++n) numbers[n] = x[n];
    return Vec<float>::loadu(numbers);
#endif
  }
}

// out[c] = before * out[c] + sum over d of q[d] x[d stride + c].
template <typename S, typename T = Sum<S>>
void add_scores(const T* q, const S* x, int64_t stride, int64_t dims, int64_t size, T before, T* out) {
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
      const S *a = x + d * stride + from, *b = a + stride, *e = b + stride, *f = e + stride;
      const V qa(q[d]), qb(q[d + 1]), qe(q[d + 2]), qf(q[d + 3]);
      int64_t c = 0;
      for (; c + W <= count; c += W) {
        V sum = at::vec::fmadd(qa, load_numbers(a + c), V::loadu(to + c));
        V other = qb * load_numbers(b + c);
        sum = at::vec::fmadd(qe, load_numbers(e + c), sum);
        other = at::vec::fmadd(qf, load_numbers(f + c), other);
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

template <typename T, typename S>
T dot(const T* a, const S* b, int64_t size) {
  using V = Vec<T>;
  constexpr int64_t W = V::size();
  V sum[4] = {V(0), V(0), V(0), V(0)};
  int64_t c = 0;
  for (; c + 4 * W <= size; c += 4 * W)
    for (int64_t n = 0; n < 4; ++n)
      sum[n] = at::vec::fmadd(V::loadu(a + c + n * W), load_numbers(b + c + n * W), sum[n]);
  for (; c + W <= size; c += W) sum[0] = at::vec::fmadd(V::loadu(a + c), load_numbers(b + c), sum[0]);
  T total = at::vec::vec_reduce_all<T>([](V x, V y) { return x + y; }, (sum[0] + sum[1]) + (sum[2] + sum[3]));
  for (; c < size; ++c) total += a[c] * b[c];
  return total;
}

// Codes of a group as vectors of numbers: of 8 bits `bytes`, of 4 bits those in the low and those in the high halves.
template <typename T>
struct Codes {
  using V = Vec<T>;
  static constexpr int64_t W = V::size();
  // Of a dimension, whose bytes are read at once: enough sums for products that do not wait for each other.
  static constexpr int64_t kBytes = 32;

  static V bytes(const uint8_t* x) { return of<0, 255>(x); }
  static V low(const uint8_t* x) { return of<0, 15>(x); }
  static V high(const uint8_t* x) { return of<4, 15>(x); }

 private:
  template <int kShift, int kMask>
  static V of(const uint8_t* x) {
#if defined(CPU_CAPABILITY_AVX512) || defined(CPU_CAPABILITY_AVX2)
    if constexpr (std::is_same_v<T, float>) {
      __m128i all;
      if constexpr (W == 16)
        all = _mm_loadu_si128(reinterpret_cast<const __m128i*>(x));
      else
        all = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(x));
      if constexpr (kShift > 0) all = _mm_srli_epi16(all, kShift);
      if constexpr (kMask < 255) all = _mm_and_si128(all, _mm_set1_epi8(kMask));
#if defined(CPU_CAPABILITY_AVX512)
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

// Adds factor[d] code[d, c], summed over d, to the positions c that some bytes of each dimension hold: of 8 bits
// `low` ... ; of 4 bits those from `low` on in the low halves, from `high` on in the high ones.
template <typename T, bool kIsByte>
void add_codes(const T* factor, const uint8_t* codes, int64_t stride, int64_t dims, T* low, T* high) {
  using C = Codes<T>;
  constexpr int64_t kCount = C::kBytes * (kIsByte ? 2 : 1) / C::W;
  Vec<T> lower[kCount], upper[kCount];
  for (int64_t n = 0; n < kCount; ++n) {
    lower[n] = Vec<T>::loadu(low + n * C::W);
    if constexpr (!kIsByte) upper[n] = Vec<T>::loadu(high + n * C::W);
  }
  for (int64_t d = 0; d < dims; ++d, codes += stride) {
    const Vec<T> scale(factor[d]);
    for (int64_t n = 0; n < kCount; ++n) {
      const uint8_t* const x = codes + n * C::W;
      if constexpr (kIsByte) {
        lower[n] = at::vec::fmadd(scale, C::bytes(x), lower[n]);
      } else {
        lower[n] = at::vec::fmadd(scale, C::low(x), lower[n]);
        upper[n] = at::vec::fmadd(scale, C::high(x), upper[n]);
      }
    }
  }
  for (int64_t n = 0; n < kCount; ++n) {
    lower[n].store(low + n * C::W);
    if constexpr (!kIsByte) upper[n].store(high + n * C::W);
  }
}

// Room for what is computed of a group.
template <typename T>
struct GroupRoom {
  std::vector<T> scale, zero, sums, lanes;
  GroupRoom(int64_t group_size, int64_t dims)
      : scale(std::max(group_size, dims)), zero(scale.size()), sums(group_size), lanes(dims * Codes<T>::W) {}
};

template <typename T>
void copy_numbers(const T* from, int64_t count, T* to) {
  std::copy(from, from + count, to);
}
inline void copy_numbers(const at::Half* from, int64_t count, float* to) {
  int64_t n = 0;
#if defined(CPU_CAPABILITY_AVX512) || defined(CPU_CAPABILITY_AVX2)
  for (; n + 8 <= count; n += 8)
    _mm256_storeu_ps(to + n, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from + n))));
#endif
  for (; n < count; ++n) to[n] = from[n];
}

// out[c] = before * out[c] + sum over d of q[d] (zero[d] + scale[d] code[d, c]) for the positions of a span.
template <typename T>
void add_group_scores(const T* q, const GroupSpan<T>& span, int64_t row, int64_t group_size, GroupRoom<T>& room,
                      T* out) {
  const int64_t at_once = Codes<T>::kBytes * (span.bits == 8 ? 2 : 1);
  const uint8_t* codes = span.codes + row * span.row_stride;
  copy_numbers(span.scale + row * span.scale_stride, span.dims, room.scale.data());
  copy_numbers(span.zero + row * span.scale_stride, span.dims, room.zero.data());
  const T base = dot(q, room.zero.data(), span.dims);
  for (int64_t d = 0; d < span.dims; ++d) room.scale[d] *= q[d];
  const int64_t half = group_size / 2, bytes = span.bits == 8 ? group_size : half;
  T* const sums = room.sums.data();
  std::fill(sums, sums + group_size, T(0));
  int64_t c = 0;
  for (; c + at_once <= bytes; c += at_once) {
    if (span.bits == 8)
      add_codes<T, true>(room.scale.data(), codes + c, bytes, span.dims, sums + c, nullptr);
    else
      add_codes<T, false>(room.scale.data(), codes + c, bytes, span.dims, sums + c, sums + half + c);
  }
  for (int64_t d = 0; d < span.dims && c < bytes; ++d)
    for (int64_t n = c; n < bytes; ++n) {
      const uint8_t x = codes[d * bytes + n];
      if (span.bits == 8) {
        sums[n] += room.scale[d] * static_cast<T>(x);
      } else {
        sums[n] += room.scale[d] * static_cast<T>(x & 15);
        sums[half + n] += room.scale[d] * static_cast<T>(x >> 4);
      }
    }
  for (int64_t n = 0; n < span.size; ++n)
    out[n] = (span.before == 0 ? T(0) : span.before * out[n]) + base + sums[span.skip + n];
}

// Adds the values of a span, weighed, to out (dims), and to `room.lanes`, which are to be summed for each dimension.
template <typename T>
void add_group_values(const T* weight, const GroupSpan<T>& span, int64_t row, int64_t group_size, GroupRoom<T>& room,
                      T* out) {
  using C = Codes<T>;
  const uint8_t* codes = span.codes + row * span.row_stride;
  const int64_t half = group_size / 2, bytes = span.bits == 8 ? group_size : half;
  for (int64_t first = 0, part = 0; first < span.dims; first += group_size, ++part) {
    const int64_t at = row * span.scale_stride + part * group_size;
    T *const scaled = room.scale.data(), *const zero = room.zero.data();
    copy_numbers(span.scale + at, group_size, scaled);
    copy_numbers(span.zero + at, group_size, zero);
    const T base = dot(weight, zero + span.skip, span.size);
    std::fill(scaled, scaled + span.skip, T(0));
    for (int64_t n = 0; n < span.size; ++n) scaled[span.skip + n] *= weight[n];
    const int64_t last = std::min(first + group_size, span.dims);
    for (int64_t d = first; d < last; ++d) {
      const uint8_t* const own = codes + d * bytes;
      Vec<T> sum = Vec<T>::loadu(room.lanes.data() + d * C::W), other(0);
      T total = base;
      int64_t c = 0;
      if (span.bits == 8) {
        for (; c + 2 * C::W <= bytes; c += 2 * C::W) {
          sum = at::vec::fmadd(Vec<T>::loadu(scaled + c), C::bytes(own + c), sum);
          other = at::vec::fmadd(Vec<T>::loadu(scaled + c + C::W), C::bytes(own + c + C::W), other);
        }
        for (; c < bytes; ++c) total += scaled[c] * static_cast<T>(own[c]);
      } else {
        for (; c + C::W <= bytes; c += C::W) {
          sum = at::vec::fmadd(Vec<T>::loadu(scaled + c), C::low(own + c), sum);
          other = at::vec::fmadd(Vec<T>::loadu(scaled + half + c), C::high(own + c), other);
        }
        for (; c < bytes; ++c)
          total += scaled[c] * static_cast<T>(own[c] & 15) + scaled[half + c] * static_cast<T>(own[c] >> 4);
      }
      (sum + other).store(room.lanes.data() + d * C::W);
      out[d] += total;
    }
  }
}

// The scores of one softmax, and the values that they weigh.
template <typename S>
struct Weighed {
  int64_t columns;
  std::vector<CacheSpan<S>> keys, values;
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
    add_groups<Sum<S>>(level, first, exact, begin, low, dim, before, kept.group_size, groups);
  }
  add_spans<S>(level, exact, position, begin, low, dim, before, spans);
}

template <typename S>
std::vector<Weighed<S>> weighed(const Kept& kept, int64_t position, const Sum<S>* before) {
  std::vector<Weighed<S>> out;
  int64_t dim = 0;
  for (const std::vector<Stored>& levels : kept.keys) {
    const int64_t sinks = kept.num_sinks, first_seen = levels[0].seen(position, kept.chunk, sinks);
    const int64_t low = first_seen - sinks;  // the columns are sink tokens, then the positions from the first one seen
    Weighed<S> one{position + 1 - low, {}, {}, {}, {}};
    for (const Stored& level : levels) {
      if (sinks) add_spans<S>(kept.sinks[0], 0, sinks - 1, 0, 0, dim, *before, one.keys, dim, level.dims);
      add_level<S>(kept, level, level.seen(position, kept.chunk, sinks), position, low, dim, *before++, one.keys,
                   one.key_groups);
      dim += level.dims;
    }
    if (sinks) add_spans<S>(kept.sinks[1], 0, sinks - 1, 0, 0, 0, Sum<S>(0), one.values);
    int64_t value_dim = 0;
    for (size_t n = 0; n < kept.values.size(); ++n) {
      const Stored& level = kept.values[n];
      // Hierarchical values have the levels of the keys; others are all that the softmax sees.
      const int64_t first = n ? level.seen(position, kept.chunk, sinks) : first_seen;
      add_level<S>(kept, level, first, position, low, value_dim, Sum<S>(0), one.values, one.value_groups);
      value_dim += level.dims;
    }
    out.push_back(std::move(one));
  }
  return out;
}

// Weighted sums (B, H, 1, value dims) of queries (B, H, 1, D), times `factors` (D). The query heads of a key (or value)
// head read its row.
template <typename S>
void attend(const at::Tensor& query, const Order& order, const Sum<S>* factors,
            const std::vector<Weighed<S>>& softmaxes, int64_t key_rows, int64_t value_rows, int64_t group_size,
            at::Tensor& out) {
  using T = Sum<S>;
  const int64_t heads = query.size(1), rows = query.size(0) * heads, dim = query.size(3), value_dim = out.size(3);
  const int64_t per_key = rows / key_rows, per_value = rows / value_rows;
  const S* q = query.const_data_ptr<S>();
  S* to = out.data_ptr<S>();
  int64_t columns = 0;
  for (const Weighed<S>& one : softmaxes) columns = std::max(columns, one.columns);
  at::parallel_for(0, rows, 1, [&](int64_t begin, int64_t end) {
    std::vector<T> scaled(dim), weight(columns), sums(value_dim);
    GroupRoom<T> room(group_size, std::max(dim, value_dim));
    for (int64_t r = begin; r < end; ++r) {
      const S* from = q + r / heads * query.stride(0) + r % heads * query.stride(1);
      const int64_t* at = order.of(r % heads, heads);
      for (int64_t d = 0; d < dim; ++d)
        scaled[d] = static_cast<T>(from[(at ? at[d] : d) * query.stride(3)]) * factors[d];
      std::fill(sums.begin(), sums.end(), T(0));
      for (const Weighed<S>& one : softmaxes) {
        // Levels in their order: what one adds changes the scale of the sum so far.
        auto group = one.key_groups.begin();
        for (const CacheSpan<S>& span : one.keys) {
          for (; group != one.key_groups.end() && group->first <= span.first; ++group)
            add_group_scores<T>(scaled.data() + group->first, *group, r / per_key, group_size, room,
                                weight.data() + group->column);
          add_scores<S>(scaled.data() + span.first, span.numbers + r / per_key * span.row_stride, span.stride,
                        span.dims, span.size, span.before, weight.data() + span.column);
        }
        softmax<T>(weight.data(), one.columns);
        for (const CacheSpan<S>& span : one.values) {
          const S* numbers = span.numbers + r / per_value * span.row_stride;
          for (int64_t d = 0; d < span.dims; ++d)
            sums[span.first + d] += dot(weight.data() + span.column, numbers + d * span.stride, span.size);
        }
        for (size_t n = 0; n < one.value_groups.size(); ++n) {
          const GroupSpan<T>& span = one.value_groups[n];
          if (n == 0 || span.first != one.value_groups[n - 1].first)
            std::fill(room.lanes.begin(), room.lanes.end(), T(0));
          add_group_values<T>(weight.data() + span.column, span, r / per_value, group_size, room,
                              sums.data() + span.first);
          if (n + 1 < one.value_groups.size() && one.value_groups[n + 1].first == span.first) continue;
          for (int64_t d = 0; d < span.dims; ++d)
            for (int64_t w = 0; w < Codes<T>::W; ++w) sums[span.first + d] += room.lanes[d * Codes<T>::W + w];
        }
      }
      std::copy(sums.begin(), sums.end(), to + r * value_dim);
    }
  });
}

// Writes a token into what a cache keeps, and returns its attention to all tokens there are; without a query, nothing.
// What was in the slots of the token goes to `old`, with the number of the step in front of the plan, which says that
// it is there.
template <typename S>
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
  S* const before = old.data_ptr<S>();
  exchange<S>(k, Order(order), keys, position, kept.chunk, before);
  exchange<S>(v, Order(std::nullopt), kept.values, position, kept.chunk, before + k.numel());
  *plan.data_ptr<int64_t>() = number;
  if (!q) return out;
  const Sum<S>* const factor = factors.const_data_ptr<Sum<S>>();
  attend<S>(*q, Order(order), factor, weighed<S>(kept, position, factor + q->size(3)), keys[0].rows(),
            kept.values[0].rows(), kept.group_size, out);
  return out;
}

}  // namespace structattn
