// The steps of a product of a few rows with one panel of bfloat16, with AVX2. Included after
// products.inl, inside its namespace.
//
// Six rows take all 16 registers, and where a core is shared the number of instructions decides.
// Compilers add some: they keep an address for each row and part, and copy a sum before they add to
// it. So the addition is written in assembly, and the position in the rows is made opaque, which
// keeps the compiler from replacing it with more addresses.

// Add x * weights to the sums of a row, where they are.
static inline __attribute__((always_inline)) void add_product(F16& sums, const float* x,
                                                              const F16& weights) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)  // they do not see assembly's reads
  sums = DotBF16::accumulate(sums, _mm256_broadcast_ss(x), weights);
#else
  __m256 broadcast;
  asm volatile(
      "vbroadcastss %[x], %[broadcast]\n\t"
      "vfmadd231ps %[broadcast], %[weights_lo], %[lo]\n\t"
      "vfmadd231ps %[broadcast], %[weights_hi], %[hi]"
      : [lo] "+&x"(sums.lo), [hi] "+x"(sums.hi), [broadcast] "=&x"(broadcast)
      : [x] "m"(*x), [weights_lo] "x"(weights.lo), [weights_hi] "x"(weights.hi));
#endif
}

// Add the even inputs of a step (kPart 0) or the odd ones (1); `at` is in bytes of a row.
template <int R, int kPart>
static inline __attribute__((always_inline)) void add_part(F16 (&acc)[R][1],
                                                           const char* const (&rows)[R],
                                                           const uint16_t* step, int64_t at) {
  const F16 weights = DotBF16::load_weights<kPart>(step);
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
    add_product(acc[r][0], reinterpret_cast<const float*>(rows[r] + at) + kPart, weights);
  asm volatile("" ::: "memory");  // the loads of the next part stay below
}

// Add one step, which starts `at` bytes into each row.
template <int R>
static inline __attribute__((always_inline)) void add_bf16_step(F16 (&acc)[R][1],
                                                                const char* const (&rows)[R],
                                                                const uint16_t* panel, int64_t at) {
  asm volatile("" : "+r"(at));
  constexpr int64_t kWeightsPerByte = 4;  // 32 weights of a panel for the 8 bytes of a row's step
  add_part<R, 0>(acc, rows, panel + at * kWeightsPerByte, at);
  add_part<R, 1>(acc, rows, panel + at * kWeightsPerByte, at);
}

template <int R, bool kFetchesNext>
struct StepLoop<DotBF16, R, 1, false, kFetchesNext> {
  static inline __attribute__((always_inline)) void add(F16 (&acc)[R][1], const float* x,
                                                        ptrdiff_t row_stride,
                                                        const uint16_t* const (&panels)[1],
                                                        int64_t steps, const StepFetch& fetch) {
    constexpr int64_t kRowBytes = DotBF16::kStep * sizeof(float);  // of a step
    const char* rows[R];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      rows[r] = reinterpret_cast<const char*>(x + r * row_stride);
      asm("" : "+r"(rows[r]));
    }
    const int64_t fetch_bytes = kFetchesNext ? fetch.bytes_per_step : 64;
    const char* fetch_at =
        kFetchesNext ? fetch.at : reinterpret_cast<const char*>(panels[0]) + prefetch_bytes(1);
    const int64_t end = steps * kRowBytes;
    int64_t at = 0;
    for (; at + kRowBytes < end; at += 2 * kRowBytes) {
      _mm_prefetch(fetch_at, _MM_HINT_T1);
      _mm_prefetch(fetch_at + fetch_bytes, _MM_HINT_T1);
      fetch_at += 2 * fetch_bytes;
      add_bf16_step<R>(acc, rows, panels[0], at);
      add_bf16_step<R>(acc, rows, panels[0], at + kRowBytes);
    }
    if (at < end) {
      _mm_prefetch(fetch_at, _MM_HINT_T1);
      add_bf16_step<R>(acc, rows, panels[0], at);
    }
  }
};
