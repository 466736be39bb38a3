// Products with matrices in KVN_COMPACT_BFLOAT16. Included after products.inl by one file for each
// instruction set, inside its namespace. Weights are expanded to what they were, and multiplied as
// those of KVN_BFLOAT16 are: results are the same bit for bit.

// Reads the weights of one panel in their order.
class CompactReader {
 public:
  CompactReader(const char* panel, int64_t in)
      : upper_bytes_(reinterpret_cast<const uint8_t*>(panel)),
        rare_(reinterpret_cast<const uint32_t*>(panel + kvn::kNumUpperBytes)),
        block_(panel + kvn::count_header_bytes(in)) {}

  // Expand the next kBlockSteps steps to `out` [kBlockSteps][16][2], which starts on a cache line,
  // and fetch the block that is kFetchDistance bytes ahead.
  void expand_block(uint16_t* out) {
    for (int line = 0; line < kvn::kBlockBytes / 64; ++line)
      _mm_prefetch(block_ + kFetchDistance + line * 64, _MM_HINT_T1);
    expand_unfetched_block(out);
  }

  // What expand_block would fetch for some blocks, to be fetched in `steps` steps.
  StepFetch plan_fetch(int64_t blocks, int64_t steps) const {
    return {block_ + kFetchDistance, kvn::divide_up(blocks * kvn::kBlockBytes, steps)};
  }

  // As expand_block, fetching nothing.
  void expand_unfetched_block(uint16_t* out) {
    expand_steps(reinterpret_cast<const uint8_t*>(block_), upper_bytes_, out);
    block_ += kvn::kBlockBytes;
    const uint32_t end = first_weight_ + kvn::kBlockWeights;
    for (; *rare_ >> 8 < end; ++rare_) {
      uint16_t& weight = out[(*rare_ >> 8) - first_weight_];
      const uint32_t exponent = *rare_ & 0xff;
      weight = static_cast<uint16_t>((weight & ~kvn::kExponentBits) | exponent << 7);
    }
    first_weight_ = end;
  }

 private:
  static constexpr int64_t kFetchDistance = 8192;  // bytes
  const uint8_t* upper_bytes_;
  const uint32_t* rare_;
  const char* block_;
  uint32_t first_weight_ = 0;
};

// Expand a whole panel to `out`, of kvn::count_expanded_bytes(in) bytes.
static void expand_panel(const char* panel, int64_t in, uint16_t* out) {
  CompactReader reader(panel, in);
  for (int64_t block = 0; block < kvn::count_blocks(in); ++block)
    reader.expand_block(out + block * kvn::kBlockWeights);
}

// As multiply_tile, for one panel.
template <int R, bool kIsPacked>
static void multiply_compact_tile(const DotBF16::X* x, ptrdiff_t row_stride, const char* panel,
                                  int64_t in, DotBF16::Out* out) {  // [R][16]
  using Dot = DotBF16;
  alignas(64) uint16_t weights[kvn::kBlockWeights];
  typename Dot::Acc acc[R][1];
#pragma GCC unroll 24
  for (int r = 0; r < R; ++r) acc[r][0] = Dot::zero();
  CompactReader reader(panel, in);
  const int64_t steps = kvn::divide_up(in, Dot::kStep);
  for (int64_t first = 0; first < steps; first += kvn::kBlockSteps) {
    reader.expand_block(weights);
    const int64_t left = steps - first;
    const int64_t count = left < kvn::kBlockSteps ? left : kvn::kBlockSteps;
    const Dot::X* inputs = x + first * Dot::kStep * (kIsPacked ? R : 1);
    for (int64_t k = 0; k < count; ++k) {
      const Dot::W* at = weights + k * 16 * Dot::kStep;
      add_step<Dot, R, 1, kIsPacked>(acc, inputs + k * Dot::kStep * (kIsPacked ? R : 1), row_stride,
                                     &at);
    }
  }
#pragma GCC unroll 24
  for (int r = 0; r < R; ++r) Dot::store(out + r * 16, acc[r][0]);
}

using CompactTileFunction = void (*)(const DotBF16::X*, ptrdiff_t, const char*, int64_t,
                                     DotBF16::Out*);

template <int R, bool kIsPacked>
struct CompactTileChooser {
  static CompactTileFunction choose(int rows) {
    if (rows == R) return &multiply_compact_tile<R, kIsPacked>;
    return CompactTileChooser<R - 1, kIsPacked>::choose(rows);
  }
};
template <bool kIsPacked>
struct CompactTileChooser<0, kIsPacked> {
  static CompactTileFunction choose(int) { return nullptr; }
};

// Sums of the rows of one pass by one panel, by vector instructions. products_amx.inl has others.
template <class Dot>
static void multiply_compact_rows(const VectorPlan<Dot>& plan, const typename Dot::X* x,
                                  ptrdiff_t stride, const char* panel, int64_t in,
                                  typename Dot::Out* sums, typename VectorPlan<Dot>::Registers&) {
  const int rows = static_cast<int>(plan.rows_at_once);
  (plan.are_rows_packed ? CompactTileChooser<kMaxPackedRows, true>::choose(rows)
                        : CompactTileChooser<kMaxSinglePassRows, false>::choose(rows))(
      x, stride, panel, in, sums);
}

