// Products in the tile registers of AMX, from the same packed matrices. Included between
// products.inl and forward.inl, inside the namespace.
//
// A tile of weights is 16 steps of one panel. A tile's products are summed in another order than by
// vector instructions. Those of bfloat16 are therefore computed here for all numbers of rows, so that
// a row's result does not depend on the other rows.

// What was stored at `memory`, and before, is there when the next tile instruction reads it: some
// compilers do not know what these instructions read.
static inline void complete_stores(const void* memory) {
  __asm__ volatile("" : : "r"(memory) : "memory");
}

// What LDTILECFG reads: bytes and rows of each tile register.
struct alignas(64) TileShapes {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};
};

// Tiles of rows are in registers 4 and 5 (4 alone if C is 4), weights in those above them, and sums
// of row tile t and panel c in register 2 t + c (c alone if C is 4).
template <int T, int C>
static void configure_tiles(int count) {
  TileShapes shapes;
  for (int tile = 0; tile < 8; ++tile) {
    shapes.row_bytes[tile] = 64;
    shapes.rows[tile] = kTileRows;
  }
  const auto first = static_cast<uint8_t>(T == 2 ? kTileRows : count);
  const auto second = static_cast<uint8_t>(T == 2 ? count - kTileRows : kTileRows);
  for (int c = 0; c < (C == 4 ? 4 : 2); ++c) shapes.rows[c] = first;
  shapes.rows[4] = first;
  if (C == 2) shapes.rows[2] = shapes.rows[3] = shapes.rows[5] = second;
  complete_stores(&shapes);
  _tile_loadconfig(&shapes);
}

// The shape of this thread's tile registers. Other code may use them when this object is gone.
class TileRegisters {
 public:
  TileRegisters() = default;
  TileRegisters(const TileRegisters&) = delete;
  TileRegisters& operator=(const TileRegisters&) = delete;
  ~TileRegisters() {
    if (shape_ != 0) _tile_release();
  }
  template <int T, int C>
  void configure(int count) {
    // Where all tiles have 16 rows, they are the same for any T and C.
    const int shape = count == T * kTileRows ? kWholeTiles : (T * 8 + C) * 64 + count;
    if (shape == shape_) return;
    configure_tiles<T, C>(count);
    shape_ = shape;
  }
  void configure_whole_tiles() { configure<2, 2>(2 * kTileRows); }

 private:
  static constexpr int kWholeTiles = 1;
  int shape_ = 0;
};

#define KVN_TILE_PRODUCT(sums, x, w)                \
  if constexpr (Dot::kStep == 2) {                  \
    _tile_dpbf16ps(sums, x, w);                     \
  } else {                                          \
    _tile_dpbusd(sums, x, w);                       \
  }

// Weights to fetch into the L2 cache during a product, so that memory is read while tiles are
// multiplied: from `at` on, so many lines for each tile of weights.
struct WeightFetch {
  const char* at;
  int lines;  // even

  // For the only pass over the weights, which are one stream: what is `distance` bytes ahead in it.
  static WeightFetch for_single_pass(const void* panels, int64_t distance) {
    return {static_cast<const char*>(panels) + distance, 16};
  }
  // For one of several passes over panels of `tiles` tiles: its part of the weights that follow.
  static WeightFetch for_part(const PartialProduct& part, int64_t tiles) {
    if (tiles == 0) return {part.next.at, 0};
    const int64_t lines =
        kvn::round_up(kvn::divide_up(part.next.bytes, 64 * tiles * part.count), 2);
    return {part.next.at + part.index * lines * 64 * tiles, static_cast<int>(lines)};
  }
  void advance() {
    for (int line = 0; line < lines; line += 2, at += 128) {
      _mm_prefetch(at, _MM_HINT_T1);
      _mm_prefetch(at + 64, _MM_HINT_T1);
    }
  }
};

// Fetch what is read `distance` bytes after this tile into a cache.
template <auto kHint>  // GCC has an enumeration for hints, and Clang macros
static inline void prefetch_tile(const void* tile, int distance) {
  const char* at = static_cast<const char*>(tile) + distance;
#pragma GCC unroll 16
  for (int line = 0; line < 16; ++line) _mm_prefetch(at + line * 64, kHint);
}
// Weights that come from memory once, into the L2 cache.
static inline void prefetch_weights(const void* tile) { prefetch_tile<_MM_HINT_T1>(tile, 2048); }
// The next tile of what is read again and again, into the L1 cache.
static inline void prefetch_next(const void* tile) { prefetch_tile<_MM_HINT_T0>(tile, 1024); }

