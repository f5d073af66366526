// Numbers of tokens as codes of 8 or 4 bits, with a scale and a zero for each group of them: what
// structattn/cache/storage/quantize.py computes, to the bit.
#pragma once

#include "products.h"
#include "storage.h"
#include "vector.h"

namespace structattn {

// Of 16 bits: the largest number, the smallest normal one, and the distance from 1 to the next.
constexpr float kLargestHalf = 65504.f, kTinyHalf = 0x1p-14f, kEpsHalf = 0x1p-10f;

// Zero and scale of numbers of type S between low and high. A product that is written to memory is rounded, as in
// PyTorch: a compiler joins it with the sum otherwise, and rounds once.
template <typename S>
void scale_of(float low, float high, float most, Half& zero, Half& scale) {
  const auto within = [](float x, float least) { return x < least ? least : x > kLargestHalf ? kLargestHalf : x; };
  zero = Half(within(low - std::abs(low) * kEpsHalf - kTinyHalf, -kLargestHalf));
  const float range = high - float(zero), step = (range < 0 ? 0.f : range) / most;
  const volatile float wider = step * (1 + 2 * kEpsHalf);
  scale = Half(within(wider + kTinyHalf, 0.f));
  if constexpr (std::is_same_v<S, Half>) {  // what is read has to be a number of 16 bits too
    const Half largest((kLargestHalf - float(zero)) / most * (1 - kEpsHalf));
    if (float(largest) < float(scale)) scale = largest;
  }
}

// The numbers of a group on their way: tokens by dimensions, rows of whole vectors.
struct QuantizeRoom {
  QuantizeRoom(int64_t group_size, int64_t dims)
      : row(rounded(dims, Vec<float>::size())), numbers(group_size * row), limits(4 * row), codes(group_size * row) {}

