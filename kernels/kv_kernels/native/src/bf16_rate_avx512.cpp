// Measures whether this CPU multiplies bfloat16 faster by AVX512-BF16 or in float32.
#include "bf16_rate.h"

#include <immintrin.h>
#include <stdint.h>
#include <time.h>

namespace {

constexpr int kSums = 12;       // in registers: more than the latency of the instructions needs
constexpr int kSteps = 2500;    // of each sum: much longer than reading a clock
constexpr int kAttempts = 12;   // the shortest counts: other processes only lengthen them
constexpr double kMargin = 1.25;  // so that processes that measure differently choose the same

struct Fma {
  static __m512 add(__m512 sum, __m512 x) { return _mm512_fmadd_ps(x, x, sum); }
};
struct BF16 {
  static __m512 add(__m512 sum, __m512 x) {
    return _mm512_dpbf16_ps(sum, (__m512bh)x, (__m512bh)x);
  }
};

int64_t read_clock() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return int64_t{now.tv_sec} * 1'000'000'000 + now.tv_nsec;
}

// Nanoseconds of kSteps times kSums additions of products.
template <class Product>
int64_t time_products() {
  __m512 sums[kSums], x = _mm512_setzero_ps();
  for (__m512& sum : sums) sum = _mm512_setzero_ps();
  const int64_t started = read_clock();
  for (int step = 0; step < kSteps; ++step) {
#pragma GCC unroll 12
    for (int i = 0; i < kSums; ++i) sums[i] = Product::add(sums[i], x);
    __asm__ volatile("" : "+v"(x));  // so that no step is left out
  }
#pragma GCC unroll 12
  for (int i = 0; i < kSums; ++i) __asm__ volatile("" : : "v"(sums[i]));
  return read_clock() - started;
}

}  // namespace

// A vdpbf16ps takes four times as long as one multiplication in float32 on a Xeon without AMX, and
// about as long on Zen 4. With two times as long, both ways would be equal.
bool kvn::is_bf16_slow() {
  int64_t float32 = INT64_MAX, bfloat16 = INT64_MAX;
  for (int i = 0; i < kAttempts; ++i) {
    const int64_t first = time_products<Fma>(), second = time_products<BF16>();
    if (first < float32) float32 = first;
    if (second < bfloat16) bfloat16 = second;
  }
  return static_cast<double>(bfloat16) > 2 * kMargin * static_cast<double>(float32);
}