// Add the products of the steps that fill no tile, from `row` and `panel` on, to sums of one row.
template <class Dot>
static void add_last_steps(const typename Dot::X* row, const typename Dot::W* panel, int64_t steps,
                           typename Dot::Out* sums) {
  typename Dot::Acc found;
  __builtin_memcpy(&found, sums, sizeof found);
  for (int64_t k = 0; k < steps; ++k)
    found = Dot::accumulate(found, Dot::broadcast(row + k * Dot::kStep),
                            Dot::load_weights(panel + k * 16 * Dot::kStep));
  Dot::store(sums, found);
}

// Sums [count][C][16] of T tiles of rows, which are [count][row_stride] or as copy_tiles has them.
template <class Dot, int T, int C, bool kIsTiled>
static void multiply_in_tiles(const typename Dot::X* x, ptrdiff_t row_stride,
                              const typename Dot::W* const* panels, int64_t steps, int count,
                              typename Dot::Out* out, TileRegisters& registers,
                              WeightFetch fetch) {
  constexpr int64_t kTileValues = kTileSteps * Dot::kStep;  // of one row or channel
  const int64_t tiles = steps / kTileSteps;
  const size_t stride = kIsTiled ? 64 : static_cast<size_t>(row_stride) * sizeof(*x);
  const typename Dot::X* second = x + kTileRows * row_stride;
  registers.configure<T, C>(count);
  complete_stores(x);
  _tile_zero(0);
  _tile_zero(1);
  if constexpr (T == 2 || C == 4) {
    _tile_zero(2);
    _tile_zero(3);
  }
  for (int64_t tile = 0; tile < tiles; ++tile) {
    const int64_t row_at = tile * kTileValues * (kIsTiled ? kTileRows : 1);
    const int64_t at = tile * kTileValues * 16;
    _tile_loadd(4, x + row_at, stride);
    if constexpr (kIsTiled) {
      prefetch_next(x + row_at);
      fetch.advance();
    }
    if constexpr (C == 4) {
      _tile_loadd(5, panels[0] + at, 64);
      prefetch_weights(panels[0] + at);
      KVN_TILE_PRODUCT(0, 4, 5);
      _tile_loadd(6, panels[1] + at, 64);
      prefetch_weights(panels[1] + at);
      KVN_TILE_PRODUCT(1, 4, 6);
      _tile_loadd(7, panels[2] + at, 64);
      prefetch_weights(panels[2] + at);
      KVN_TILE_PRODUCT(2, 4, 7);
      _tile_loadd(5, panels[3] + at, 64);
      prefetch_weights(panels[3] + at);
      KVN_TILE_PRODUCT(3, 4, 5);
    } else {
      _tile_loadd(6, panels[0] + at, 64);
      prefetch_next(panels[0] + at);
      KVN_TILE_PRODUCT(0, 4, 6);
      _tile_loadd(7, panels[1] + at, 64);
      prefetch_next(panels[1] + at);
      KVN_TILE_PRODUCT(1, 4, 7);
      if constexpr (T == 2) {
        _tile_loadd(5, second + row_at, stride);
        prefetch_next(second + row_at);
        KVN_TILE_PRODUCT(2, 5, 6);
        KVN_TILE_PRODUCT(3, 5, 7);
      }
    }
  }
  _tile_stored(0, out, C * 64);
  _tile_stored(1, out + 16, C * 64);
  if constexpr (C == 4) {
    _tile_stored(2, out + 32, C * 64);
    _tile_stored(3, out + 48, C * 64);
  } else if constexpr (T == 2) {
    _tile_stored(2, out + kTileRows * C * 16, C * 64);
    _tile_stored(3, out + kTileRows * C * 16 + 16, C * 64);
  }
  complete_stores(out);
  const int64_t rest = steps - tiles * kTileSteps;  // steps that fill no tile
  for (int r = 0; rest != 0 && r < count; ++r) {
    const typename Dot::X* row = (r < kTileRows ? x : second) +
                                 (kIsTiled ? (tiles * kTileRows + r % kTileRows) * kTileValues
                                           : r % kTileRows * row_stride + tiles * kTileValues);
    for (int c = 0; c < C; ++c)
      add_last_steps<Dot>(row, panels[c] + tiles * kTileValues * 16, rest, out + (r * C + c) * 16);
  }
}

