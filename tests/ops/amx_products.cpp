// `product` of pairs of bfloat16 numbers with emulated tile registers (STRUCTATTN_EMULATE_AMX), over sizes that fill
// registers and sizes that do not: results, that nothing else is read or written, and what ends the process.
#include "products.h"

#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <limits>
#include <random>
#include <stdexcept>
#include <thread>
#include <vector>

using namespace structattn;

namespace {

void require(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "failed: %s\n", what);
  std::exit(1);
}

// Memory that ends where none may be read or written.
template <typename T>
class Guarded {
 public:
  explicit Guarded(int64_t size) {
    const int64_t page = sysconf(_SC_PAGESIZE), bytes = size * static_cast<int64_t>(sizeof(T));
    inside_ = (bytes + page - 1) / page * page;
    all_ =
        static_cast<char*>(mmap(nullptr, inside_ + page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    require(all_ != MAP_FAILED && mprotect(all_ + inside_, page, PROT_NONE) == 0, "memory for a test");
    page_ = page;
    data = reinterpret_cast<T*>(all_ + inside_ - bytes);
  }
  Guarded(const Guarded&) = delete;
  ~Guarded() { munmap(all_, inside_ + page_); }

  T* data;

 private:
  char* all_;
  int64_t inside_, page_;
};

uint32_t bits_of(float first, float second) { return BFloat16(first).bits | uint32_t{BFloat16(second).bits} << 16; }
double first_of(Pair x) { return std::bit_cast<float>(x.bits << 16); }
double second_of(Pair x) { return std::bit_cast<float>(x.bits & 0xffff0000u); }

std::mt19937 generator(0);
Pair random_pair() {
  std::normal_distribution<float> numbers;
  const float first = numbers(generator), second = numbers(generator);
  return {bits_of(first, second)};
}

// A product whose left side is in rows or in columns, with `gap` numbers between rows. A left row and a right column of
// infinities and NaN reach their own row and column only.
void check(int64_t rows, int64_t cols, int64_t depth, bool in_columns, int64_t gap, bool add, float factor,
           bool has_nan) {
  const int64_t am = in_columns ? 1 : depth + gap, ak = in_columns ? rows + gap : 1, ldb = cols + gap, ldc = cols + gap;
  const int64_t nan_row = has_nan ? rows / 2 : -1, nan_col = has_nan ? cols / 3 : -1;
  Guarded<Pair> a((rows - 1) * am + (depth - 1) * ak + 1), b((depth - 1) * ldb + cols);
  Guarded<float> c((rows - 1) * ldc + cols);
  const auto fill = [](Pair* x, int64_t size) {
    for (int64_t n = 0; n < size; ++n) x[n] = {0x7fc0ff80};  // what is between rows is NaN and infinity
  };
  fill(a.data, (rows - 1) * am + (depth - 1) * ak + 1);
  fill(b.data, (depth - 1) * ldb + cols);
  for (int64_t k = 0; k < depth; ++k) {
    for (int64_t m = 0; m < rows; ++m)
      if (m != nan_row) a.data[m * am + k * ak] = random_pair();
    for (int64_t n = 0; n < cols; ++n)
      if (n != nan_col) b.data[k * ldb + n] = random_pair();
  }
  std::vector<float> before((rows - 1) * ldc + cols, 7);
  for (int64_t m = 0; m < rows; ++m)
    for (int64_t n = 0; n < cols; ++n) before[m * ldc + n] = static_cast<float>(m) - static_cast<float>(n) / 2;
  std::copy(before.begin(), before.end(), c.data);
  {
    const RegistersFor<Pair> registers;
    product<Pair>(rows, cols, depth, a.data, am, ak, b.data, ldb, c.data, ldc, add, factor);
  }
  for (int64_t m = 0; m < rows; ++m) {
    for (int64_t n = 0; n < ldc && m * ldc + n < static_cast<int64_t>(before.size()); ++n) {
      const float found = c.data[m * ldc + n];
      if (n >= cols) {
        require(found == 7, "a number between rows was written");
        continue;
      }
      if (m == nan_row || n == nan_col) {
        require(std::isnan(found), "NaN was lost");
        continue;
      }
      double sum = add ? before[m * ldc + n] : 0, size = std::fabs(sum);
      for (int64_t k = 0; k < depth; ++k) {
        const Pair x = a.data[m * am + k * ak], y = b.data[k * ldb + n];
        sum += first_of(x) * first_of(y) + second_of(x) * second_of(y);
        size += std::fabs(first_of(x) * first_of(y)) + std::fabs(second_of(x) * second_of(y));
      }
      require(std::fabs(found - factor * sum) <= 1e-6 * factor * size, "a sum is wrong");
    }
  }
}

template <typename F>
void require_abort(const F& f, const char* what) {
  std::fflush(stderr);
  const pid_t child = fork();
  if (child == 0) {
    require(std::freopen("/dev/null", "w", stderr) != nullptr, "a child without messages");
    f();
    _exit(0);
  }
  int status = 0;
  waitpid(child, &status, 0);
  require(WIFSIGNALED(status) && WTERMSIG(status) == SIGABRT, what);
}

// The numbers of one multiplication, in which the order of sums is seen, and denormal numbers, which are 0.
void check_the_instruction() {
  const float huge = 0x1p60f, tiny = 0x1p-130f, small = 0x1p-70f;
  std::vector<Pair> a(256), b(256);
  std::vector<float> c(256, 1.f);
  a[0] = {bits_of(huge, 1)};  // 2^60 - 2^60 in the first numbers, 2 x 3 in the second ones
  a[1] = {bits_of(-huge, 1)};
  b[0] = {bits_of(1, 3)};
  b[16] = {bits_of(1, 3)};
  a[16] = {bits_of(tiny, 0)};  // row 1: a denormal number times 2^60
  b[1] = {bits_of(huge, 0)};
  a[32] = {bits_of(small, 0)};  // row 2: a product that would be denormal
  b[2] = {bits_of(small, 0)};
  const RegistersFor<Pair> registers;
  require(amx::are_right(), "products of small whole numbers are exact");
  amx::load<0>(c.data(), 16);
  amx::load<4>(a.data(), 16);
  amx::load<6>(b.data(), 16);
  amx::multiply<0, 4, 6>();
  amx::store<0>(c.data(), 16);
  require(c[0] == 7, "first and second numbers are added up by themselves");
  require(c[16 + 1] == 1, "a denormal number is 0");
  require(c[32 + 2] == 1, "a denormal product is 0");
}

void check_configurations() {
  std::vector<Pair> a(16 * 16), b(16 * 16);
  std::vector<float> c(16 * 16);
  const auto multiplied = [&] { product<Pair>(16, 16, 16, a.data(), 16, 1, b.data(), 16, c.data(), 16, false); };
  require_abort(multiplied, "registers that are not configured are used");
  require_abort([] { amx::release(); }, "registers that are not configured are released");
  require_abort([] { const RegistersFor<Pair> registers, again; }, "registers are configured twice");
  require_abort(
      [&] {
        amx::configure();
        --amx::registers.configuration.rows[4];
        amx::load<4>(a.data(), 16);
      },
      "more rows are loaded than are configured");
  require_abort(
      [&] {
        amx::configure();
        amx::registers.configuration.row_bytes[6] = 32;
        amx::load<6>(b.data(), 16);
      },
      "more bytes are loaded than are configured");
  require_abort(
      [] {
        amx::configure();
        amx::registers.configuration.rows[6] = 8;
        amx::multiply<0, 4, 6>();
      },
      "registers that do not fit together are multiplied");
  {
    const RegistersFor<float> of_floats;
  }
  try {
    const RegistersFor<Pair> registers;
    multiplied();
    require(amx::is_configured(), "registers are configured");
    std::thread([] { require(!amx::is_configured(), "registers of another thread are configured"); }).join();
    throw std::runtime_error("an exception");
  } catch (const std::runtime_error&) {
  }
  require(!amx::is_configured(), "an exception leaves registers configured");
}

}  // namespace

int main() {
  check_the_instruction();
  check_configurations();
  int64_t number = 0;
  for (const int64_t rows : {1, 15, 16, 17, 31, 32, 33, 48, 63, 64, 65})
    for (const int64_t cols : {1, 8, 15, 16, 17, 24, 32, 48, 49, 63, 64, 80})
      for (const int64_t depth : {1, 4, 7, 8, 9, 15, 16, 17, 24, 31, 32, 33, 40, 64, 65})
        for (const bool in_columns : {false, true}) {
          ++number;
          check(rows, cols, depth, in_columns, number % 4, number % 3 != 0, number % 5 < 2 ? 1.f : 0.25f,
                number % 7 == 0);
        }
  return 0;
}