  int64_t row;
  Buffer<float> numbers, limits;
  Buffer<uint8_t> codes;
};

// Codes of `size` numbers of a token, and the numbers as they are read.
template <typename F>
void code_row(float* x, int64_t size, float most, const F& zero_and_scale, uint8_t* codes) {
  using V = Vec<float>;
  const V whole(12582912.f);  // 1.5 x 2^23: a sum with it is rounded to a whole number, which its last bits are
  for (int64_t n = 0; n < size; n += V::size()) {
    const auto [zero, scale] = zero_and_scale(n);
    V code = clamp_min((V::loadu(x + n) - zero) / scale, V(0.f));
    code = blend(code, V(most), V(most) < code) + whole;
    int32_t bits[V::size()];
    std::memcpy(bits, &code.raw, sizeof(bits));
    for (int64_t i = 0; i < V::size(); ++i) codes[n + i] = static_cast<uint8_t>(bits[i]);
    fmadd(code - whole, scale, zero).store(x + n);
  }
}

// One group of one head. `x` is changed to what is read, from token `hidden` on: those before are read elsewhere, and
// do not widen the range of the others.
template <typename S>
void quantize_group(S* x, int64_t stride, int64_t group_size, int64_t dims, int64_t bits, int64_t per_token,
                    int64_t hidden, const QuantizeRoom& room, uint8_t* codes, Half* scale, Half* zero) {
  using V = Vec<float>;
  constexpr int64_t W = V::size();
  const int64_t row = room.row;
  const float most = bits == 8 ? 255.f : 15.f;
  const auto numbers = [&](int64_t t) { return room.numbers.data() + t * row; };
  for (int64_t t = hidden; t < group_size; ++t) {
    float* out = numbers(t);
    converted<float, S, float>(x + t * stride, nullptr, dims, out);
    std::fill(out + dims, out + row, 0.f);
  }
  for (int64_t t = 0; t < hidden; ++t) {
    if (hidden < group_size)
      std::copy_n(numbers(hidden), row, numbers(t));
    else
      std::fill_n(numbers(t), row, 0.f);
  }
  const auto least = [](V a, V b) { return V(0.f) - maximum(V(0.f) - a, V(0.f) - b); };
  if (per_token) {
    for (int64_t t = 0; t < group_size; ++t)
      for (int64_t part = 0, d = 0; d < dims; d += group_size, ++part) {
        const int64_t size = std::min(group_size, dims - d), at = part * group_size + t;
        float* of_part = numbers(t) + d;
        V low(of_part[0]), high = low;
        int64_t n = 0;
        for (; n + W <= size; n += W) {
          const V next = V::loadu(of_part + n);
          low = least(low, next), high = maximum(high, next);
        }
        for (; n < size; ++n) low = least(low, V(of_part[n])), high = maximum(high, V(of_part[n]));
        scale_of<S>(reduce(low, least), largest_of(high), most, zero[at], scale[at]);
        const V of_zero{float(zero[at])}, of_scale{float(scale[at])};
        const auto same = [&](int64_t) { return std::pair(of_zero, of_scale); };
        if (size % W == 0)
          code_row(of_part, size, most, same, room.codes.data() + t * row + d);
        else  // vectors of one part reach into the next one
          for (int64_t m = 0; m < size; m += W) {
            float some[W] = {};
            uint8_t bytes[W];
            const int64_t count = std::min(W, size - m);
            std::copy_n(of_part + m, count, some);
            code_row(some, W, most, same, bytes);
            std::copy_n(some, count, of_part + m);
            std::copy_n(bytes, count, room.codes.data() + t * row + d + m);
          }
      }
  } else {
    float *low = room.limits.data(), *high = low + row, *of_zero = low + 2 * row, *of_scale = low + 3 * row;
    for (int64_t d = 0; d < row; d += W) {
      V smallest = V::loadu(numbers(0) + d), largest = smallest;
      for (int64_t t = 1; t < group_size; ++t) {
        const V next = V::loadu(numbers(t) + d);
        smallest = least(smallest, next), largest = maximum(largest, next);
      }
      smallest.store(low + d), largest.store(high + d);
    }
    for (int64_t d = 0; d < row; ++d) {
      Half of_dim_zero, of_dim_scale;
      scale_of<S>(low[d], high[d], most, of_dim_zero, of_dim_scale);
      of_zero[d] = of_dim_zero, of_scale[d] = of_dim_scale;
      if (d < dims) zero[d] = of_dim_zero, scale[d] = of_dim_scale;
    }
    const auto of_dims = [&](int64_t d) { return std::pair(V::loadu(of_zero + d), V::loadu(of_scale + d)); };
    for (int64_t t = 0; t < group_size; ++t) code_row(numbers(t), row, most, of_dims, room.codes.data() + t * row);
  }
  for (int64_t t = hidden; t < group_size; ++t) converted<float, float, S>(numbers(t), nullptr, dims, x + t * stride);
  // By dimensions: of 4 bits the first half of the tokens in the low bits, the other half in the high ones.
  const int64_t bytes = group_size * bits / 8;
  uint8_t* by_token = room.codes.data();
  if (bits == 4)
    for (int64_t n = 0; n < bytes * row; ++n) by_token[n] |= by_token[n + bytes * row] << 4;
  for (int64_t first = 0; first < bytes; first += 8)
    for (int64_t d = 0; d < dims; ++d)
      for (int64_t t = first; t < std::min(first + 8, bytes); ++t) codes[d * bytes + t] = by_token[t * row + d];
}

// `x` (rows, heads, tokens, dims) as groups of tokens, and what is read of them in its place. For each group, how many
// of its first tokens are hidden.
template <typename S>
std::tuple<Tensor, Tensor, Tensor> quantized(const Tensor& x, int64_t group_size, int64_t bits, int64_t per_token,
                                             const std::vector<int64_t>& hidden) {
  constexpr const char* kWrong = "structattn_native: tokens that are quantized do not make up groups";
  check(x.dim() == 4 && group_size > 0, kWrong);
  const int64_t rows = x.size(0), heads = x.size(1), count = x.size(2) / group_size, dims = x.size(3);
  check((x.stride(3) == 1 || dims == 1) && x.size(2) == count * group_size &&
            static_cast<int64_t>(hidden.size()) == count && (bits == 8 || (bits == 4 && group_size % 2 == 0)),
        kWrong);
  for (const int64_t first : hidden) check(0 <= first && first <= group_size, kWrong);
  const int64_t bytes = group_size * bits / 8, parts = (dims + group_size - 1) / group_size;
  const std::vector<int64_t> of_group{rows, heads, count, per_token ? parts : dims, per_token ? group_size : 1};
  Tensor codes = empty({rows, heads, count, dims, bytes}, dtype_of<uint8_t>());
  Tensor scale = empty(of_group, dtype_of<Half>()), zero = empty(of_group, dtype_of<Half>());
  S* numbers = x.data_ptr<S>();
  auto* of_codes = codes.data_ptr<uint8_t>();
  Half *of_scale = scale.data_ptr<Half>(), *of_zero = zero.data_ptr<Half>();
  const int64_t per_group = of_group[3] * of_group[4];
  parallel_for(rows * heads * count, [&](int64_t begin, int64_t end) {
    const QuantizeRoom room(group_size, dims);
    for (int64_t n = begin; n < end; ++n) {
      const int64_t group = n % count, head = n / count % heads, of_row = n / count / heads;
      quantize_group(numbers + of_row * x.stride(0) + head * x.stride(1) + group * group_size * x.stride(2),
                     x.stride(2), group_size, dims, bits, per_token, hidden[group], room, of_codes + n * dims * bytes,
                     of_scale + n * per_group, of_zero + n * per_group);
    }
  });
  return {std::move(codes), std::move(scale), std::move(zero)};
}

}  // namespace structattn
