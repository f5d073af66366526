// How the numbers of a cache lie in its pages: the only C++ code that finds them, and that writes them. Pages are
// (rows, dims, slots), whose numbers lie side by side over positions: see structattn/cache/storage.
#pragma once

#include "tensor.h"

#include <algorithm>
#include <optional>
#include <type_traits>
#include <vector>

namespace structattn {

// Codes of quantized tokens: group m has positions m g ... (m + 1) g - 1. Of each page three tensors: codes (rows,
// slots, dims, bytes), scales and zeros (rows, slots, numbers of a group).
struct Quantized {
  int64_t bits = 0;  // 0 where nothing is quantized
  int64_t ring = 0;  // slots of a ring, 0 for none
  const Tensor* pages = nullptr;
  int64_t num_pages = 0;

  // The page of a slot; `slot` becomes that in the page.
  const Tensor* page(int64_t& slot) const {
    for (int64_t n = 0; n < num_pages && slot >= 0; slot -= pages[3 * n++].size(1))
      if (slot < pages[3 * n].size(1)) return pages + 3 * n;
    fail("a level of the cache has no slot for a group");
  }
};

// A level of the keys or of the values of a cache.
struct Stored {
  int64_t block;         // positions of a block, 0 where there are none
  int64_t start;         // of the current block, or -1: it follows from the size of blocks
  int64_t ring, window;  // 0 for none; in a ring, position x is in slot x modulo its size
  int64_t dims;
  const Tensor* pages;  // (rows, dims, slots)
  int64_t num_pages;
  Quantized quantized;  // what is before the exact numbers

  int64_t begin(int64_t position, int64_t chunk) const {
    if (start >= 0) return start;
    const int64_t from = chunk ? position - position % chunk : 0;
    return block ? position - (position - from) % block : from;
  }

  // The first position that a query sees, sink tokens aside.
  int64_t seen(int64_t position, int64_t chunk, int64_t sinks) const {
    const int64_t from = std::max(begin(position, chunk), sinks);
    return window ? std::max(from, position - window + 1) : from;
  }

  // The page of a slot; `slot` becomes that in the page.
  const Tensor& page(int64_t& slot) const {
    for (int64_t n = 0; n < num_pages && slot >= 0; slot -= pages[n++].size(2))
      if (slot < pages[n].size(2)) return pages[n];
    fail("a level of the cache has no slot for a position");
  }

  // Whether the pages have that many rows, and all the numbers of a slot where they are looked for.
  bool fits(int64_t rows, int64_t group_size, bool per_token) const {
    for (int64_t n = 0; n < num_pages; ++n)
      if (!has_sizes(pages[n], {rows, dims, -1}) || (pages[n].stride(2) != 1 && pages[n].size(2) > 1)) return false;
    if (quantized.bits == 0) return true;
    const int64_t bytes = group_size * quantized.bits / 8;
    const int64_t scales = per_token ? (dims + group_size - 1) / group_size * group_size : dims;
    for (int64_t n = 0; n < quantized.num_pages; ++n) {
      const Tensor* const page = quantized.pages + 3 * n;
      const int64_t slots = page->dim() > 1 ? page->size(1) : 0;
      if (!has_sizes(page[0], {rows, slots, dims, bytes}) || !has_whole_slots(page[0])) return false;
      for (const Tensor* x : {page + 1, page + 2})
        if (!has_sizes(*x, {rows, slots, -1, -1}) || x->size(2) * x->size(3) != scales || !has_whole_slots(*x))
          return false;
    }
    return true;
  }

