// Attention of one token of each of several requests, whose keys and values are in pages of a pool.
#pragma once

#include "decode.h"

namespace structattn {

// Some positions whose numbers lie together token by token: `stride` is from one to the next.
template <typename S>
struct TokenSpan : CacheSpan<S> {};

template <typename S, int M>
void add_span_scores(const Sum<S>* q, int64_t q_row, const TokenSpan<S>& span, int64_t row, Sum<S>* out,
                     int64_t out_row) {
  const S* numbers = span.numbers + row * span.row_stride;
  for (int64_t c = 0; c < span.size; ++c, numbers += span.stride) {
    for (int m = 0; m < M; ++m) {
      Sum<S>& score = out[m * out_row + c];
      score = span.before == 0 ? 0 : span.before * score;
    }
    add_dots<M, 1>(q, q_row, numbers, 0, span.dims, out + c, out_row, 0);
  }
}

// Adds the values of a span, weighed, for N vectors of dimensions.
template <typename S, int M, int N>
void add_vectors(const Sum<S>* weight, int64_t weight_row, const S* numbers, int64_t stride, int64_t size, Sum<S>* out,
                 int64_t out_row) {
  using V = Vec<Sum<S>>;
  constexpr int64_t W = V::size();
  V sum[M][N];
#pragma GCC unroll 4
  for (int m = 0; m < M; ++m)
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) sum[m][n] = V::loadu(out + m * out_row + n * W);
  for (int64_t c = 0; c < size; ++c, numbers += stride) {
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) {
      const V x = load_numbers(numbers + n * W);
#pragma GCC unroll 4
      for (int m = 0; m < M; ++m) sum[m][n] = fmadd(V(weight[m * weight_row + c]), x, sum[m][n]);
    }
  }
#pragma GCC unroll 4
  for (int m = 0; m < M; ++m)
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) sum[m][n].store(out + m * out_row + n * W);
}

template <typename S, int M>
void add_span_values(const Sum<S>* weight, int64_t weight_row, const TokenSpan<S>& span, int64_t row, Sum<S>* out,
                     int64_t out_row) {
  constexpr int64_t W = Vec<Sum<S>>::size();
  const S* const numbers = span.numbers + row * span.row_stride;
  int64_t d = 0;
  for (; d + 2 * W <= span.dims; d += 2 * W)
    add_vectors<S, M, 2>(weight, weight_row, numbers + d, span.stride, span.size, out + d, out_row);
  for (; d + W <= span.dims; d += W)
    add_vectors<S, M, 1>(weight, weight_row, numbers + d, span.stride, span.size, out + d, out_row);
  for (; d < span.dims; ++d)
    for (int64_t c = 0; c < span.size; ++c)
      for (int m = 0; m < M; ++m) out[m * out_row + d] += weight[m * weight_row + c] * numbers[c * span.stride + d];
}

// What all pages have of a level: (pages, heads, slots, numbers of a slot). Entry x is in slot x, modulo a block; slot
// s is in page s / slots of a request, which a table (requests, columns) names, modulo a ring of pages.
struct PagedPart {
  const char* memory = nullptr;
  int64_t page_nbytes = 0, slot_nbytes = 0, pages = 0;
  int64_t heads = 0, head = 0, width = 0, slots = 0;  // numbers of a head, and of a slot
  int64_t block = 0, ring = 0;                        // 0 for none
  const int64_t* table = nullptr;
  int64_t columns = 0;

  PagedPart() = default;
  PagedPart(const Tensor& x, const Tensor& table, int64_t block, int64_t ring)
      : memory(static_cast<const char*>(x.const_data_ptr())),
        page_nbytes(x.stride(0) * x.element_size()),
        slot_nbytes(x.stride(2) * x.element_size()),
        pages(x.size(0)),
        heads(x.size(1)),
        head(x.stride(1)),
        width(x.stride(2)),
        slots(x.size(2)),
        block(block),
        ring(ring),
        table(table.const_data_ptr<int64_t>()),
        columns(table.size(1)) {}

  // Where an entry of a request is; `size`: the entries that lie side by side from there on.
  const char* at(int64_t request, int64_t entry, int64_t* size = nullptr) const {
    const int64_t slot = block ? entry % block : entry, number = slot / slots;
    const int64_t column = ring ? number % ring : number;
    check(0 <= column && column < columns, "a request has no page for a token");
    const int64_t page = table[request * columns + column];
    check(0 <= page && page < pages, "structattn_native: a table names a page that there is not");
    if (size) *size = block ? std::min(slots - slot % slots, block - slot) : slots - slot % slots;
    return memory + page * page_nbytes + slot % slots * slot_nbytes;
  }
};

