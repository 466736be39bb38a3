// Products of rows with packed matrices. Included by one file for each instruction set, inside its
// namespace.
//
// Every output is the sum over K in ascending order by one accumulator, whatever the number of rows:
// a row's result does not depend on the other rows.

// Bytes between the weights that are read and those that are fetched into the L2 cache meanwhile.
// From there they are streamed into the L1 cache by the CPU itself.
static inline constexpr int64_t prefetch_bytes(int panels) {
  return panels >= 4 ? 1024 : panels >= 2 ? 4096 : 8192;
}

// Add a part of a step, and those that follow it. Registers hold only the weights of one part, so
// that they have room for the sums of more rows.
template <class Dot, int R, int C, bool kIsPacked, int kPart = 0>
static inline void add_step(typename Dot::Acc (&acc)[R][C], const typename Dot::X* inputs,
                            ptrdiff_t row_stride, const typename Dot::W* const* panels) {
  constexpr int kWordValues = 4 / sizeof(*inputs);  // of a row
  // Nothing is loaded before the last part ends: the compiler would spill sums for it.
  if (kPart > 0) asm volatile("" ::: "memory");
  decltype(Dot::template load_weights<kPart>(panels[0])) weights[C];
#pragma GCC unroll 4
  for (int c = 0; c < C; ++c) {
    weights[c] = Dot::template load_weights<kPart>(panels[c]);
  }
#pragma GCC unroll 24
  for (int r = 0; r < R; ++r) {
    const auto value =
        Dot::template broadcast<kPart>(inputs + r * (kIsPacked ? kWordValues : row_stride),
                                       kIsPacked ? R * kWordValues : kWordValues);
#pragma GCC unroll 4
    for (int c = 0; c < C; ++c) acc[r][c] = Dot::accumulate(acc[r][c], value, weights[c]);
  }
  if constexpr (kPart + 1 < Dot::kParts)
    add_step<Dot, R, C, kIsPacked, kPart + 1>(acc, inputs, row_stride, panels);
}

// Weights to fetch into the L2 cache during a product, a part at each step.
struct StepFetch {
  const char* at;
  int64_t bytes_per_step;
};

// The steps of a product of R rows with C panels; bf16_steps_avx2.inl has others. Rows are
// [R][row_stride], or as pack_rows has them. If kFetchesNext, `fetch` is fetched, and else the panels
// themselves.
template <class Dot, int R, int C, bool kIsPacked, bool kFetchesNext>
struct StepLoop {
  static inline void add(typename Dot::Acc (&acc)[R][C], const typename Dot::X* x,
                         ptrdiff_t row_stride, const typename Dot::W* const (&panels)[C],
                         int64_t steps, const StepFetch& fetch) {
    const char* fetch_at = fetch.at;
    for (int64_t k = 0; k < steps; ++k) {
      const typename Dot::W* at[C];
#pragma GCC unroll 4
      for (int c = 0; c < C; ++c) {
        at[c] = panels[c] + k * 16 * Dot::kStep;
        if (!kFetchesNext)
          _mm_prefetch(reinterpret_cast<const char*>(at[c]) + prefetch_bytes(C), _MM_HINT_T1);
      }
      if (kFetchesNext) {
        _mm_prefetch(fetch_at, _MM_HINT_T1);
        fetch_at += fetch.bytes_per_step;
      }
      add_step<Dot, R, C, kIsPacked>(acc, x + k * Dot::kStep * (kIsPacked ? R : 1), row_stride, at);
    }
  }
};

template <class Dot, int R, int C, bool kIsPacked, bool kFetchesNext = false>
static void multiply_tile(const typename Dot::X* x, ptrdiff_t row_stride,
                          const typename Dot::W* const* panels, int64_t steps,
                          const StepFetch& fetch,
                          typename Dot::Out* out) {  // [R][C][16]
  typename Dot::Acc acc[R][C];
  const typename Dot::W* w[C];
#pragma GCC unroll 24
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int c = 0; c < C; ++c) acc[r][c] = Dot::zero();
#pragma GCC unroll 4
  for (int c = 0; c < C; ++c) w[c] = panels[c];
  StepLoop<Dot, R, C, kIsPacked, kFetchesNext>::add(acc, x, row_stride, w, steps, fetch);
#pragma GCC unroll 24
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int c = 0; c < C; ++c) Dot::store(out + (r * C + c) * 16, acc[r][c]);
}

template <class Dot>
using TileFunction = void (*)(const typename Dot::X*, ptrdiff_t, const typename Dot::W* const*,
                              int64_t, const StepFetch&, typename Dot::Out*);

