// Vectors of 16 lanes on AVX2, as two halves. See simd_avx512.h for the same interface.
#pragma once

#include <immintrin.h>

#include <cstddef>
#include <cstdint>

namespace avx2 {

struct F16 {
  __m256 lo, hi;
};

static inline F16 zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
static inline F16 set1(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
static inline F16 load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
static inline void store(float* p, F16 a) {
  _mm256_storeu_ps(p, a.lo);
  _mm256_storeu_ps(p + 8, a.hi);
}
static inline F16 load_first(const float* p, int n) {
  float values[16] = {};
  __builtin_memcpy(values, p, sizeof(float) * static_cast<size_t>(n));
  return load(values);
}
static inline void store_first(float* p, F16 a, int n) {
  float values[16];
  store(values, a);
  __builtin_memcpy(p, values, sizeof(float) * static_cast<size_t>(n));
}
static inline F16 add(F16 a, F16 b) { return {_mm256_add_ps(a.lo, b.lo), _mm256_add_ps(a.hi, b.hi)}; }
static inline F16 sub(F16 a, F16 b) { return {_mm256_sub_ps(a.lo, b.lo), _mm256_sub_ps(a.hi, b.hi)}; }
static inline F16 mul(F16 a, F16 b) { return {_mm256_mul_ps(a.lo, b.lo), _mm256_mul_ps(a.hi, b.hi)}; }
static inline F16 div(F16 a, F16 b) { return {_mm256_div_ps(a.lo, b.lo), _mm256_div_ps(a.hi, b.hi)}; }
static inline F16 fma(F16 a, F16 b, F16 c) {
  return {_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)};
}
static inline F16 max(F16 a, F16 b) { return {_mm256_max_ps(a.lo, b.lo), _mm256_max_ps(a.hi, b.hi)}; }
static inline F16 min(F16 a, F16 b) { return {_mm256_min_ps(a.lo, b.lo), _mm256_min_ps(a.hi, b.hi)}; }
static inline F16 abs(F16 a) {
  const __m256 sign = _mm256_set1_ps(-0.0f);
  return {_mm256_andnot_ps(sign, a.lo), _mm256_andnot_ps(sign, a.hi)};
}
static inline F16 round_to_even(F16 a) {
  return {_mm256_round_ps(a.lo, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC),
          _mm256_round_ps(a.hi, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
}
static inline float reduce_add(F16 a) {
  const __m256 eight = _mm256_add_ps(a.lo, a.hi);
  __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  four = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(four, _mm_movehdup_ps(four)));
}
static inline float reduce_max(F16 a) {
  const __m256 eight = _mm256_max_ps(a.lo, a.hi);
  __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  four = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(four, _mm_movehdup_ps(four)));
}
// Whether a > b in any lane.
static inline bool any_greater(F16 a, F16 b) {
  return _mm256_movemask_ps(_mm256_or_ps(_mm256_cmp_ps(a.lo, b.lo, _CMP_GT_OQ),
                                         _mm256_cmp_ps(a.hi, b.hi, _CMP_GT_OQ))) != 0;
}
static inline __m256 scale_half(__m256 a, __m256 n) {
  const __m256i exponent =
      _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23);
  return _mm256_mul_ps(a, _mm256_castsi256_ps(exponent));
}
// a * 2^n, n integral, in [-126, 127]; unspecified for other n
static inline F16 scale_by_power(F16 a, F16 n) {
  return {scale_half(a.lo, n.lo), scale_half(a.hi, n.hi)};
}
// 0 where x < bound, else `a`
static inline F16 zero_below(F16 x, float bound, F16 a) {
  const __m256 limit = _mm256_set1_ps(bound);
  return {_mm256_and_ps(_mm256_cmp_ps(x.lo, limit, _CMP_NLT_UQ), a.lo),
          _mm256_and_ps(_mm256_cmp_ps(x.hi, limit, _CMP_NLT_UQ), a.hi)};
}
static inline F16 keep_lanes(F16 a, int begin, int end) {
  float values[16];
  store(values, a);
  for (int i = 0; i < 16; ++i)
    if (i < begin || i >= end) values[i] = -__builtin_inff();
  return load(values);
}

static inline __m256 widen_half(__m128i half) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16));
}
static inline F16 load_bf16(const uint16_t* p) {
  return {widen_half(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))),
          widen_half(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p + 8)))};
}
static inline F16 load_bf16_first(const uint16_t* p, int n) {
  uint16_t values[16] = {};
  __builtin_memcpy(values, p, sizeof(uint16_t) * static_cast<size_t>(n));
  return load_bf16(values);
}
// Round to bfloat16, to nearest even, in the upper half of each word; what is not a number stays so.
static inline __m256i round_half(__m256 a) {
  const __m256i bits = _mm256_castps_si256(a);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i rounded =
      _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
  const __m256 is_nan = _mm256_cmp_ps(a, a, _CMP_UNORD_Q);
  return _mm256_blendv_epi8(rounded, _mm256_or_si256(bits, _mm256_set1_epi32(0x400000)),
                            _mm256_castps_si256(is_nan));
}
static inline __m128i narrow_half(__m256 a) {
  const __m256i words = _mm256_srli_epi32(round_half(a), 16);
  const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(words, words), 0x08);
  return _mm256_castsi256_si128(packed);
}
static inline void store_bf16(uint16_t* p, F16 a) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), narrow_half(a.lo));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p + 8), narrow_half(a.hi));
}
static inline void store_bf16_first(uint16_t* p, F16 a, int n) {
  uint16_t values[16];
  store_bf16(values, a);
  __builtin_memcpy(p, values, sizeof(uint16_t) * static_cast<size_t>(n));
}

