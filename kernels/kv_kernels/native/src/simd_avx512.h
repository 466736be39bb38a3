// Vectors of 16 lanes on AVX-512 with VNNI. See simd_avx2.h for the same interface; bf16_avx512.h and
// widened_avx512.h have the rest of it.
#pragma once

#include <immintrin.h>

#include <cstddef>
#include <cstdint>

namespace avx512 {

struct F16 {
  __m512 v;
};

static inline F16 zero() { return {_mm512_setzero_ps()}; }
static inline F16 set1(float x) { return {_mm512_set1_ps(x)}; }
static inline F16 load(const float* p) { return {_mm512_loadu_ps(p)}; }
static inline void store(float* p, F16 a) { _mm512_storeu_ps(p, a.v); }
static inline __mmask16 first_lanes(int n) { return static_cast<__mmask16>((1u << n) - 1u); }
static inline F16 load_first(const float* p, int n) {
  return {_mm512_maskz_loadu_ps(first_lanes(n), p)};
}
static inline void store_first(float* p, F16 a, int n) {
  _mm512_mask_storeu_ps(p, first_lanes(n), a.v);
}
static inline F16 add(F16 a, F16 b) { return {_mm512_add_ps(a.v, b.v)}; }
static inline F16 sub(F16 a, F16 b) { return {_mm512_sub_ps(a.v, b.v)}; }
static inline F16 mul(F16 a, F16 b) { return {_mm512_mul_ps(a.v, b.v)}; }
static inline F16 div(F16 a, F16 b) { return {_mm512_div_ps(a.v, b.v)}; }
static inline F16 fma(F16 a, F16 b, F16 c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
static inline F16 max(F16 a, F16 b) { return {_mm512_max_ps(a.v, b.v)}; }
static inline F16 min(F16 a, F16 b) { return {_mm512_min_ps(a.v, b.v)}; }
static inline F16 abs(F16 a) { return {_mm512_abs_ps(a.v)}; }
static inline F16 round_to_even(F16 a) {
  return {_mm512_roundscale_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
}
static inline float reduce_add(F16 a) { return _mm512_reduce_add_ps(a.v); }
static inline float reduce_max(F16 a) { return _mm512_reduce_max_ps(a.v); }
// Whether a > b in any lane.
static inline bool any_greater(F16 a, F16 b) {
  return _mm512_cmp_ps_mask(a.v, b.v, _CMP_GT_OQ) != 0;
}
// a * 2^n, n integral, in [-126, 127]; unspecified for other n
static inline F16 scale_by_power(F16 a, F16 n) { return {_mm512_scalef_ps(a.v, n.v)}; }
// 0 where x < bound, else `a`
static inline F16 zero_below(F16 x, float bound, F16 a) {
  return {_mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x.v, _mm512_set1_ps(bound), _CMP_NLT_UQ), a.v)};
}
// Lanes from `begin` to `end` keep their value, the others become minus infinity.
static inline F16 keep_lanes(F16 a, int begin, int end) {
  const __mmask16 kept = first_lanes(end) & static_cast<__mmask16>(~first_lanes(begin));
  return {_mm512_mask_mov_ps(_mm512_set1_ps(-__builtin_inff()), kept, a.v)};
}

static inline F16 load_bf16(const uint16_t* p) {
  const __m256i half = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16))};
}
static inline F16 load_bf16_first(const uint16_t* p, int n) {
  const __m256i half = _mm256_maskz_loadu_epi16(first_lanes(n), p);
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16))};
}
// 16 values in [0, 255], integral
static inline void store_u8(uint8_t* p, F16 a) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(a.v)));
}
// 16 values in [-128, 127], integral
static inline void store_i8(int8_t* p, F16 a) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(a.v)));
}
static inline void store_i8_first(int8_t* p, F16 a, int n) {
  _mm512_mask_cvtepi32_storeu_epi8(p, first_lanes(n), _mm512_cvtps_epi32(a.v));
}
static inline F16 load_i8(const int8_t* p) {
  const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes))};
}
static inline F16 load_i8_first(const int8_t* p, int n) {
  return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_maskz_loadu_epi8(first_lanes(n), p)))};
}
static inline F16 load_i32_as_float(const int32_t* p) {
  return {_mm512_cvtepi32_ps(_mm512_loadu_si512(p))};
}