template <class Dot, int R>
struct TileChooser {
  static TileFunction<Dot> single_pass(int rows) {
    if (rows == R) return &multiply_tile<Dot, R, choose_panels(R), false>;
    return TileChooser<Dot, R - 1>::single_pass(rows);
  }
  static TileFunction<Dot> packed(int rows) {
    if (rows == R) return &multiply_tile<Dot, R, choose_panels(R), true>;
    return TileChooser<Dot, R - 1>::packed(rows);
  }
  static TileFunction<Dot> blocked(int rows) {
    if (rows == R) return &multiply_tile<Dot, R, kBlockedPanels, false, kFetchesNextPanels<Dot>>;
    return TileChooser<Dot, R - 1>::blocked(rows);
  }
};
template <class Dot>
struct TileChooser<Dot, 0> {
  static TileFunction<Dot> single_pass(int) { return nullptr; }
  static TileFunction<Dot> packed(int) { return nullptr; }
  static TileFunction<Dot> blocked(int) { return nullptr; }
};

// The sums of some rows and panels.
template <class Dot>
struct Tile {
  const typename Dot::Out* sums;
  int row_stride, panel_stride;
  int64_t first_row, num_rows, first_panel;
  int num_panels;

  const typename Dot::Out* at(int64_t row, int panel) const {
    return sums + row * row_stride + panel * panel_stride;
  }
};

// Weights that are read after some panels.
struct NextWeights {
  const char* at = nullptr;
  int64_t bytes = 0;  // to fetch into the L2 cache
};

// One of the products of some rows with some panels, which are multiplied in several.
struct PartialProduct {
  int64_t index, count;
  NextWeights next;  // after the last one
};

// Whether passes of so many rows share the expanded blocks of a compact matrix, see
// multiply_shared_blocks.
static inline constexpr bool shares_blocks(int64_t rows) {
  return rows >= kMinSharedBlockRows && rows <= kMaxSharedBlockRows;
}

// How some number of rows is multiplied by vector instructions.
template <class Dot>
struct VectorPlan {
  struct Registers {};  // what a thread keeps from one product to the next
  int64_t rows_at_once;
  int panels_at_once;
  TileFunction<Dot> whole, last;  // for `rows_at_once` rows, and for those left in the end
  bool are_rows_packed = false;

  static constexpr int64_t kKeyMultiple = 16;  // of the keys that attention multiplies at once
  static constexpr bool kHasTileAttention = false;  // only in attention_amx.inl
  static constexpr int64_t kRowsPerBlock = kBlockedRows<Dot>;
  static constexpr int64_t kRowBlockBytes = ISA::kRowBlockBytes;
  static constexpr int64_t kCompactRowBlockBytes = ISA::kCompactRowBlockBytes;
  // Rows of a pass at most.
  static constexpr int64_t kPassRows =
      kMaxPackedRows > kMaxSinglePassRows ? kMaxPackedRows : kMaxSinglePassRows;
  // Whether each pass of rows expands a compact matrix again. Otherwise it is expanded once
  // for each block of rows.
  static bool expands_in_passes(int64_t rows) {
    return is_single_pass(rows) && !shares_blocks(rows);
  }

  // Whether rows are packed first: then one pass over the weights is enough.
  static bool is_packed(int64_t rows) { return rows >= kMinPackedRows && rows <= kMaxPackedRows; }
  static bool is_single_pass(int64_t rows) { return rows <= kMaxSinglePassRows || is_packed(rows); }
  static bool is_tiled(int64_t) { return false; }  // only by products_amx.inl
  static VectorPlan tiled(int64_t rows) { return unpacked(rows); }

  // All rows in one pass over the weights if they are few, else by blocks.
  static VectorPlan unpacked(int64_t rows) {
    const int count = static_cast<int>(rows);
    if (rows <= kMaxSinglePassRows)
      return {rows, choose_panels(count), TileChooser<Dot, kMaxSinglePassRows>::single_pass(count),
              nullptr};
    // Passes of about as many rows each: one of few rows waits for its sums.
    const int passes = (count + kBlockedRows<Dot> - 1) / kBlockedRows<Dot>;
    const int at_once = (count + passes - 1) / passes;
    return {at_once, kBlockedPanels, TileChooser<Dot, kBlockedRows<Dot>>::blocked(at_once),
            TileChooser<Dot, kBlockedRows<Dot>>::blocked(count % at_once)};
  }
  // One pass over the weights for packed rows.
  static VectorPlan packed(int64_t rows) {
    const int count = static_cast<int>(rows);
    return {rows, choose_panels(count), TileChooser<Dot, kMaxPackedRows>::packed(count), nullptr,
            true};
  }