#define KVN_ROW_TILE_PRODUCT(t)                         \
  if constexpr (T > t) {                                \
    _tile_loadd(4, x + row_at + t * row_tile, 64);      \
    prefetch_next(x + row_at + t * row_tile);           \
    KVN_TILE_PRODUCT(t, 4, 6);                          \
  }

// Sums [count][16] of T tiles of rows, 2 to 4, by one panel. Rows are as copy_tiles has them. All
// tiles have 16 rows, so that `out` has room for 16 T.
template <class Dot, int T>
static void multiply_row_tiles(const typename Dot::X* x, ptrdiff_t row_stride,
                               const typename Dot::W* panel, int64_t steps, int count,
                               typename Dot::Out* out, TileRegisters& registers,
                               WeightFetch fetch) {
  constexpr int64_t kTileValues = kTileSteps * Dot::kStep;  // of one row or channel
  const int64_t tiles = steps / kTileSteps;
  const ptrdiff_t row_tile = kTileRows * row_stride;
  registers.configure_whole_tiles();
  complete_stores(x);
  _tile_zero(0);
  _tile_zero(1);
  if constexpr (T > 2) _tile_zero(2);
  if constexpr (T > 3) _tile_zero(3);
  for (int64_t tile = 0; tile < tiles; ++tile) {
    const int64_t row_at = tile * kTileValues * kTileRows;
    _tile_loadd(6, panel + tile * kTileValues * 16, 64);
    prefetch_next(panel + tile * kTileValues * 16);
    fetch.advance();
    KVN_ROW_TILE_PRODUCT(0)
    KVN_ROW_TILE_PRODUCT(1)
    KVN_ROW_TILE_PRODUCT(2)
    KVN_ROW_TILE_PRODUCT(3)
  }
  _tile_stored(0, out, 64);
  _tile_stored(1, out + kTileRows * 16, 64);
  if constexpr (T > 2) _tile_stored(2, out + 2 * kTileRows * 16, 64);
  if constexpr (T > 3) _tile_stored(3, out + 3 * kTileRows * 16, 64);
  complete_stores(out);
  const int64_t rest = steps - tiles * kTileSteps;
  for (int r = 0; rest != 0 && r < count; ++r) {
    const typename Dot::X* row =
        x + r / kTileRows * row_tile + (tiles * kTileRows + r % kTileRows) * kTileValues;
    add_last_steps<Dot>(row, panel + tiles * kTileValues * 16, rest, out + r * 16);
  }
}

// As multiply_row_tiles, by one panel of a compact matrix. One tile of rows need not be as copy_tiles
// has it.
template <class Dot, int T, bool kIsTiled>
static void multiply_compact_tiles(const typename Dot::X* x, ptrdiff_t row_stride,
                                   const char* panel, int64_t in, int count,
                                   typename Dot::Out* out, TileRegisters& registers) {
  constexpr int64_t kTileValues = kTileSteps * Dot::kStep;  // of one row or channel
  static_assert(kTileSteps == kvn::kBlockSteps, "a tile of weights is one block");
  const int64_t steps = kvn::divide_up(in, Dot::kStep), tiles = steps / kTileSteps;
  const ptrdiff_t row_tile = kTileRows * row_stride;
  const size_t stride = kIsTiled ? 64 : static_cast<size_t>(row_stride) * sizeof(*x);
  alignas(64) typename Dot::W weights[2][kvn::kBlockWeights];  // one is read, one is written
  CompactReader reader(panel, in);
  if constexpr (T == 1) {
    registers.configure<1, 4>(count);
  } else {
    registers.configure_whole_tiles();
  }
  complete_stores(x);
  _tile_zero(0);
  if constexpr (T > 1) _tile_zero(1);
  if constexpr (T > 2) _tile_zero(2);
  if constexpr (T > 3) _tile_zero(3);
  for (int64_t tile = 0; tile < tiles; ++tile) {
    const int64_t row_at = tile * kTileValues * (kIsTiled ? kTileRows : 1);
    reader.expand_block(weights[tile % 2]);
    complete_stores(weights);
    _tile_loadd(6, weights[tile % 2], 64);
    if constexpr (T == 1) {
      _tile_loadd(4, x + row_at, stride);
      KVN_TILE_PRODUCT(0, 4, 6);
    } else {
      KVN_ROW_TILE_PRODUCT(0)
      KVN_ROW_TILE_PRODUCT(1)
      KVN_ROW_TILE_PRODUCT(2)
      KVN_ROW_TILE_PRODUCT(3)
    }
  }
  _tile_stored(0, out, 64);
  if constexpr (T > 1) _tile_stored(1, out + kTileRows * 16, 64);
  if constexpr (T > 2) _tile_stored(2, out + 2 * kTileRows * 16, 64);
  if constexpr (T > 3) _tile_stored(3, out + 3 * kTileRows * 16, 64);
  complete_stores(out);
  const int64_t rest = steps - tiles * kTileSteps;
  if (rest == 0) return;
  reader.expand_block(weights[0]);
  for (int r = 0; r < count; ++r) {
    const typename Dot::X* row =
        kIsTiled
            ? x + r / kTileRows * row_tile + (tiles * kTileRows + r % kTileRows) * kTileValues
            : x + r * row_stride + tiles * kTileValues;
    add_last_steps<Dot>(row, weights[0], rest, out + r * 16);
  }
}
#undef KVN_ROW_TILE_PRODUCT

