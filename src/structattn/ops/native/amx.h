// The tile registers of AMX: 8 registers of 16 rows of 64 bytes, and the product of two of them, of pairs of bfloat16
// numbers with sums in float. Each function is one instruction.
//
// Where STRUCTATTN_EMULATE_AMX is defined, as tests do, the functions compute what Intel's manual says of the
// instructions, and end the process where a processor would raise an exception, or where the code would be wrong
// without one: a register that is not configured, or a load of more than its configuration has.
//
// Source: Intel 64 and IA-32 Architectures Software Developer's Manual, volume 2: LDTILECFG, TILELOADD, TDPBF16PS.
#pragma once

#include <cstdint>

#if defined(STRUCTATTN_EMULATE_AMX)
#define STRUCTATTN_HAS_AMX
#include <cfloat>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#elif defined(__AMX_TILE__) && defined(__AMX_BF16__)
#define STRUCTATTN_HAS_AMX
#include <immintrin.h>
#endif

#if defined(STRUCTATTN_HAS_AMX)
namespace structattn::amx {

constexpr int64_t kRegisters = 8, kRows = 16, kRowBytes = 64;
constexpr int64_t kNumbers = kRowBytes / 4;  // of 32 bits, in a row: floats, or pairs of bfloat16 numbers

// What LDTILECFG reads.
struct alignas(64) Configuration {
  uint8_t palette = 0, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};
};
static_assert(sizeof(Configuration) == 64);

constexpr Configuration whole_registers() {
  Configuration out;
  out.palette = 1;
  for (int64_t n = 0; n < kRegisters; ++n) {
    out.row_bytes[n] = kRowBytes;
    out.rows[n] = kRows;
  }
  return out;
}
inline constexpr Configuration kWhole = whole_registers();

#if defined(STRUCTATTN_EMULATE_AMX)
struct Registers {
  Configuration configuration;
  unsigned char bytes[kRegisters][kRows][kRowBytes];
};
inline thread_local Registers registers;

inline void expect(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "structattn: wrong use of AMX: %s\n", what);
  std::abort();
}

inline bool is_configured() { return registers.configuration.palette != 0; }

// A processor would accept a second configuration. Here it means that some code has not released the first one.
inline void configure() {
  expect(!is_configured(), "the registers of this thread are configured already");
  registers = Registers{kWhole, {}};
}

inline void release() {
  expect(is_configured(), "a release of registers that are not configured");
  registers = Registers{};
}

template <int kRegister>
inline void zero() {
  expect(is_configured(), "a register is used that is not configured");
  std::memset(registers.bytes[kRegister], 0, sizeof(registers.bytes[kRegister]));
}

// 16 rows of 16 numbers of 32 bits, the rows `stride` numbers apart.
template <int kRegister>
inline void load(const void* from, int64_t stride) {
  zero<kRegister>();
  const Configuration& of = registers.configuration;
  expect(kRows <= of.rows[kRegister] && kRowBytes <= of.row_bytes[kRegister], "a load of more than is configured");
  for (int64_t i = 0; i < of.rows[kRegister]; ++i)
    std::memcpy(registers.bytes[kRegister][i], static_cast<const char*>(from) + i * stride * 4,
                of.row_bytes[kRegister]);
}

template <int kRegister>
inline void store(void* to, int64_t stride) {
  expect(is_configured(), "a register is used that is not configured");
  const Configuration& of = registers.configuration;
  expect(kRows <= of.rows[kRegister] && kRowBytes <= of.row_bytes[kRegister], "a store of more than is configured");
  for (int64_t i = 0; i < of.rows[kRegister]; ++i)
    std::memcpy(static_cast<char*>(to) + i * stride * 4, registers.bytes[kRegister][i], of.row_bytes[kRegister]);
}

// Denormal numbers are 0, as inputs and as results.
inline float flushed(float x) { return std::fabs(x) < FLT_MIN ? std::copysign(0.f, x) : x; }