struct PagedLevel {
  int64_t dims, block, window, bits;
  PagedPart exact, codes, scale, zero;

  int64_t seen(int64_t position, int64_t chunk, int64_t sinks) const {
    return Stored{block, -1, 0, window, dims, nullptr, 0, {}}.seen(position, chunk, sinks);
  }
};

// What the pages hold of a request, from the numbers that `paged.native_step.PagedStep` writes.
struct PagedKept {
  static constexpr int64_t chunk = 0;
  int64_t num_sinks, group_size, residual, request = 0;
  std::vector<std::vector<PagedLevel>> keys;  // of each softmax
  std::vector<PagedLevel> values, sinks;      // as of `Kept`

  // For numbers of a dtype, with scales of another, of so many requests.
  PagedKept(const Tensor& plan, const std::vector<Tensor>& parts, const std::vector<Tensor>& tables, int64_t requests,
            int32_t dtype, int32_t scale_dtype) {
    check(plan.is_contiguous() && plan.numel() > 4, kWrong);
    const int64_t *p = plan.const_data_ptr<int64_t>(), *const end = p + plan.numel(), *counts = p + 4;
    size_t part = 0;
    num_sinks = p[0], group_size = p[1], residual = p[2];
    check(num_sinks >= 0 && group_size > 0 && residual >= 0 && p[3] > 0 && p[3] <= end - counts, kWrong);
    keys.resize(p[3]);
    p = counts + p[3];
    const auto next_part = [&](const int64_t* where, int32_t kind, int64_t numbers) {
      check(part < parts.size() && 0 <= where[0] && where[0] < static_cast<int64_t>(tables.size()), kWrong);
      const Tensor &x = parts[part++], &table = tables[where[0]];
      check(has_sizes(table, {requests, -1}) && table.is_contiguous() && where[1] >= 0 && where[2] >= 0, kWrong);
      check(has_sizes(x, {-1, -1, -1, -1}) && x.dtype() == kind && x.size(2) > 0 && x.size(3) >= numbers &&
                (x.stride(3) == 1 || x.size(3) == 1),
            kWrong);
      return PagedPart(x, table, where[1], where[2]);
    };
    const auto next = [&] {
      check(end - p >= 10 && *std::min_element(p, p + 4) >= 0 && (p[3] == 0 || p[3] == 4 || p[3] == 8), kWrong);
      PagedLevel level{p[0], p[1], p[2], p[3], next_part(p + 4, dtype, p[0]), {}, {}, {}};
      if (level.bits) {
        level.codes = next_part(p + 7, dtype_of<uint8_t>(), p[0] * (group_size * level.bits / 8));
        level.scale = next_part(p + 7, scale_dtype, p[0]), level.zero = next_part(p + 7, scale_dtype, p[0]);
        check(level.codes.heads == level.exact.heads && level.scale.heads == level.exact.heads &&
                  level.zero.heads == level.exact.heads,
              kWrong);
      }
      p += 10;
      return level;
    };
    for (std::vector<PagedLevel>& levels : keys)
      for (int64_t left = *counts++; left > 0; --left) levels.push_back(next());
    while (p < end) values.push_back(next());
    check(values.size() > (num_sinks ? 2 : 0), kWrong);
    if (num_sinks) {
      sinks.assign(values.end() - 2, values.end());
      values.resize(values.size() - 2);
    }
    for (const std::vector<PagedLevel>& levels : keys) check(!levels.empty(), kWrong);
  }

  // Whether the levels have the dimensions, each with all heads.
  void check_dims(int64_t key_dims, int64_t value_dims) const {
    const auto take = [](const PagedLevel& level, int64_t heads, int64_t& dims) {
      check(level.exact.heads == heads && heads > 0, kWrong);
      dims -= level.dims;
    };
    const int64_t key_heads = keys[0][0].exact.heads, value_heads = values[0].exact.heads;
    int64_t of_keys = key_dims, of_values = value_dims;
    for (const std::vector<PagedLevel>& levels : keys)
      for (const PagedLevel& level : levels) take(level, key_heads, of_keys);
    for (const PagedLevel& level : values) take(level, value_heads, of_values);
    check(of_keys == 0 && of_values == 0, kWrong);
    if (num_sinks) take(sinks[0], key_heads, key_dims), take(sinks[1], value_heads, value_dims);
    check(num_sinks == 0 || (key_dims == 0 && value_dims == 0), kWrong);
  }

  static constexpr const char* kWrong = "structattn_native: the parts, tables and plan are not those of one cache";
};

