// The C ABI of the native CPU kernels. kv_kernels/native/prototypes.py declares the same functions
// for Python; KVN_ABI_VERSION counts up whenever a declared function or structure changes.
#pragma once

#include <cstdint>

#define KVN_ABI_VERSION 5

#define KVN_EXPORT extern "C" __attribute__((visibility("default")))

// Bits of kvn_cpu_features(). A bit is set only if the operating system saves the registers too.
enum : uint32_t {
  KVN_AVX2 = 1u << 0,         // AVX2, FMA and F16C: what files *_avx2.cpp are compiled for
  KVN_AVX512 = 1u << 1,       // AVX512 F, BW, VL and DQ; never without KVN_AVX2
  KVN_AVX512_VNNI = 1u << 2,  // never without KVN_AVX512
  KVN_AVX512_BF16 = 1u << 3,  // never without KVN_AVX512
  KVN_AMX = 1u << 4,          // tiles of bfloat16 and int8; never without KVN_AVX512
  // Measured: products of bfloat16 take longer by KVN_AVX512_BF16 than in float32.
  KVN_SLOW_BF16 = 1u << 5,  // never without KVN_AVX512_BF16
};

// What files *_avx512_vnni.cpp are compiled for: a compiler may use any of it on its own.
constexpr uint32_t KVN_AVX512_VNNI_ALL = KVN_AVX2 | KVN_AVX512 | KVN_AVX512_VNNI;
constexpr uint32_t KVN_AVX512_ALL = KVN_AVX512_VNNI_ALL | KVN_AVX512_BF16;  // files *_avx512.cpp
constexpr uint32_t KVN_AMX_ALL = KVN_AVX512_ALL | KVN_AMX;                  // files *_amx.cpp

KVN_EXPORT int32_t kvn_abi_version();

// What the library was built from: "SOURCES.TOOLCHAIN", two hashes. The text is static.
KVN_EXPORT const char* kvn_build_id();

// The features that kernels may use: those of this CPU, less what kvn_limit_cpu_features removed.
KVN_EXPORT uint32_t kvn_cpu_features();

// Let kernels use only the features in `mask`, so that one machine can test every variant. A later
// call replaces the mask; no mask adds a feature that the CPU does not have.
KVN_EXPORT void kvn_limit_cpu_features(uint32_t mask);

// Read `bytes` bytes at `data`, a multiple of 128 aligned to 64, as two sequential streams at once,
// and return their sum as 64-bit numbers. Measures what the calling core can read from memory.
KVN_EXPORT int64_t kvn_read_two_streams(const void* data, int64_t bytes);

// Copy `count` slabs of `slab_bytes` bytes, a multiple of 64, from rows of `source` to rows of
// `target`, and return their XXH3 (64 bits), in their order. Together they have more than 240 bytes.
// Without rows they lie one behind the other; without a target they are only hashed.
KVN_EXPORT uint64_t kvn_copy_slabs(const uint8_t* source, const int64_t* source_rows,
                                   uint8_t* target, const int64_t* target_rows, int64_t count,
                                   int64_t slab_bytes);
