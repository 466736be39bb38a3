// Detects what instructions this CPU has and the operating system allows (CPUID and XGETBV), and
// whether those of AVX512-BF16 are worth using.
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>

#include "bf16_rate.h"
#include "kv_native.h"

namespace {

constexpr uint32_t kOsXsave = 1u << 27, kAvx = 1u << 28, kF16c = 1u << 29, kFma = 1u << 12;
constexpr uint32_t kAvx2 = 1u << 5;
constexpr uint32_t kAvx512 = 1u << 16 | 1u << 17 | 1u << 30 | 1u << 31;  // F, DQ, BW, VL
constexpr uint32_t kVnni = 1u << 11;
constexpr uint32_t kBf16 = 1u << 5;
// Registers that the operating system saves: XMM and YMM; then masks, upper ZMM, ZMM 16 to 31.
constexpr uint32_t kYmmState = 0x6, kZmmState = 0xe6, kTileState = 0x60000;
constexpr uint32_t kAmx = 1u << 22 | 1u << 24 | 1u << 25;  // BF16, TILE, INT8
constexpr int kRequestState = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA

uint32_t saved_registers() {
  uint32_t low, high;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return low;
}

bool has_all(uint32_t value, uint32_t bits) { return (value & bits) == bits; }

// Linux gives the tile registers to a process that asks for them, since 5.16.
bool is_given_tiles() { return syscall(SYS_arch_prctl, kRequestState, kTileData) == 0; }

uint32_t detect() {
  uint32_t a, b, c, d;
  if (!__get_cpuid(1, &a, &b, &c, &d) || !has_all(c, kOsXsave | kAvx | kF16c | kFma)) return 0;
  const uint32_t saved = saved_registers();
  if (!has_all(saved, kYmmState) || !__get_cpuid_count(7, 0, &a, &b, &c, &d)) return 0;
  if (!has_all(b, kAvx2)) return 0;
  uint32_t features = KVN_AVX2;
  if (!has_all(saved, kZmmState) || !has_all(b, kAvx512)) return features;
  features |= KVN_AVX512;
  if (c & kVnni) features |= KVN_AVX512_VNNI;
  if (has_all(saved, kTileState) && has_all(d, kAmx) && is_given_tiles()) features |= KVN_AMX;
  if (a >= 1 && __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a & kBf16)) features |= KVN_AVX512_BF16;
  if (has_all(features, KVN_AVX512_ALL) && kvn::is_bf16_slow()) features |= KVN_SLOW_BF16;
  return features;
}

// A feature is gone with what it needs.
uint32_t consistent(uint32_t features) {
  if (!(features & KVN_AVX2)) return 0;
  if (!(features & KVN_AVX512)) return KVN_AVX2;
  return features & KVN_AVX512_BF16 ? features : features & ~KVN_SLOW_BF16;
}

constexpr uint32_t kUnknown = ~0u;

std::atomic<uint32_t> detected{kUnknown};
std::atomic<uint32_t> allowed{~0u};

}  // namespace

uint32_t kvn_cpu_features() {
  uint32_t features = detected.load(std::memory_order_relaxed);
  if (features == kUnknown) {
    // Several threads may detect at once, and what they measure may differ: the first one counts.
    const uint32_t found = detect();
    if (detected.compare_exchange_strong(features, found, std::memory_order_relaxed))
      features = found;
  }
  return consistent(features & allowed.load(std::memory_order_relaxed));
}

void kvn_limit_cpu_features(uint32_t mask) { allowed.store(mask, std::memory_order_relaxed); }