// The spans of positions first ... last of a level of a request: see `add_spans`.
template <typename S>
void add_tokens(const PagedKept& kept, const PagedLevel& level, int64_t first, int64_t last, int64_t low, int64_t dim,
                Sum<S> before, std::vector<TokenSpan<S>>& spans, int64_t from = 0, int64_t dims = -1) {
  for (int64_t position = first, size; position <= last; position += size) {
    const S* const numbers = reinterpret_cast<const S*>(level.exact.at(kept.request, position, &size)) + from;
    size = std::min(size, last + 1 - position);
    spans.push_back({{numbers, level.exact.width, level.exact.head, dims < 0 ? level.dims : dims, size, position - low,
                      dim, before}});
  }
}

template <typename S>
void add_level(const PagedKept& kept, const PagedLevel& level, int64_t first, int64_t position, int64_t low,
               int64_t dim, Sum<S> before, std::vector<TokenSpan<S>>& spans, std::vector<GroupSpan<Sum<S>>>& groups) {
  using Scale = typename GroupSpan<Sum<S>>::Scale;
  int64_t exact = first;
  if (level.bits) {
    const int64_t size = kept.group_size;
    exact = std::max(first, first_exact(kept, position));
    for (int64_t group = first / size; first < exact && group * size < exact; ++group) {
      const int64_t start = group * size, skip = std::max<int64_t>(0, first - start);
      const auto scale = [&](const PagedPart& x) { return reinterpret_cast<const Scale*>(x.at(kept.request, group)); };
      groups.push_back({reinterpret_cast<const uint8_t*>(level.codes.at(kept.request, group)), scale(level.scale),
                        scale(level.zero), level.codes.head, level.scale.head, level.bits, level.dims, skip,
                        size - skip, start + skip - low, dim, before, sizeof(S) > 2});
    }
  }
  add_tokens<S>(kept, level, exact, position, low, dim, before, spans);
}

template <typename S>
void add_sink_tokens(const PagedKept& kept, int64_t number, int64_t dim, Sum<S> before,
                     std::vector<TokenSpan<S>>& spans, int64_t from = 0, int64_t dims = -1) {
  add_tokens<S>(kept, kept.sinks[number], 0, kept.num_sinks - 1, 0, dim, before, spans, from, dims);
}

// The attention of a query (B, H, 1, D) of each request to what its pages hold up to its position (B,). Parts are those
// of each level in their order, (pages, heads, slots, numbers): exact numbers, and codes, scales and zeros where it has
// them; tables (B, columns) say which pages a request has.
template <typename S>
Tensor attended(const Tensor& q, const Tensor& factors, const std::vector<Tensor>& parts,
                const std::vector<Tensor>& tables, const Tensor& positions, const Tensor& plan, int64_t value_dim) {
  using Scale = typename GroupSpan<Sum<S>>::Scale;
  check(q.dim() == 4 && q.numel() > 0, PagedKept::kWrong);
  const int64_t batch = q.size(0);
  const PagedKept kept(plan, parts, tables, batch, q.dtype(), dtype_of<Scale>());
  kept.check_dims(q.size(3), value_dim);
  check_queries(q, kept.keys, factors, batch, kept.keys[0][0].exact.heads, kept.values[0].exact.heads, q.size(3));
  check(has_sizes(positions, {batch}) && positions.is_contiguous(), PagedKept::kWrong);
  for (int64_t b = 0; b < batch; ++b)
    check(positions.const_data_ptr<int64_t>()[b] + 1 >= std::max<int64_t>(1, kept.num_sinks), PagedKept::kWrong);
  Tensor out = empty({batch, q.size(1), 1, value_dim}, q.dtype());
  const Sum<S>* const factor = factors.const_data_ptr<Sum<S>>();
  std::vector<std::vector<Weighed<S, TokenSpan>>> lists(batch);
  parallel_for(batch, [&](int64_t begin, int64_t end) {
    PagedKept own = kept;
    for (int64_t b = begin; b < end; ++b) {
      own.request = b;
      lists[b] = weighed<S, TokenSpan>(own, positions.const_data_ptr<int64_t>()[b], factor + q.size(3));
    }
  });
  const Division division(batch * q.size(1), batch * kept.keys[0][0].exact.heads, batch * kept.values[0].exact.heads,
                          kHeads<S>);
  StepRooms<Sum<S>> rooms(q, lists, division, kept.group_size, value_dim);
  attend<S, TokenSpan>(q, Order(std::nullopt), factor, lists, division, kept.group_size, rooms, [](int64_t) {}, out);
  return out;
}

}  // namespace structattn
