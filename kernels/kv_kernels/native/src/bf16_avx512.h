// Numbers in bfloat16 and their products by the instructions of AVX512-BF16.
#pragma once

#include "simd_avx512.h"

namespace avx512 {

static inline void store_bf16(uint16_t* p, F16 a) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), (__m256i)_mm512_cvtneps_pbh(a.v));
}
static inline void store_bf16_first(uint16_t* p, F16 a, int n) {
  _mm256_mask_storeu_epi16(p, first_lanes(n), (__m256i)_mm512_cvtneps_pbh(a.v));
}

struct DotBF16 {
  using X = uint16_t;
  using W = uint16_t;
  using Out = float;
  static constexpr int kStep = 2;
  static constexpr int kParts = 1;
  using Acc = __m512;
  static inline Acc zero() { return _mm512_setzero_ps(); }
  template <int kPart = 0>
  static inline __m512i load_weights(const W* w) { return _mm512_loadu_si512(w); }
  template <int kPart = 0>
  static inline __m512i broadcast(const X* x, ptrdiff_t = 1) {
    int32_t pair;
    __builtin_memcpy(&pair, x, sizeof pair);
    return _mm512_set1_epi32(pair);
  }
  static inline Acc accumulate(Acc acc, __m512i x, __m512i w) {
    return _mm512_dpbf16_ps(acc, (__m512bh)x, (__m512bh)w);
  }
  static inline void store(Out* out, Acc acc) { _mm512_storeu_ps(out, acc); }
};

}  // namespace avx512