  // Sums of `count` rows by `panels_at_once` panels.
  void multiply_rows(const typename Dot::X* x, ptrdiff_t stride,
                     const typename Dot::W* const* panels, int64_t steps, int count,
                     typename Dot::Out* sums, Registers&, const PartialProduct& part) const {
    StepFetch fetch{reinterpret_cast<const char*>(panels[0]), 0};
    if (kFetchesNextPanels<Dot> && part.next.bytes > 0) {
      const int64_t bytes = kvn::divide_up(part.next.bytes, part.count);
      fetch = {part.next.at + part.index * bytes, kvn::divide_up(bytes, steps)};
    }
    (count == rows_at_once ? whole : last)(x, stride, panels, steps, fetch, sums);
  }
};

// The plan of products with the model's matrices. products_amx.inl has others.
template <class Dot>
struct MatrixPlan {
  using Type = VectorPlan<Dot>;
};

// Multiply `rows` rows with `num_panels` panels; calls use_tile(tile) for each tile. Tiles start at
// even panels, and have an even number of them unless the last is missing. `next` is what is read
// after the last tile.
template <class Dot, class Plan, class UseTile>
static void multiply(const Plan& plan, const typename Dot::X* x, ptrdiff_t stride,
                     int64_t rows, const typename Dot::W* weights, ptrdiff_t panel_stride,
                     int64_t num_panels, int64_t steps, const NextWeights& next,
                     typename Plan::Registers& registers, UseTile&& use_tile) {
  alignas(64) typename Dot::Out sums[kMaxTileSums * 16];
  const int at_once = plan.panels_at_once, per_tile = at_once < 2 ? 2 : at_once;
  const int64_t products = per_tile / at_once;  // of a pass
  const int64_t passes = kvn::divide_up(rows, plan.rows_at_once);
  for (int64_t panel = 0; panel < num_panels; panel += per_tile) {
    const typename Dot::W* panels[4];
    const int64_t left = num_panels - panel;
    const auto* following =
        reinterpret_cast<const char*>(weights + (panel + per_tile) * panel_stride);
    const NextWeights after = left <= per_tile ? next : NextWeights{following, next.bytes};
    for (int c = 0; c < per_tile; ++c)
      panels[c] = weights + (c < left ? panel + c : num_panels - 1) * panel_stride;
    for (int64_t pass = 0; pass < passes; ++pass) {
      const int64_t row = pass * plan.rows_at_once, rows_left = rows - row;
      const int count =
          static_cast<int>(rows_left < plan.rows_at_once ? rows_left : plan.rows_at_once);
      for (int c = 0; c < per_tile; c += at_once)
        plan.multiply_rows(x + row * stride, stride, panels + c, steps, count,
                           sums + c * count * 16, registers,
                           PartialProduct{pass * products + c / at_once, passes * products, after});
      const bool is_split = at_once == 1;
      use_tile(Tile<Dot>{sums, is_split ? 16 : at_once * 16, is_split ? count * 16 : 16, row, count,
                         panel, left < per_tile ? static_cast<int>(left) : per_tile});
    }
  }
}

// Pack rows of `words` words of 32 bits for a product in one pass: [words][rows]. `out` has 16 words
// more.
static void pack_rows(const uint32_t* x, ptrdiff_t stride, int64_t rows, int64_t words,
                      uint32_t* out) {
  for (int64_t word = 0; word < words; word += 16) {
    alignas(64) uint32_t columns[2][16 * 16];
    const int64_t count = words - word < 16 ? words - word : 16;
    for (int64_t first = 0; first < rows; first += 16) {
      uint32_t copies[16][16];
      const uint32_t* at[16];
      for (int64_t i = 0; i < 16; ++i) {
        at[i] = x + (first + i < rows ? first + i : rows - 1) * stride + word;
        if (count < 16) {
          __builtin_memcpy(copies[i], at[i], static_cast<size_t>(count) * 4);
          at[i] = copies[i];
        }
      }
      transpose_words(at, columns[first / 16]);
    }
    // What is written beyond a word's rows is overwritten by the next word.
    for (int64_t i = 0; i < count; ++i)
      for (int64_t first = 0; first < rows; first += 16)
        __builtin_memcpy(out + (word + i) * rows + first, columns[first / 16] + i * 16, 64);
  }
}

constexpr int64_t kTileRows = 16, kTileSteps = 16;  // of a tile register

// Copy up to kTileRows rows into tiles: [steps / kTileSteps][kTileRows][kTileSteps]. What is missing
// of the last tiles is not written. A step of a row is one word in the formats that have tiles.
static void copy_tiles(const void* x, int64_t stride_bytes, int64_t rows, int64_t steps, void* out) {
  const char* from = static_cast<const char*>(x);
  char* to = static_cast<char*>(out);
  for (int64_t step = 0; step < steps; step += kTileSteps) {
    const int64_t count = steps - step < kTileSteps ? steps - step : kTileSteps;
    for (int64_t row = 0; row < rows; ++row)
      __builtin_memcpy(to + (step * kTileRows + row * kTileSteps) * 4,
                       from + row * stride_bytes + step * 4, static_cast<size_t>(count) * 4);
  }
}