// Rows hold numbers of bfloat16 in float32, so that no product has to widen them again.
static inline F16 load_bf16(const float* p) { return load(p); }
static inline F16 load_bf16_first(const float* p, int n) { return load_first(p, n); }
static inline __m256 clear_low_halves(__m256i bits) {
  return _mm256_castsi256_ps(_mm256_and_si256(bits, _mm256_set1_epi32(-65536)));
}
static inline F16 round_to_bf16(F16 a) {
  return {clear_low_halves(round_half(a.lo)), clear_low_halves(round_half(a.hi))};
}
static inline void store_bf16(float* p, F16 a) { store(p, round_to_bf16(a)); }
static inline void store_bf16_first(float* p, F16 a, int n) {
  store_first(p, round_to_bf16(a), n);
}
static inline void store_u8(uint8_t* p, F16 a) {
  int32_t values[16];
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(values), _mm256_cvtps_epi32(a.lo));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(values + 8), _mm256_cvtps_epi32(a.hi));
  for (int i = 0; i < 16; ++i) p[i] = static_cast<uint8_t>(values[i]);
}
static inline void store_i8_first(int8_t* p, F16 a, int n) {
  int32_t values[16];
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(values), _mm256_cvtps_epi32(a.lo));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(values + 8), _mm256_cvtps_epi32(a.hi));
  for (int i = 0; i < n; ++i) p[i] = static_cast<int8_t>(values[i]);
}
static inline void store_i8(int8_t* p, F16 a) { store_i8_first(p, a, 16); }
static inline F16 load_i8(const int8_t* p) {
  const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes)),
          _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_srli_si128(bytes, 8)))};
}
static inline F16 load_i8_first(const int8_t* p, int n) {
  int8_t values[16] = {};
  __builtin_memcpy(values, p, static_cast<size_t>(n));
  return load_i8(values);
}
static inline F16 load_i32_as_float(const int32_t* p) {
  return {_mm256_cvtepi32_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))),
          _mm256_cvtepi32_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 8)))};
}

struct DotF32 {
  using X = float;
  using W = float;
  using Out = float;
  static constexpr int kStep = 1;
  static constexpr int kParts = 1;
  using Acc = F16;
  static inline Acc zero() { return avx2::zero(); }
  template <int kPart>
  static inline F16 load_weights(const W* w) {
    return load(w);
  }
  template <int kPart>
  static inline __m256 broadcast(const X* x, ptrdiff_t) {
    return _mm256_broadcast_ss(x);
  }
  static inline Acc accumulate(Acc acc, __m256 x, F16 w) {
    return {_mm256_fmadd_ps(x, w.lo, acc.lo), _mm256_fmadd_ps(x, w.hi, acc.hi)};
  }
  static inline void store(Out* out, Acc acc) { avx2::store(out, acc); }
};

// Products of bfloat16 are exact in float32: each pair is widened and added in two parts.
struct DotBF16 {
  using X = float;
  using W = uint16_t;
  using Out = float;
  static constexpr int kStep = 2;
  static constexpr int kParts = 2;
  using Acc = F16;
  static inline Acc zero() { return avx2::zero(); }
  template <int kPart>
  static inline F16 load_weights(const W* w) {
    const __m256i* at = reinterpret_cast<const __m256i*>(w);
    const __m256i lo = _mm256_loadu_si256(at), hi = _mm256_loadu_si256(at + 1);
    if (kPart == 1) return {clear_low_halves(lo), clear_low_halves(hi)};
    return {_mm256_castsi256_ps(_mm256_slli_epi32(lo, 16)),
            _mm256_castsi256_ps(_mm256_slli_epi32(hi, 16))};
  }
  template <int kPart>
  static inline __m256 broadcast(const X* x, ptrdiff_t next_word) {
    return _mm256_broadcast_ss(x + kPart * next_word);
  }
  static inline Acc accumulate(Acc acc, __m256 x, F16 w) {
    return {_mm256_fmadd_ps(x, w.lo, acc.lo), _mm256_fmadd_ps(x, w.hi, acc.hi)};
  }
  static inline void store(Out* out, Acc acc) { avx2::store(out, acc); }
};

