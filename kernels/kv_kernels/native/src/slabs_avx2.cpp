// Copies and hashes slabs of KV: equal pieces of memory that lie in rows of two arenas. Each piece is
// hashed right after it was copied, while a cache has it.
//
// The hash is XXH3, 64 bits, seed 0, for inputs of more than 240 bytes, by its specification
// (https://github.com/Cyan4973/xxHash/blob/dev/doc/xxhash_spec.md). Pieces are whole stripes of 64
// bytes, so that no stripe spans two of them.
#include <immintrin.h>
#include <string.h>

#include "kv_native.h"

namespace {

constexpr int64_t kStripe = 64;
constexpr int64_t kStripesPerBlock = 16;  // (secret - stripe) / 8
constexpr uint64_t kPrime32_1 = 0x9E3779B1u, kPrime32_2 = 0x85EBCA77u, kPrime32_3 = 0xC2B2AE3Du;
constexpr uint64_t kPrime64_1 = 0x9E3779B185EBCA87u, kPrime64_2 = 0xC2B2AE3D27D4EB4Fu,
                   kPrime64_3 = 0x165667B19E3779F9u, kPrime64_4 = 0x85EBCA77C2B2AE63u,
                   kPrime64_5 = 0x27D4EB2F165667C5u, kPrimeMix = 0x165667919E3779F9u;

alignas(64) const uint8_t kSecret[192] = {
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c,
    0xde, 0xd4, 0x6d, 0xe9, 0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f,
    0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0, 0xe5, 0x78, 0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21,
    0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6, 0x81, 0x3a, 0x26, 0x4c,
    0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb, 0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3,
    0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19, 0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8,
    0xa8, 0xfa, 0x76, 0x3f, 0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7, 0xc7, 0x0b, 0x4f, 0x1d,
    0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31, 0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73, 0x64,
    0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff, 0xfa, 0x13, 0x63, 0xeb,
    0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e,
    0x2b, 0x16, 0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce,
    0x45, 0xcb, 0x3a, 0x8f, 0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e,
};

uint64_t load64(const uint8_t* bytes) {
  uint64_t value;
  memcpy(&value, bytes, sizeof value);
  return value;
}

__m256i load256(const uint8_t* bytes) {
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(bytes));
}

// The hash of whole stripes that come in pieces.
class StripeHash {
 public:
  StripeHash() {
    alignas(32) const uint64_t start[8] = {kPrime32_3, kPrime64_1, kPrime64_2, kPrime64_3,
                                           kPrime64_4, kPrime32_2, kPrime64_5, kPrime32_1};
    lanes_[0] = load256(reinterpret_cast<const uint8_t*>(start));
    lanes_[1] = load256(reinterpret_cast<const uint8_t*>(start + 4));
  }

  // All of the input but its last stripe.
  void add_stripes(const uint8_t* input, int64_t count) {
    __m256i low = lanes_[0], high = lanes_[1];
    for (int64_t i = 0; i < count; ++i, input += kStripe) {
      const uint8_t* secret = kSecret + 8 * position_;
      low = accumulate(low, load256(input), load256(secret));
      high = accumulate(high, load256(input + 32), load256(secret + 32));
      if (++position_ == kStripesPerBlock) {
        position_ = 0;
        low = scramble(low, load256(kSecret + sizeof kSecret - 64));
        high = scramble(high, load256(kSecret + sizeof kSecret - 32));
      }
    }
    lanes_[0] = low;
    lanes_[1] = high;
  }

  // `last` is the last stripe of `bytes` bytes of input.
  uint64_t finish(const uint8_t* last, int64_t bytes) {
    const uint8_t* secret = kSecret + sizeof kSecret - 64 - 7;
    alignas(32) uint64_t sums[8];
    _mm256_store_si256(reinterpret_cast<__m256i*>(sums),
                       accumulate(lanes_[0], load256(last), load256(secret)));
    _mm256_store_si256(reinterpret_cast<__m256i*>(sums + 4),
                       accumulate(lanes_[1], load256(last + 32), load256(secret + 32)));
    uint64_t hash = static_cast<uint64_t>(bytes) * kPrime64_1;
    for (int i = 0; i < 8; i += 2) {
      const uint8_t* key = kSecret + 11 + 8 * i;
      const unsigned __int128 product =
          static_cast<unsigned __int128>(sums[i] ^ load64(key)) * (sums[i + 1] ^ load64(key + 8));
      hash += static_cast<uint64_t>(product) ^ static_cast<uint64_t>(product >> 64);
    }
    hash ^= hash >> 37;
    hash *= kPrimeMix;
    return hash ^ (hash >> 32);
  }

 private:
  static __m256i accumulate(__m256i sum, __m256i data, __m256i secret) {
    const __m256i key = _mm256_xor_si256(data, secret);
    const __m256i product = _mm256_mul_epu32(key, _mm256_srli_epi64(key, 32));
    const __m256i swapped = _mm256_shuffle_epi32(data, _MM_SHUFFLE(1, 0, 3, 2));
    return _mm256_add_epi64(sum, _mm256_add_epi64(product, swapped));
  }

  static __m256i scramble(__m256i sum, __m256i secret) {
    const __m256i mixed =
        _mm256_xor_si256(_mm256_xor_si256(sum, _mm256_srli_epi64(sum, 47)), secret);
    const __m256i prime = _mm256_set1_epi64x(static_cast<int64_t>(kPrime32_1));
    const __m256i low = _mm256_mul_epu32(mixed, prime);
    const __m256i high = _mm256_mul_epu32(_mm256_srli_epi64(mixed, 32), prime);
    return _mm256_add_epi64(low, _mm256_slli_epi64(high, 32));
  }

  __m256i lanes_[2];
  int64_t position_ = 0;  // in the block of stripes
};

}  // namespace

uint64_t kvn_copy_slabs(const uint8_t* source, const int64_t* source_rows, uint8_t* target,
                        const int64_t* target_rows, int64_t count, int64_t slab_bytes) {
  StripeHash hash;
  const uint8_t* read = nullptr;
  for (int64_t i = 0; i < count; ++i) {
    read = source + (source_rows == nullptr ? i : source_rows[i]) * slab_bytes;
    if (target != nullptr)
      memcpy(target + (target_rows == nullptr ? i : target_rows[i]) * slab_bytes, read,
             static_cast<size_t>(slab_bytes));
    hash.add_stripes(read, slab_bytes / kStripe - (i == count - 1));
  }
  return hash.finish(read + slab_bytes - kStripe, count * slab_bytes);
}