 private:
  // Whether the numbers of a slot lie side by side.
  static bool has_whole_slots(const Tensor& x) {
    return (x.size(3) == 1 || x.stride(3) == 1) && (x.size(2) == 1 || x.stride(2) == x.size(3));
  }
};

// Positions that lie side by side in a page, and the columns of the scores that they are. `first` is the first of the
// dimensions.
template <typename S>
struct CacheSpan {
  const S* numbers;
  int64_t stride, row_stride, dims, size, column, first;
  Sum<S> before;  // what the scores of these columns are multiplied by before this level is added; 0 where nothing was
};

// Some positions of a group of codes, as `CacheSpan`: those from `skip` on.
template <typename T>
struct GroupSpan {
  using Scale = std::conditional_t<std::is_same_v<T, double>, double, Half>;
  const uint8_t* codes;
  const Scale *scale, *zero;
  int64_t row_stride, scale_stride, bits, dims, skip, size, column, first;
  T before;
  bool is_wide;  // the model has more than 16 bits
};

// The spans of positions first ... last - 1 of a level, which are quantized.
template <typename S>
void add_groups(const Stored& level, int64_t first, int64_t last, int64_t begin, int64_t low, int64_t dim,
                Sum<S> before, int64_t group_size, std::vector<GroupSpan<Sum<S>>>& out) {
  using Scale = typename GroupSpan<Sum<S>>::Scale;
  const Quantized& from = level.quantized;
  int64_t group = first / group_size;
  const int64_t end = first < last ? (last + group_size - 1) / group_size : group;
  out.reserve(out.size() + end - group);
  while (group < end) {  // those that lie side by side in a page
    int64_t slot = from.ring ? group % from.ring : group - begin / group_size;
    int64_t count = end - group;
    if (from.ring) count = std::min(count, from.ring - slot);
    const Tensor* page = from.page(slot);
    count = std::min(count, page[0].size(1) - slot);
    const uint8_t* const codes = page[0].const_data_ptr<uint8_t>();
    const Scale *const scales = page[1].const_data_ptr<Scale>(), *const zeros = page[2].const_data_ptr<Scale>();
    const int64_t row = page[0].stride(0), scale_row = page[1].stride(0);
    const int64_t stride = page[0].stride(1), scale_stride = page[1].stride(1);
    for (const int64_t stop = group + count; group < stop; ++group, ++slot) {
      const int64_t start = group * group_size, skip = std::max<int64_t>(0, first - start);
      out.push_back({codes + slot * stride, scales + slot * scale_stride, zeros + slot * scale_stride, row, scale_row,
                     from.bits, level.dims, skip, group_size - skip, start + skip - low, dim, before, sizeof(S) > 2});
    }
  }
}

// The spans of positions first ... last of a level, whose columns begin at `low`. Its numbers are those of dimensions
// dim ... of queries, from number `from` on where it holds others as well.
template <typename S>
void add_spans(const Stored& level, int64_t first, int64_t last, int64_t begin, int64_t low, int64_t dim, Sum<S> before,
               std::vector<CacheSpan<S>>& out, int64_t from = 0, int64_t dims = -1) {
  for (int64_t position = first; position <= last;) {
    int64_t slot = level.ring ? position % level.ring : position - begin;
    int64_t size = last + 1 - position;
    if (level.ring) size = std::min(size, level.ring - slot);
    const Tensor& page = level.page(slot);
    size = std::min(size, page.size(2) - slot);
    const S* const numbers = page.const_data_ptr<S>() + from * page.stride(1) + slot;
    out.push_back(
        {numbers, page.stride(1), page.stride(0), dims < 0 ? level.dims : dims, size, position - low, dim, before});
    position += size;
  }
}

// What a cache keeps, from the numbers that `native_decode.Step` writes.
struct Kept {
  int64_t chunk, num_sinks, group_size, residual;
  std::vector<std::vector<Stored>> keys;  // of each softmax
  std::vector<Stored> values;
  std::vector<Stored> sinks;  // keys and values of the sink tokens, in all dimensions; none where there are none

  Kept(const Tensor& plan, const std::vector<Tensor>& pages) {
    check(plan.is_contiguous() && plan.numel() > 6, kWrong);
    const int64_t *p = plan.const_data_ptr<int64_t>(), *const end = p + plan.numel(), *counts = p + 6;
    int64_t page = 0;
    chunk = p[1], num_sinks = p[2], group_size = p[3], residual = p[4];
    check(chunk >= 0 && num_sinks >= 0 && group_size > 0 && residual >= 0 && p[5] > 0 && p[5] <= end - counts, kWrong);
    keys.resize(p[5]);
    p = counts + p[5];
    const auto next = [&] {
      check(end - p >= 9 && *std::min_element(p + 2, p + 9) >= 0 && p[0] >= 0, kWrong);
      check(p[6] == 0 || p[6] == 4 || p[6] == 8, kWrong);
      const int64_t left = static_cast<int64_t>(pages.size()) - page;
      check(p[5] <= left && p[8] <= (left - p[5]) / 3, kWrong);
      const Tensor *const exact = pages.data() + page, *const groups = exact + p[5];
      const Stored found{p[0], p[1], p[2], p[3], p[4], exact, p[5], {p[6], p[7], groups, p[8]}};
      page += p[5] + 3 * p[8], p += 9;
      return found;
    };
    for (std::vector<Stored>& levels : keys)
      for (int64_t left = *counts++; left > 0; --left) levels.push_back(next());
    while (p < end) values.push_back(next());
    check(values.size() > (num_sinks ? 2 : 0), kWrong);
    if (num_sinks) {
      sinks.assign(values.end() - 2, values.end());
      values.resize(values.size() - 2);
    }
  }