// Products of T whole tiles of rows, 1 or 2, with panels of whole tiles. Those of a row are stored at
// out + row * out_stride + panel * 16 or, if kAdds, added to what is there in the order of the steps.
template <class Dot, int T, bool kAdds>
static void multiply_whole_tiles(const typename Dot::X* x, ptrdiff_t row_stride,
                                 const typename Dot::W* weights, ptrdiff_t panel_stride,
                                 int64_t num_panels, int64_t steps, typename Dot::Out* out,
                                 ptrdiff_t out_stride, TileRegisters& registers) {
  constexpr int64_t kTileValues = kTileSteps * Dot::kStep;  // of one row or channel
  constexpr int kSums = 4, kPanels = kSums / T;
  const size_t x_bytes = static_cast<size_t>(row_stride) * sizeof(*x);
  const size_t out_bytes = static_cast<size_t>(out_stride) * sizeof(*out);
  registers.configure_whole_tiles();
  complete_stores(x);
  for (int64_t panel = 0; panel < num_panels; panel += kPanels) {
    const typename Dot::W* w[kPanels];
    typename Dot::Out* sums[kSums];
    for (int c = 0; c < kPanels; ++c) {
      // In place of panels that are missing, the last one is computed again: the same is stored. It
      // is one of the same pass, so that nothing is added twice.
      const int64_t index = panel + c < num_panels ? panel + c : num_panels - 1;
      w[c] = weights + index * panel_stride;
      for (int t = 0; t < T; ++t)
        sums[t * kPanels + c] = out + t * kTileRows * out_stride + index * 16;
    }
    if constexpr (kAdds) {
      _tile_loadd(0, sums[0], out_bytes);
      _tile_loadd(1, sums[1], out_bytes);
      _tile_loadd(2, sums[2], out_bytes);
      _tile_loadd(3, sums[3], out_bytes);
    } else {
      _tile_zero(0);
      _tile_zero(1);
      _tile_zero(2);
      _tile_zero(3);
    }
    for (int64_t at = 0; at < steps * Dot::kStep; at += kTileValues) {
      _tile_loadd(4, x + at, x_bytes);
      _tile_loadd(6, w[0] + at * 16, 64);
      KVN_TILE_PRODUCT(0, 4, 6);
      _tile_loadd(7, w[1] + at * 16, 64);
      KVN_TILE_PRODUCT(1, 4, 7);
      if constexpr (T == 2) {
        _tile_loadd(5, x + kTileRows * row_stride + at, x_bytes);
        KVN_TILE_PRODUCT(2, 5, 6);
        KVN_TILE_PRODUCT(3, 5, 7);
      } else {
        _tile_loadd(5, w[2] + at * 16, 64);
        KVN_TILE_PRODUCT(2, 4, 5);
        _tile_loadd(6, w[3] + at * 16, 64);
        KVN_TILE_PRODUCT(3, 4, 6);
      }
    }
    _tile_stored(0, sums[0], out_bytes);
    _tile_stored(1, sums[1], out_bytes);
    _tile_stored(2, sums[2], out_bytes);
    _tile_stored(3, sums[3], out_bytes);
  }
  complete_stores(out);
}
#undef KVN_TILE_PRODUCT

// As VectorPlan: one tile of rows by four panels, or tiled rows: two to four tiles by one panel, or
// two by two.
template <class Dot>
struct TilePlan {
  using Registers = TileRegisters;
  int64_t rows_at_once;
  int panels_at_once;
  bool are_rows_tiled;