// A dot product type: what one step along K multiplies. `kStep` input channels of one row meet a
// vector of weights [16][kStep]. X is the type of numbers in rows, and W that of weights and of what
// is stored: the cache and the embedding. Where a step of a row has two words of 32 bits, the second
// is `next_word` numbers after the first.

struct DotF32 {
  using X = float;
  using W = float;
  using Out = float;
  static constexpr int kStep = 1;
  static constexpr int kParts = 1;
  using Acc = __m512;
  static inline Acc zero() { return _mm512_setzero_ps(); }
  template <int kPart = 0>
  static inline __m512 load_weights(const W* w) { return _mm512_loadu_ps(w); }
  template <int kPart = 0>
  static inline __m512 broadcast(const X* x, ptrdiff_t = 1) { return _mm512_set1_ps(*x); }
  static inline Acc accumulate(Acc acc, __m512 x, __m512 w) { return _mm512_fmadd_ps(x, w, acc); }
  static inline void store(Out* out, Acc acc) { _mm512_storeu_ps(out, acc); }
};

// Unsigned 8-bit activations and signed 8-bit weights.
struct DotInt8 {
  using X = uint8_t;
  using W = int8_t;
  using Out = int32_t;
  static constexpr int kStep = 4;
  static constexpr int kParts = 1;
  using Acc = __m512i;
  static inline Acc zero() { return _mm512_setzero_si512(); }
  template <int kPart = 0>
  static inline __m512i load_weights(const W* w) { return _mm512_loadu_si512(w); }
  template <int kPart = 0>
  static inline __m512i broadcast(const X* x, ptrdiff_t = 1) {
    int32_t four;
    __builtin_memcpy(&four, x, sizeof four);
    return _mm512_set1_epi32(four);
  }
  static inline Acc accumulate(Acc acc, __m512i x, __m512i w) {
    return _mm512_dpbusd_epi32(acc, x, w);
  }
  static inline void store(Out* out, Acc acc) { _mm512_storeu_si512(out, acc); }
};

// Transpose a 16 x 16 matrix of 32-bit words; row i is at rows[i].
static inline void transpose_words(const uint32_t* const rows[16], uint32_t* out,
                                   ptrdiff_t stride = 16) {
  __m512i r[16], t[16];
  for (int i = 0; i < 16; ++i) r[i] = _mm512_loadu_si512(rows[i]);
  for (int i = 0; i < 8; ++i) {
    t[2 * i] = _mm512_unpacklo_epi32(r[2 * i], r[2 * i + 1]);
    t[2 * i + 1] = _mm512_unpackhi_epi32(r[2 * i], r[2 * i + 1]);
  }
  for (int i = 0; i < 4; ++i) {
    r[4 * i + 0] = _mm512_unpacklo_epi64(t[4 * i + 0], t[4 * i + 2]);
    r[4 * i + 1] = _mm512_unpackhi_epi64(t[4 * i + 0], t[4 * i + 2]);
    r[4 * i + 2] = _mm512_unpacklo_epi64(t[4 * i + 1], t[4 * i + 3]);
    r[4 * i + 3] = _mm512_unpackhi_epi64(t[4 * i + 1], t[4 * i + 3]);
  }
  for (int i = 0; i < 4; ++i) {
    t[i + 0] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0x88);
    t[i + 4] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0xdd);
    t[i + 8] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0x88);
    t[i + 12] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0xdd);
  }
  for (int i = 0; i < 4; ++i) {
    _mm512_storeu_si512(out + stride * (i + 0), _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88));
    _mm512_storeu_si512(out + stride * (i + 8), _mm512_shuffle_i32x4(t[i], t[i + 8], 0xdd));
    _mm512_storeu_si512(out + stride * (i + 4), _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0x88));
    _mm512_storeu_si512(out + stride * (i + 12), _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0xdd));
  }
}

