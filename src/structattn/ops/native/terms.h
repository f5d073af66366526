// What makes the scaled products of a tile its scores: a soft cap, ALiBi, a bias and a mask.
#pragma once

#include "tiles.h"

#include <bit>
#include <cstring>
#include <limits>
#include <optional>
#include <variant>
#include <vector>

namespace structattn {

// Numbers for pairs, (B, H, T, S) with any strides, 0 where they are shared.
template <typename T>
struct Pairs {
  const T* data = nullptr;
  int64_t batch = 0, head = 0, query = 0, key = 0;

  explicit Pairs(const std::optional<Tensor>& x) {
    if (!x.has_value()) return;
    data = x->const_data_ptr<T>();
    batch = x->stride(0), head = x->stride(1), query = x->stride(2), key = x->stride(3);
  }
  const T* at(int64_t b, int64_t h, int64_t i, int64_t j) const {
    return data + b * batch + h * head + i * query + j * key;
  }
};

// Numbers that are added to scores. They may have 16 bits where scores are float; to double, libraries of older
// systems cannot convert them.
template <typename T>
using Bias = std::conditional_t<std::is_same_v<T, double>, std::variant<Pairs<T>>,
                                std::variant<Pairs<T>, Pairs<Half>, Pairs<BFloat16>>>;

template <typename T>
Bias<T> bias_of(const std::optional<Tensor>& x) {
  if constexpr (!std::is_same_v<T, double>) {
    if (x.has_value() && x->dtype() == dtype_of<Half>()) return Pairs<Half>(x);
    if (x.has_value() && x->dtype() == dtype_of<BFloat16>()) return Pairs<BFloat16>(x);
  }
  return Pairs<T>(x);
}

template <typename T>
class Terms {
 public:
  Terms(double softcap, const std::optional<Tensor>& slopes, const std::optional<Tensor>& bias,
        const std::optional<Tensor>& mask)
      : cap_(static_cast<T>(softcap)), has_bias_(bias.has_value()), bias_(bias_of<T>(bias)), mask_(mask) {
    if (!slopes.has_value()) return;
    slopes_ = slopes->const_data_ptr<T>();
    slope_batch_ = slopes->size(0) > 1 ? slopes->stride(0) : 0, slope_head_ = slopes->stride(1);
  }

  bool has_softcap() const { return cap_ > 0; }
  bool is_empty() const { return !has_softcap() && slopes_ == nullptr && !has_bias_ && mask_.data == nullptr; }

  const Pairs<bool>& mask() const { return mask_; }

  // Scores of the rows of a tile, whose first query is `first`. `slope`, where it is given, becomes the derivative of
  // the soft cap.
  template <typename P>
  void add(const Span& span, int64_t head, int64_t first, int64_t rows, const Tile<P>& tile, T* score, T* slope) const {
    using V = Vec<T>;
    constexpr int64_t W = V::size();
    if (is_empty()) return;
    for (int64_t i = 0; i < rows; ++i) {
      T* const row = score + i * kCols;
      if (has_softcap()) {
        const V cap(cap_), inverse(1 / cap_), one(1);
        for (int64_t c = 0; c < kCols; c += W) {
          const V bounded = tanh(V::loadu(row + c) * inverse);
          if (slope != nullptr) (one - bounded * bounded).store(slope + i * kCols + c);
          (bounded * cap).store(row + c);
        }
      }
      if (slopes_ != nullptr) {
        const T own = slopes_[span.row * slope_batch_ + head * slope_head_];
        const int64_t ahead = span.position + first + i - tile.from;
        for (int64_t c = 0; c < tile.cols; ++c) row[c] -= own * static_cast<T>(std::abs(ahead - c));
      }
      if (has_bias_)
        std::visit([&](const auto& bias) { add_row(bias, span, head, first + i, tile.from, tile.cols, row); }, bias_);
      if (mask_.data != nullptr) {
        const bool* x = mask_.at(span.row, head, span.query + first + i, span.key + tile.from);
        if (mask_.key == 1)
          hide(x, 1, tile.cols, row);
        else
          hide(x, mask_.key, tile.cols, row);
      }
    }
  }