// exp(x) for x <= 0, within 2 ulp; 0 below -87, NaN for NaN. The polynomial is that of expf in
// Moshier's Cephes library, after Cody and Waite's reduction.
static inline F16 exp_nonpositive(F16 x) {
  const F16 bounded = max(set1(-87.0f), x);
  const F16 n = round_to_even(mul(bounded, set1(1.44269504088896341f)));
  F16 r = fma(n, set1(-0.693359375f), bounded);
  r = fma(n, set1(2.12194440e-4f), r);
  F16 p = set1(1.9875691500e-4f);
  p = fma(p, r, set1(1.3981999507e-3f));
  p = fma(p, r, set1(8.3334519073e-3f));
  p = fma(p, r, set1(4.1665795894e-2f));
  p = fma(p, r, set1(1.6666665459e-1f));
  p = fma(p, r, set1(5.0000001201e-1f));
  p = fma(p, mul(r, r), add(r, set1(1.0f)));
  return zero_below(x, -87.0f, scale_by_power(p, n));
}

// 2^x for x <= 0, within 2.1 ulp of it and exact for whole numbers; 0 below -126, NaN for NaN. The
// coefficients are those of the minimax polynomial of degree 5 (relative error, 1 at 0) on
// [-1/2, 1/2], rounded to float32.
static inline F16 exp2_nonpositive(F16 x) {
  const F16 n = round_to_even(x);
  const F16 r = sub(x, n);
  F16 p = set1(1.32647273e-3f);
  p = fma(p, r, set1(9.67151299e-3f));
  p = fma(p, r, set1(5.55073358e-2f));
  p = fma(p, r, set1(2.40222424e-1f));
  p = fma(p, r, set1(6.93147004e-1f));
  p = fma(p, r, set1(1.0f));
  return zero_below(x, -126.0f, scale_by_power(p, n));
}

// gate * up / (1 + exp(-gate))
static inline F16 silu_mul(F16 gate, F16 up) {
  const F16 e = exp_nonpositive(sub(zero(), abs(gate)));  // exp(-|gate|)
  const F16 one = set1(1.0f);
  // 1 / (1 + exp(-g)) is 1 / (1 + e) for g >= 0, and e / (1 + e) below.
  const F16 is_positive = zero_below(gate, 0.0f, one);
  const F16 numerator = add(is_positive, mul(sub(one, is_positive), e));
  return mul(mul(gate, up), div(numerator, add(one, e)));
}

// Numbers in the model's format, as they are stored and as rows have them.
template <class Dot>
struct Numbers;
template <>
struct Numbers<DotF32> {
  static inline F16 load(const float* p) { return ISA::load(p); }
  static inline F16 load_first(const float* p, int n) { return ISA::load_first(p, n); }
  static inline void store(float* p, F16 a) { ISA::store(p, a); }
  static inline void store_first(float* p, F16 a, int n) { ISA::store_first(p, a, n); }
};
template <>
struct Numbers<DotBF16> {
  template <class T>
  static inline F16 load(const T* p) {
    return load_bf16(p);
  }
  template <class T>
  static inline F16 load_first(const T* p, int n) {
    return load_bf16_first(p, n);
  }
  template <class T>
  static inline void store(T* p, F16 a) {
    store_bf16(p, a);
  }
  template <class T>
  static inline void store_first(T* p, F16 a, int n) {
    store_bf16_first(p, a, n);
  }
};

template <class Body>  // body(index, lanes)
static inline void for_lanes(int64_t count, Body&& body) {
  int64_t i = 0;
  for (; i + 16 <= count; i += 16) body(i, 16);
  if (i < count) body(i, static_cast<int>(count - i));
}

template <class Dot, class T>  // Dot::X or Dot::W
static inline F16 load_lanes(const T* p, int lanes) {
  return lanes == 16 ? Numbers<Dot>::load(p) : Numbers<Dot>::load_first(p, lanes);
}
template <class Dot, class T>
static inline void store_lanes(T* p, F16 a, int lanes) {
  if (lanes == 16) {
    Numbers<Dot>::store(p, a);
  } else {
    Numbers<Dot>::store_first(p, a, lanes);
  }
}
static inline F16 load_floats(const float* p, int lanes) {
  return lanes == 16 ? load(p) : load_first(p, lanes);
}
static inline void store_floats(float* p, F16 a, int lanes) {
  if (lanes == 16) {
    store(p, a);
  } else {
    store_first(p, a, lanes);
  }
}