// Without VNNI: sums of two 16-bit products, which cannot overflow 32 bits. A step of four inputs
// is added in two parts: its even inputs and its odd ones.
struct DotInt8 {
  using X = uint8_t;
  using W = int8_t;
  using Out = int32_t;
  static constexpr int kStep = 4;
  static constexpr int kParts = 2;
  struct Acc {
    __m256i lo, hi;
  };
  static inline Acc zero() { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
  template <int kPart>
  static inline __m256i widen(__m256i bytes) {
    return _mm256_srai_epi16(kPart == 1 ? bytes : _mm256_slli_epi16(bytes, 8), 8);
  }
  template <int kPart>
  static inline Acc load_weights(const W* w) {
    const __m256i* at = reinterpret_cast<const __m256i*>(w);
    return {widen<kPart>(_mm256_loadu_si256(at)), widen<kPart>(_mm256_loadu_si256(at + 1))};
  }
  template <int kPart>
  static inline __m256i broadcast(const X* x, ptrdiff_t) {
    int32_t four;
    __builtin_memcpy(&four, x, sizeof four);
    const __m256i bytes = _mm256_set1_epi32(four);
    return kPart == 1 ? _mm256_srli_epi16(bytes, 8)
                      : _mm256_and_si256(bytes, _mm256_set1_epi16(0xff));
  }
  static inline Acc accumulate(Acc acc, __m256i x, const Acc& w) {
    return {_mm256_add_epi32(acc.lo, _mm256_madd_epi16(x, w.lo)),
            _mm256_add_epi32(acc.hi, _mm256_madd_epi16(x, w.hi))};
  }
  static inline void store(Out* out, Acc acc) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), acc.lo);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + 8), acc.hi);
  }
};

static inline void transpose_words(const uint32_t* const rows[16], uint32_t* out) {
  for (int i = 0; i < 16; ++i)
    for (int j = 0; j < 16; ++j) out[16 * j + i] = rows[i][j];
}

static inline void interleave_half_words(const uint16_t* a, const uint16_t* b, uint16_t* out) {
  for (int i = 0; i < 16; ++i) {
    out[2 * i] = a[i];
    out[2 * i + 1] = b[i];
  }
}

// Expand kvn::kBlockSteps steps of a panel to bfloat16; see compact_panel.h.
static inline void expand_steps(const uint8_t* block, const uint8_t* upper_bytes, uint16_t* out) {
  const __m256i table = _mm256_broadcastsi128_si256(
      _mm_loadu_si128(reinterpret_cast<const __m128i*>(upper_bytes)));
  const __m256i low_bits = _mm256_set1_epi8(15);
  const auto load = [](const uint8_t* p) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  };
  const auto store = [](uint16_t* p, __m256i lower, __m256i upper) {
    _mm256_store_si256(reinterpret_cast<__m256i*>(p), _mm256_unpacklo_epi8(lower, upper));
    _mm256_store_si256(reinterpret_cast<__m256i*>(p + 32), _mm256_unpackhi_epi8(lower, upper));
  };
#pragma GCC unroll 8
  for (int half = 0; half < 8; ++half) {
    const uint8_t* from = block + half / 2 * 192 + half % 2 * 32;
    uint16_t* to = out + half / 2 * 128 + half % 2 * 16;
    const __m256i numbers = load(from + 128);
    store(to, load(from), _mm256_shuffle_epi8(table, _mm256_and_si256(numbers, low_bits)));
    store(to + 64, load(from + 64),
          _mm256_shuffle_epi8(table, _mm256_and_si256(_mm256_srli_epi16(numbers, 4), low_bits)));
  }
}

struct U64 {
  __m256i v;
};
constexpr int kWideLanes = 4;
static inline U64 set1_wide(uint64_t x) { return {_mm256_set1_epi64x(static_cast<int64_t>(x))}; }
static inline U64 load_wide(const uint64_t* p) {
  return {_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))};
}
static inline void store_wide(uint64_t* p, U64 a) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), a.v);
}
static inline U64 mul_low(U64 a, U64 b) { return {_mm256_mul_epu32(a.v, b.v)}; }
static inline U64 high_half(U64 a) { return {_mm256_srli_epi64(a.v, 32)}; }
static inline U64 bit_xor(U64 a, U64 b) { return {_mm256_xor_si256(a.v, b.v)}; }
static inline U64 join_low(U64 a, U64 b) {
  return {_mm256_blend_epi32(a.v, _mm256_slli_epi64(b.v, 32), 0xaa)};
}

constexpr int kMaxSinglePassRows = 6;
constexpr int kMaxPackedRows = 0;
constexpr int kMinPackedRows = 1;
// Of a pass, of which the sums fit into registers: see bf16_steps_avx2.inl.
template <class Dot>
constexpr int kBlockedRows = std::is_same_v<Dot, DotBF16> ? 6 : 5;
constexpr int kBlockedPanels = 1;
template <class Dot>
constexpr bool kFetchesNextPanels = true;
constexpr int kMaxTileSums = 12;
constexpr int64_t kRowBlockBytes = 768 << 10;  // of rows in float32; measured
constexpr int64_t kCompactRowBlockBytes = kRowBlockBytes;
// Of multiply_shared_blocks: its rows, and the blocks that are expanded together.
constexpr int64_t kMinSharedBlockRows = 2, kMaxSharedBlockRows = 32, kSharedBlocks = 4;
static inline constexpr int choose_panels(int rows) { return rows <= 1 ? 2 : 1; }

}  // namespace avx2