// Interleave 16 half-words of two rows: out[2 * i] = a[i], out[2 * i + 1] = b[i].
static inline void interleave_half_words(const uint16_t* a, const uint16_t* b, uint16_t* out) {
  const __m512i low = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(a)));
  const __m512i high =
      _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(b)));
  _mm512_storeu_si512(out, _mm512_or_si512(low, _mm512_slli_epi32(high, 16)));
}

// Expand kvn::kBlockSteps steps of a panel to bfloat16; see compact_panel.h.
static inline void expand_steps(const uint8_t* block, const uint8_t* upper_bytes, uint16_t* out) {
  const __m512i table =
      _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(upper_bytes)));
  const __m512i low_bits = _mm512_set1_epi8(15);
  const auto store = [](uint16_t* p, __m512i lower, __m512i upper) {
    _mm512_store_si512(p, _mm512_unpacklo_epi8(lower, upper));
    _mm512_store_si512(p + 32, _mm512_unpackhi_epi8(lower, upper));
  };
#pragma GCC unroll 4
  for (int four = 0; four < 4; ++four, block += 192, out += 128) {
    const __m512i numbers = _mm512_loadu_si512(block + 128);
    store(out, _mm512_loadu_si512(block),
          _mm512_shuffle_epi8(table, _mm512_and_si512(numbers, low_bits)));
    store(out + 64, _mm512_loadu_si512(block + 64),
          _mm512_shuffle_epi8(table, _mm512_and_si512(_mm512_srli_epi16(numbers, 4), low_bits)));
  }
}

// Vectors of 64-bit lanes, of which a product multiplies the low halves.
struct U64 {
  __m512i v;
};
constexpr int kWideLanes = 8;
static inline U64 set1_wide(uint64_t x) { return {_mm512_set1_epi64(static_cast<int64_t>(x))}; }
static inline U64 load_wide(const uint64_t* p) { return {_mm512_loadu_si512(p)}; }
static inline void store_wide(uint64_t* p, U64 a) { _mm512_storeu_si512(p, a.v); }
static inline U64 mul_low(U64 a, U64 b) { return {_mm512_mul_epu32(a.v, b.v)}; }
static inline U64 high_half(U64 a) { return {_mm512_srli_epi64(a.v, 32)}; }
static inline U64 bit_xor(U64 a, U64 b) { return {_mm512_xor_si512(a.v, b.v)}; }
// The low halves of `a`, and those of `b` above them.
static inline U64 join_low(U64 a, U64 b) {
  return {_mm512_mask_shuffle_epi32(a.v, 0xaaaa, b.v, _MM_PERM_CCAA)};
}

// Tiles of a product: the rows of one pass over the weights, by panels (of 16 columns) at once.
constexpr int kMaxSinglePassRows = 12;
constexpr int kMaxPackedRows = 24;
constexpr int kMinPackedRows = 7;  // packing fewer gains nothing
template <class Dot>
constexpr int kBlockedRows = 12;
constexpr int kBlockedPanels = 2;
// Whether passes over a block of rows fetch the panels that follow, and not those that they read:
// faster for bfloat16 and slower for int8, as measured; not measured for float32.
template <class Dot>
constexpr bool kFetchesNextPanels = sizeof(typename Dot::W) == 2;
constexpr int kMaxTileSums = 48;  // rows times panels; two panels of 24 rows
constexpr int64_t kRowBlockBytes = 384 << 10;  // of the rows that stay in the L2 cache
// Compact weights are expanded again for each block of rows, so that fewer ones are faster; measured.
constexpr int64_t kCompactRowBlockBytes = 1536 << 10;
constexpr int64_t kMinSharedBlockRows = 1, kMaxSharedBlockRows = 0, kSharedBlocks = 1;  // not used
// On Zen 5 one stream of weights is read faster than several, also by one row.
static inline constexpr int choose_panels(int) { return 1; }

}  // namespace avx512