  // Whether tokens k and v, (B, G, 1, dims), and the pages are of one cache. Nothing else guards their memory.
  void check_tokens(const Tensor& k, const Tensor& v, int64_t position) const {
    check(k.dim() == 4 && k.size(2) == 1 && has_sizes(v, {k.size(0), -1, 1, -1}) && k.numel() && v.numel(), kWrong);
    check(position + 1 >= std::max<int64_t>(1, num_sinks), kWrong);
    const int64_t key_rows = k.size(0) * k.size(1), value_rows = v.size(0) * v.size(1);
    int64_t key_dims = 0, value_dims = 0;
    for (const std::vector<Stored>& levels : keys) {
      check(!levels.empty(), kWrong);
      for (const Stored& level : levels) {
        check(level.fits(key_rows, group_size, false), kWrong);
        key_dims += level.dims;
      }
    }
    for (const Stored& level : values) {
      check(level.fits(value_rows, group_size, true), kWrong);
      value_dims += level.dims;
    }
    check(key_dims == k.size(3) && value_dims == v.size(3), kWrong);
    if (!num_sinks) return;
    check(sinks[0].dims == key_dims && sinks[0].fits(key_rows, 1, false), kWrong);
    check(sinks[1].dims == value_dims && sinks[1].fits(value_rows, 1, true), kWrong);
  }

  static constexpr const char* kWrong = "structattn_native: tokens, pages and plan are not those of one cache";
};

// The first position whose exact numbers a query sees, where others are quantized.
template <typename K>
int64_t first_exact(const K& kept, int64_t position) {
  const int64_t past = position + 1 - kept.residual;
  return past <= 0 ? 0 : past / kept.group_size * kept.group_size;
}

// The dimension of queries and keys at each position in the order of the levels: one for all heads, or one for each
// key head.
struct Order {
  const int64_t* index = nullptr;
  int64_t heads = 1, dims = 0;

  explicit Order(const std::optional<Tensor>& x) {
    if (!x) return;
    index = x->const_data_ptr<int64_t>(), heads = x->size(0), dims = x->size(1);
    for (int64_t n = 0; n < heads * dims; ++n)
      check(0 <= index[n] && index[n] < dims, "an order of dimensions is out of its range");
  }

  // Of head h of `count`.
  const int64_t* of(int64_t h, int64_t count) const { return index ? index + h / (count / heads) * dims : nullptr; }
};

// A token (B, G, 1, dims) that a cache is to keep. Its rows are the heads of the sequences.
template <typename S>
class Token {
 public:
  // `old` (B * G, dims) is for what is in the slots of the token.
  Token(const Tensor& x, const Order& order, const std::vector<Stored>& levels, int64_t position, int64_t chunk, S* old)
      : from_(x.const_data_ptr<S>()),
        old_(old),
        heads_(x.size(1)),
        rows_(x.size(0) * heads_),
        dims_(x.size(3)),
        batch_stride_(x.stride(0)),
        head_stride_(x.stride(1)),
        step_(x.stride(3)),
        order_(order) {
    for (const Stored& level : levels) {
      int64_t slot = level.ring ? position % level.ring : position - level.begin(position, chunk);
      const Tensor& page = level.page(slot);
      places_.push_back({page.data_ptr<S>() + slot, page.stride(0), page.stride(1), level.dims});
    }
  }

  int64_t rows() const { return rows_; }

  // Writes a row into its slot of each level, and what was there into a row of `old`.
  void exchange(int64_t row) const {
    const S* const own = from_ + row / heads_ * batch_stride_ + row % heads_ * head_stride_;
    const int64_t* const at = order_.of(row % heads_, heads_);
    int64_t number = 0;
    for (const Place& place : places_) {
      S* to = place.numbers + row * place.row_stride;
      // Each number is in another line of memory: reading them first lets many be on their way.
      for (int64_t d = 0; d < place.dims; ++d, ++number, to += place.stride) {
        old_[row * dims_ + number] = *to;
        *to = own[(at ? at[number] : number) * step_];
      }
    }
  }

 private:
  struct Place {  // the slot of a level
    S* numbers;
    int64_t row_stride, stride, dims;
  };

  const S* from_;
  S* old_;
  int64_t heads_, rows_, dims_, batch_stride_, head_stride_, step_;
  Order order_;
  std::vector<Place> places_;
};

}  // namespace structattn
