// Products of codes with float32 numbers, by integers.
//
// A number x of some that are multiplied together becomes the whole number nearest to x / unit, with `unit` the largest
// of them divided by 2^21 or more, as three signed bytes. Their products with codes are added up without rounding, so
// that what is lost is what rounding the numbers loses: about as much as a sum in float32 does. Two bytes and 2^15 lose
// less than rounding the result to 16 bits does.
//
// The functions are those of AVX512-VNNI (integers_avx512.h) and of AVX2 (integers_avx2.h).
#pragma once

#include "numbers.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

namespace structattn {

struct alignas(64) Line {  // a line of the cache of a processor, or a vector of AVX-512
  uint8_t bytes[64];
};

constexpr int64_t kMostDims = 256;  // sums of products with as many codes do not overflow

// The largest whole number of three signed bytes, and of two: 2^23 - 2^16, and 2^15 - 2^8.
template <int kPieces>
constexpr float kMostSteps = kPieces == 3 ? 8323072.f : 32512.f;

// Finds the unit of numbers of which the largest has these bits, without its sign; false where they have none, or where
// it is larger than `most`.
inline bool unit_of(int32_t bits, float steps, float most, float& unit, float& inverse) {
  if (bits >= 0x7f800000 || bits < 0x0d000000) return false;  // not finite, or below 2^-101
  float largest;
  std::memcpy(&largest, &bits, sizeof largest);
  unit = largest / steps, inverse = steps / largest;
  return largest <= most;
}

// The most by which one dimension may make the scores of a group differ, so that rounding it costs all scores of the
// group about as little as they lose in the dtype of the model.
template <int kPieces>
constexpr float kMostScore = kPieces == 3 ? 256.f : 32.f;

// Asks for the codes that are read soon, where processors do not foresee enough of them: of several groups at once, and
// of 4 bits, with whose bytes a step does more. One group of 8 bits after the other is faster without.
inline void ask_for(const uint8_t* codes) { __builtin_prefetch(codes + 2048, 0, 2); }

// Room for the bytes of up to M queries (or of their weights), and for codes in the order in which they are multiplied.
struct IntegerRoom {
  std::vector<Line> bytes, codes;
  IntegerRoom(int64_t size, int64_t dims, int64_t queries)
      : bytes(queries * (size / 16 + 1)), codes(std::min(dims, kMostDims)) {}
};

}  // namespace structattn