// As multiply(), for passes of `pass_rows` rows that make_plan(rows) multiplies in a single pass.
template <class Plan, class MakePlan, class UseTile>
static void multiply_compact(const MakePlan& make_plan, const DotBF16::X* x, ptrdiff_t stride,
                             int64_t rows, int64_t pass_rows, const char* weights,
                             int64_t num_panels, int64_t in, typename Plan::Registers& registers,
                             UseTile&& use_tile) {
  alignas(64) DotBF16::Out sums[kMaxTileSums * 16];
  const int64_t panel_bytes = kvn::count_compact_bytes(in);
  for (int64_t panel = 0; panel < num_panels; panel += 2) {
    const int panels = num_panels - panel < 2 ? 1 : 2;
    for (int64_t row = 0; row < rows; row += pass_rows) {
      const int64_t count = rows - row < pass_rows ? rows - row : pass_rows;
      const Plan plan = make_plan(count);
      for (int c = 0; c < panels; ++c)
        multiply_compact_rows(plan, x + row * stride, stride, weights + (panel + c) * panel_bytes,
                              in, sums + c * count * 16, registers);
      use_tile(Tile<DotBF16>{sums, 16, static_cast<int>(count) * 16, row, count, panel, panels});
    }
  }
}

// Add the products of R rows with some steps of expanded blocks to `sums` [R][16].
template <class Dot, int R>
static void add_block(const typename Dot::X* x, ptrdiff_t row_stride, const typename Dot::W* expanded,
                      int64_t steps, const StepFetch& fetch, float* sums) {
  F16 acc[R][1];
#pragma GCC unroll 24
  for (int r = 0; r < R; ++r) acc[r][0] = load(sums + r * 16);
  const typename Dot::W* const panels[1] = {expanded};
  StepLoop<Dot, R, 1, false, true>::add(acc, x, row_stride, panels, steps, fetch);
#pragma GCC unroll 24
  for (int r = 0; r < R; ++r) store(sums + r * 16, acc[r][0]);
}

template <class Dot>
using BlockFunction = void (*)(const typename Dot::X*, ptrdiff_t, const typename Dot::W*, int64_t,
                               const StepFetch&, float*);

template <class Dot, int R>
struct BlockChooser {
  static BlockFunction<Dot> choose(int64_t rows) {
    if (rows == R) return &add_block<Dot, R>;
    return BlockChooser<Dot, R - 1>::choose(rows);
  }
};
template <class Dot>
struct BlockChooser<Dot, 0> {
  static BlockFunction<Dot> choose(int64_t) { return nullptr; }
};

// As multiply(), for up to kMaxSharedBlockRows rows. kSharedBlocks blocks at a time are expanded in
// the L1 cache, and each pass adds its products to the sums.
template <class Dot, class UseTile>
static void multiply_shared_blocks(const typename Dot::X* x, ptrdiff_t stride, int64_t rows,
                                   const char* weights, int64_t num_panels, int64_t in,
                                   UseTile&& use_tile) {
  alignas(64) typename Dot::W expanded[kSharedBlocks * kvn::kBlockWeights];
  alignas(64) float sums[2 * kMaxSharedBlockRows * 16];
  const int64_t panel_bytes = kvn::count_compact_bytes(in);
  const int64_t steps = kvn::divide_up(in, Dot::kStep);
  const int64_t passes = kvn::divide_up(rows, kBlockedRows<Dot>);
  const int64_t at_once = kvn::divide_up(rows, passes);
  const auto add_whole = BlockChooser<Dot, kBlockedRows<Dot>>::choose(at_once);
  const auto add_last = BlockChooser<Dot, kBlockedRows<Dot>>::choose(rows - (passes - 1) * at_once);
  for (int64_t panel = 0; panel < num_panels; panel += 2) {
    const int panels = num_panels - panel < 2 ? 1 : 2;
    __builtin_memset(sums, 0, static_cast<size_t>(panels * rows) * 64);
    for (int c = 0; c < panels; ++c) {
      float* panel_sums = sums + c * rows * 16;
      CompactReader reader(weights + (panel + c) * panel_bytes, in);
      for (int64_t first = 0; first < steps; first += kSharedBlocks * kvn::kBlockSteps) {
        const int64_t left = kvn::divide_up(steps - first, kvn::kBlockSteps);
        const int64_t blocks = left < kSharedBlocks ? left : kSharedBlocks;
        const int64_t count = blocks < left ? blocks * kvn::kBlockSteps : steps - first;
        StepFetch fetch = reader.plan_fetch(blocks, passes * count);
        for (int64_t block = 0; block < blocks; ++block)
          reader.expand_unfetched_block(expanded + block * kvn::kBlockWeights);
        for (int64_t row = 0; row < rows; row += at_once) {
          (rows - row > at_once ? add_whole : add_last)(x + row * stride + first * Dot::kStep, stride,
                                                        expanded, count, fetch,
                                                        panel_sums + row * 16);
          fetch.at += count * fetch.bytes_per_step;
        }
      }
    }
    use_tile(Tile<Dot>{sums, 16, static_cast<int>(rows) * 16, 0, rows, panel, panels});
  }
}
