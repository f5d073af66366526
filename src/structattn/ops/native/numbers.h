// Numbers of 16 bits, which are computed in float.
#pragma once

#include <bit>
#include <cstdint>
#include <type_traits>

namespace structattn {

// IEEE 754, as compilers have it.
struct Half {
#if defined(__aarch64__)
  using Value = __fp16;
#else
  using Value = _Float16;
#endif
  Value value;
  Half() = default;
  Half(float x) : value(static_cast<Value>(x)) {}
  operator float() const { return static_cast<float>(value); }
};

// The upper half of a float.
struct BFloat16 {
  uint16_t bits;
  BFloat16() = default;
  BFloat16(float x) {
    const auto all = std::bit_cast<uint32_t>(x);
    bits = x != x ? 0x7fc0 : static_cast<uint16_t>((all + 0x7fff + (all >> 16 & 1)) >> 16);  // to the nearest, or even
  }
  operator float() const { return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16); }
};

// What numbers are added up in.
template <typename T>
using Sum = std::conditional_t<std::is_same_v<T, double>, double, float>;

static_assert(sizeof(Half) == 2 && sizeof(BFloat16) == 2 && std::is_trivially_copyable_v<Half>);

}  // namespace structattn