  static constexpr int64_t kRowsPerBlock = 2 * kTileRows;
  static constexpr int64_t kPassRows = 4 * kTileRows;
  static constexpr int64_t kFetchDistance = 8192;  // bytes
  static constexpr int64_t kRowBlockBytes = 1 << 20;
  static constexpr int64_t kCompactRowBlockBytes = kRowBlockBytes;
  static bool is_packed(int64_t) { return false; }
  static bool is_single_pass(int64_t rows) { return rows <= kPassRows; }
  static bool is_tiled(int64_t rows) { return rows > kTileRows; }

  static constexpr int64_t kKeyMultiple = 16 * Dot::kStep;
  static constexpr bool kHasTileAttention = Dot::kStep == 2;  // attention_amx.inl
  static TilePlan unpacked(int64_t rows) { return {rows, 4, false}; }  // rows that are not tiled
  static TilePlan packed(int64_t rows) { return unpacked(rows); }
  static TilePlan tiled(int64_t rows) {
    return is_single_pass(rows) ? TilePlan{rows, 1, true} : TilePlan{kRowsPerBlock, 2, true};
  }
  static bool expands_in_passes(int64_t rows) { return rows <= 2 * kPassRows; }

  // As multiply_whole_tiles, for up to 32 rows. There must be memory for 16 or 32: all are read and
  // stored.
  template <bool kAdds>
  static void multiply_few_rows(const typename Dot::X* x, ptrdiff_t stride, int64_t rows,
                                const typename Dot::W* weights, ptrdiff_t panel_stride,
                                int64_t num_panels, int64_t steps, typename Dot::Out* out,
                                ptrdiff_t out_stride, TileRegisters& registers) {
    (rows <= kTileRows ? multiply_whole_tiles<Dot, 1, kAdds> : multiply_whole_tiles<Dot, 2, kAdds>)(
        x, stride, weights, panel_stride, num_panels, steps, out, out_stride, registers);
  }

  void multiply_rows(const typename Dot::X* x, ptrdiff_t stride,
                     const typename Dot::W* const* panels, int64_t steps, int count,
                     typename Dot::Out* sums, TileRegisters& registers,
                     const PartialProduct& part) const {
    // Sums of int8 are exact in any order.
    constexpr int kMaxVectorRows = Dot::kStep == 4 ? 6 : 0;
    static_assert(choose_panels(1) == 4 && choose_panels(6) == 4, "as unpacked() has it");
    if (are_rows_tiled && panels_at_once == 1) {
      (count <= 2 * kTileRows   ? multiply_row_tiles<Dot, 2>
       : count <= 3 * kTileRows ? multiply_row_tiles<Dot, 3>
                                : multiply_row_tiles<Dot, 4>)(
          x, stride, panels[0], steps, count, sums, registers,
          WeightFetch::for_single_pass(panels[0], kFetchDistance));
    } else if (are_rows_tiled) {
      (count > kTileRows ? multiply_in_tiles<Dot, 2, 2, true> : multiply_in_tiles<Dot, 1, 2, true>)(
          x, stride, panels, steps, count, sums, registers,
          WeightFetch::for_part(part, steps / kTileSteps));
    } else if (count <= kMaxVectorRows) {
      TileChooser<Dot, kMaxVectorRows>::single_pass(count)(
          x, stride, panels, steps, StepFetch{}, sums);
    } else {
      multiply_in_tiles<Dot, 1, 4, false>(x, stride, panels, steps, count, sums, registers, {});
    }
  }
};
template <>
struct MatrixPlan<DotBF16> {
  using Type = TilePlan<DotBF16>;
};
template <>
struct MatrixPlan<DotInt8> {
  using Type = TilePlan<DotInt8>;
};

// Sums of the rows of one pass by one panel of a compact matrix.
template <class Dot>
static void multiply_compact_rows(const TilePlan<Dot>& plan, const typename Dot::X* x,
                                  ptrdiff_t stride, const char* panel, int64_t in,
                                  typename Dot::Out* sums, TileRegisters& registers) {
  const int count = static_cast<int>(plan.rows_at_once);
  (!plan.are_rows_tiled     ? multiply_compact_tiles<Dot, 1, false>
   : count <= kTileRows     ? multiply_compact_tiles<Dot, 1, true>
   : count <= 2 * kTileRows ? multiply_compact_tiles<Dot, 2, true>
   : count <= 3 * kTileRows ? multiply_compact_tiles<Dot, 3, true>
                            : multiply_compact_tiles<Dot, 4, true>)(x, stride, panel, in, count,
                                                                    sums, registers);
}