// sums += left right: the first numbers of all pairs are added up, the second ones too, and then both to the sums.
template <int kSums, int kLeft, int kRight>
inline void multiply() {
  static_assert(kSums != kLeft && kSums != kRight && kLeft != kRight);
  expect(is_configured(), "a register is used that is not configured");
  const Configuration& of = registers.configuration;
  expect(of.rows[kSums] == of.rows[kLeft] && of.row_bytes[kSums] == of.row_bytes[kRight] &&
             of.row_bytes[kLeft] == 4 * of.rows[kRight],
         "a product of registers that do not fit together");
  uint32_t left[kRows][kNumbers], right[kRows][kNumbers];
  float sums[kRows][kNumbers];
  std::memcpy(left, registers.bytes[kLeft], sizeof(left));
  std::memcpy(right, registers.bytes[kRight], sizeof(right));
  std::memcpy(sums, registers.bytes[kSums], sizeof(sums));
  const auto number = [](uint32_t pair, bool is_second) {
    const uint32_t bits = is_second ? pair & 0xffff0000u : pair << 16;
    float x;
    std::memcpy(&x, &bits, sizeof(x));
    return flushed(x);
  };
  for (int64_t m = 0; m < of.rows[kSums]; ++m) {
    float first[kNumbers] = {}, second[kNumbers] = {};
    for (int64_t k = 0; k < of.rows[kRight]; ++k) {
      const float x = number(left[m][k], false), y = number(left[m][k], true);
      for (int64_t n = 0; n < kNumbers; ++n) {
        first[n] = flushed(std::fma(x, number(right[k][n], false), first[n]));
        second[n] = flushed(std::fma(y, number(right[k][n], true), second[n]));
      }
    }
    for (int64_t n = 0; n < kNumbers; ++n) sums[m][n] = flushed(flushed(sums[m][n]) + flushed(first[n] + second[n]));
  }
  std::memcpy(registers.bytes[kSums], sums, sizeof(sums));
}
#else
// Keeps what is written before a load before it, and what is written after it after it: what GCC knows of the
// instruction does not say that it reads memory.
inline void keep_order() { __asm__ volatile("" ::: "memory"); }

inline void configure() { _tile_loadconfig(&kWhole); }
inline void release() { _tile_release(); }

template <int kRegister>
void zero();
template <int kRegister>
void load(const void* from, int64_t stride);
template <int kRegister>
void store(void* to, int64_t stride);
template <int kSums, int kLeft, int kRight>
void multiply();

// The numbers of registers are part of the names of instructions: no template can compute them.
#define STRUCTATTN_REGISTER(n)                             \
  template <>                                              \
  inline void zero<n>() {                                  \
    _tile_zero(n);                                         \
  }                                                        \
  template <>                                              \
  inline void load<n>(const void* from, int64_t stride) {  \
    keep_order();                                          \
    _tile_loadd(n, from, static_cast<size_t>(stride * 4)); \
    keep_order();                                          \
  }                                                        \
  template <>                                              \
  inline void store<n>(void* to, int64_t stride) {         \
    _tile_stored(n, to, static_cast<size_t>(stride * 4));  \
  }
#define STRUCTATTN_PRODUCT(sums, left, right) \
  template <>                                 \
  inline void multiply<sums, left, right>() { \
    _tile_dpbf16ps(sums, left, right);        \
  }
STRUCTATTN_REGISTER(0)
STRUCTATTN_REGISTER(1)
STRUCTATTN_REGISTER(2)
STRUCTATTN_REGISTER(3)
STRUCTATTN_REGISTER(4)
STRUCTATTN_REGISTER(5)
STRUCTATTN_REGISTER(6)
STRUCTATTN_REGISTER(7)
STRUCTATTN_PRODUCT(0, 4, 6)
STRUCTATTN_PRODUCT(1, 4, 7)
STRUCTATTN_PRODUCT(2, 5, 6)
STRUCTATTN_PRODUCT(3, 5, 7)
#undef STRUCTATTN_REGISTER
#undef STRUCTATTN_PRODUCT
#endif

}  // namespace structattn::amx
#endif
