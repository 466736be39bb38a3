// Products of bfloat16 by multiplications in float32, for CPUs without AVX512-BF16 and those that
// take longer for one vdpbf16ps than for two of these.
#pragma once

#include "simd_avx512.h"

namespace avx512_widened {

using namespace avx512;
using avx512::load_bf16;
using avx512::load_bf16_first;

// Round to bfloat16, to nearest even; what is not a number stays so.
static inline __m512i round_to_bf16(F16 a) {
  const __m512i bits = _mm512_castps_si512(a.v);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i rounded =
      _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
  return _mm512_mask_or_epi32(rounded, _mm512_cmp_ps_mask(a.v, a.v, _CMP_UNORD_Q), bits,
                              _mm512_set1_epi32(0x400000));
}
static inline __m256i narrow(F16 a) {
  return _mm512_cvtepi32_epi16(_mm512_srli_epi32(round_to_bf16(a), 16));
}
static inline void store_bf16(uint16_t* p, F16 a) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), narrow(a));
}
static inline void store_bf16_first(uint16_t* p, F16 a, int n) {
  _mm256_mask_storeu_epi16(p, first_lanes(n), narrow(a));
}

// Rows hold numbers of bfloat16 in float32, so that no product has to widen them again.
static inline F16 load_bf16(const float* p) { return load(p); }
static inline F16 load_bf16_first(const float* p, int n) { return load_first(p, n); }
static inline F16 clear_low_halves(__m512i bits) {
  return {_mm512_castsi512_ps(_mm512_and_si512(bits, _mm512_set1_epi32(-65536)))};
}
static inline void store_bf16(float* p, F16 a) { store(p, clear_low_halves(round_to_bf16(a))); }
static inline void store_bf16_first(float* p, F16 a, int n) {
  store_first(p, clear_low_halves(round_to_bf16(a)), n);
}

// Products of bfloat16 are exact in float32: each pair is added in two steps.
struct DotBF16 {
  using X = float;
  using W = uint16_t;
  using Out = float;
  static constexpr int kStep = 2;
  static constexpr int kParts = 1;
  using Acc = __m512;
  struct Pair {
    __m512 even, odd;
  };
  static inline Acc zero() { return _mm512_setzero_ps(); }
  template <int kPart = 0>
  static inline Pair load_weights(const W* w) {
    const __m512i words = _mm512_loadu_si512(w);
    return {_mm512_castsi512_ps(_mm512_slli_epi32(words, 16)), clear_low_halves(words).v};
  }
  template <int kPart = 0>
  static inline Pair broadcast(const X* x, ptrdiff_t next_word = 1) {
    return {_mm512_set1_ps(x[0]), _mm512_set1_ps(x[next_word])};
  }
  static inline Acc accumulate(Acc acc, Pair x, Pair w) {
    return _mm512_fmadd_ps(x.odd, w.odd, _mm512_fmadd_ps(x.even, w.even, acc));
  }
  static inline void store(Out* out, Acc acc) { _mm512_storeu_ps(out, acc); }
};

// Tiles of a product, as in simd_avx512.h: the fastest ones for these products.
constexpr int kMaxSinglePassRows = 14;
constexpr int kMaxPackedRows = 24;
constexpr int kMinPackedRows = 7;
template <class Dot>
constexpr int kBlockedRows = 14;
constexpr int kBlockedPanels = 2;
template <class Dot>
constexpr bool kFetchesNextPanels = std::is_same_v<Dot, DotBF16>;
constexpr int kMaxTileSums = 48;
constexpr int64_t kRowBlockBytes = 768 << 10;  // rows are in float32
constexpr int64_t kCompactRowBlockBytes = kRowBlockBytes;
constexpr int64_t kMinSharedBlockRows = 1, kMaxSharedBlockRows = 0, kSharedBlocks = 1;  // not used
static inline constexpr int choose_panels(int rows) { return rows <= 7 ? 4 : rows <= 14 ? 2 : 1; }

}  // namespace avx512_widened
