#include <cmath>
#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <limits>
#include <type_traits>

#include "check.h"
#include "compact_panel.h"
#include "context.h"
#include "kv_native.h"
#include "simd_avx2.h"

#define ISA avx2

#pragma GCC diagnostic ignored "-Wunused-function"  // of the other products
namespace avx2 {
namespace {
#include "products.inl"

float exp2_of(float x) {
  float lanes[16];
  store(lanes, exp2_nonpositive(set1(x)));
  for (float lane : lanes) CHECK(std::memcmp(&lane, lanes, sizeof lane) == 0);
  return lanes[0];
}

}  // namespace
}  // namespace avx2

TEST(powers_of_two_are_within_their_error) {
  if (!(kvn_cpu_features() & KVN_AVX2)) return;
  constexpr double kMostUlps = 2.1;
  constexpr uint32_t kMinusZero = 0x80000000, kMinus126 = 0xc2fc0000, kStride = 331;
  for (uint32_t bits = kMinusZero; bits <= kMinus126; bits += kStride) {
    float x;
    std::memcpy(&x, &bits, sizeof x);
    const double exact = std::exp2(static_cast<double>(x));
    const float found = avx2::exp2_of(x);
    CHECK(found <= 1.0f);
    CHECK(std::fabs(found - exact) <= kMostUlps * std::ldexp(1.0, std::ilogb(exact) - 23));
  }
}

TEST(powers_of_two_are_exact_for_whole_numbers) {
  if (!(kvn_cpu_features() & KVN_AVX2)) return;
  for (int n = 0; n >= -126; --n)
    CHECK(avx2::exp2_of(static_cast<float>(n)) == std::ldexp(1.0f, n));
  for (const float x : {-126.5f, -1000.0f, -3e38f, -std::numeric_limits<float>::infinity()})
    CHECK(avx2::exp2_of(x) == 0.0f);
  CHECK(std::isnan(avx2::exp2_of(std::numeric_limits<float>::quiet_NaN())));
}
