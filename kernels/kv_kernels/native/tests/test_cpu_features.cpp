#include <pthread.h>

#include <cstring>

#include "check.h"
#include "kv_native.h"

namespace {

constexpr int kThreads = 4, kRounds = 1000;

// Everything that a set of features implies is in it.
bool is_consistent(uint32_t features) {
  if (features & (KVN_AVX512_VNNI | KVN_AVX512_BF16 | KVN_AMX)) {
    if (!(features & KVN_AVX512)) return false;
  }
  if ((features & KVN_SLOW_BF16) && !(features & KVN_AVX512_BF16)) return false;
  return !features || (features & KVN_AVX2);
}

void* read_features(void*) {
  for (int i = 0; i < kRounds; ++i) CHECK(is_consistent(kvn_cpu_features()));
  return nullptr;
}

}  // namespace

TEST(a_mask_only_removes_features) {
  const uint32_t all = kvn_cpu_features();
  for (uint32_t mask = 0; mask <= (KVN_AMX_ALL | KVN_SLOW_BF16); ++mask) {
    kvn_limit_cpu_features(mask);
    const uint32_t features = kvn_cpu_features();
    CHECK((features & ~all) == 0 && (features & ~mask) == 0 && is_consistent(features));
  }
  kvn_limit_cpu_features(~0u);
  CHECK(kvn_cpu_features() == all);
}

TEST(features_are_read_while_the_mask_changes) {
  pthread_t threads[kThreads];
  for (pthread_t& thread : threads) CHECK(!pthread_create(&thread, nullptr, read_features, nullptr));
  for (int i = 0; i < kRounds; ++i) kvn_limit_cpu_features(i % 2 ? ~0u : 0u);
  for (pthread_t thread : threads) pthread_join(thread, nullptr);
  kvn_limit_cpu_features(~0u);
}

TEST(the_library_says_what_it_is) {
  CHECK(kvn_abi_version() == KVN_ABI_VERSION);
  CHECK(std::strlen(kvn_build_id()) > 0);
}