 private:
  template <typename B>
  static void add_row(const Pairs<B>& bias, const Span& span, int64_t head, int64_t query, int64_t from, int64_t cols,
                      T* row) {
    const B* x = bias.at(span.row, head, span.query + query, span.key + from);
    if (bias.key == 1)
      for (int64_t c = 0; c < cols; ++c) row[c] += static_cast<T>(x[c]);
    else
      for (int64_t c = 0; c < cols; ++c) row[c] += static_cast<T>(x[c * bias.key]);
  }

  // By bits: a condition would become a branch, which costs more where a mask has no pattern.
  [[gnu::always_inline]] static void hide(const bool* x, int64_t stride, int64_t count, T* row) {
    using Bits = std::conditional_t<sizeof(T) == 4, uint32_t, uint64_t>;
    const Bits none = std::bit_cast<Bits>(-std::numeric_limits<T>::infinity());
    for (int64_t c = 0; c < count; ++c) {
      const Bits keep = -static_cast<Bits>(x[c * stride]);
      row[c] = std::bit_cast<T>((std::bit_cast<Bits>(row[c]) & keep) | (none & ~keep));
    }
  }

  T cap_;
  bool has_bias_;
  const T* slopes_ = nullptr;
  int64_t slope_batch_ = 0, slope_head_ = 0;
  Bias<T> bias_;
  Pairs<bool> mask_;
};

// Which tiles of spans a mask shows something of: the others add nothing. The mask is read once, row by row, for all
// heads that it is the same for.
class ShownTiles {
 public:
  ShownTiles(const std::vector<Span>& spans, int64_t heads, const Pairs<bool>& mask)
      : heads_(mask.data == nullptr ? 0
               : mask.head == 0     ? std::min<int64_t>(heads, 1)
                                    : heads),
        first_{0} {
    if (heads_ == 0) return;
    for (const Span& span : spans)
      first_.push_back(first_.back() + heads_ * tiles_of(span.num_queries, kRows) * tiles_of(span.num_keys, kCols));
    shown_.resize(first_.back());
    int64_t most = 0;  // tiles of queries in a span
    for (const Span& span : spans) most = std::max(most, tiles_of(span.num_queries, kRows));
    parallel_for(static_cast<int64_t>(spans.size()) * heads_ * most, [&](int64_t begin, int64_t end) {
      for (int64_t n = begin; n < end; ++n) {
        const int64_t number = n / most / heads_, head = n / most % heads_, first = n % most * kRows;
        const Span& span = spans[number];
        const int64_t last = std::min(first + (mask.query == 0 ? 1 : kRows), span.num_queries);
        for (int64_t i = first; i < last; ++i)
          show(mask.at(span.row, head, span.query + i, span.key), mask.key, span.num_keys,
               shown_.data() + at(number, head, span, first));
      }
    });
  }

  // Whether something of a tile is shown to one of some heads.
  bool has(int64_t number, int64_t head, int64_t count, const Span& span, int64_t query, int64_t key) const {
    if (heads_ == 0) return true;
    for (int64_t h = head; h < head + (heads_ == 1 ? 1 : count); ++h)
      if (shown_[at(number, h % heads_, span, query) + key / kCols]) return true;
    return false;
  }

 private:
  int64_t at(int64_t number, int64_t head, const Span& span, int64_t query) const {
    const int64_t row = head * tiles_of(span.num_queries, kRows) + query / kRows;
    return first_[number] + row * tiles_of(span.num_keys, kCols);
  }

  static void show(const bool* x, int64_t stride, int64_t count, char* shown) {
    for (int64_t from = 0; from < count; from += kCols, ++shown) {
      const int64_t end = std::min(from + kCols, count);
      if (stride == 1)
        *shown = *shown || std::memchr(x + from, true, end - from) != nullptr;
      else
        for (int64_t c = from; c < end && !*shown; ++c) *shown = x[c * stride];
    }
  }

  int64_t heads_;
  std::vector<int64_t> first_;  // of each span
  std::vector<char> shown_;
};

}  // namespace structattn
