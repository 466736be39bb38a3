// Attention by AMX. Included after attention.inl.
//
// The products of a group of keys are added to the sums of earlier groups in the tile registers, in
// the same order for any number of query rows: finite results of prompts and of decode steps are the
// same bit for bit. What was stored can be loaded into a tile only after a while, so that something
// else is computed between a row's weights and their product with the values.
namespace {  // so that its functions are of this file alone

// Multiply the sums of earlier groups by their decay, in rows whose maximum has grown.
template <class Dot>
void scale_sums(AttentionScratch<Dot>& scratch, int64_t dim, int64_t first, int64_t count) {
  const int64_t stride = AttentionScratch<Dot>::sum_stride(dim);
  for (int64_t row = first; row < first + count; ++row) {
    if (scratch.decays[row] == 1.0f) continue;
    const F16 decay = set1(scratch.decays[row]);
    for (float* sums = scratch.sums + row * stride; sums < scratch.sums + (row + 1) * stride;
         sums += 16)
      store(sums, mul(load(sums), decay));
  }
}

// Add weighted values to the sums of `count` rows from `first` on, for some panels of dimensions.
template <class Dot>
void add_weighted_values(const AttentionScratch<Dot>& scratch, int64_t dim, int64_t num_keys,
                         int64_t first, int64_t count, int64_t first_panel, int64_t num_panels,
                         TileRegisters& registers) {
  const int64_t stride = AttentionScratch<Dot>::sum_stride(dim);
  constexpr int64_t kPanelValues = kvn::kKeyGroup * 16;
  TilePlan<Dot>::template multiply_few_rows<true>(
      scratch.weights, kvn::kKeyGroup, count, scratch.values + first_panel * kPanelValues,
      kPanelValues, num_panels, num_keys / Dot::kStep,
      scratch.sums + first * stride + first_panel * 16, stride, registers);
}

// Attends a packed group of keys for the rows of a task, in blocks. While vector instructions
// compute the weights of a block, tiles are multiplied for the blocks before and after it, a few at
// a time, so that a core does both at once. A row's sums are scaled before its block's values are
// added, and scores of block b + 1 replace those of b - 1, whose weights are still being read.
template <class Dot>
class RowBlockAttention {
 public:
  RowBlockAttention(const AttentionTask& task, const AttentionScratch<Dot>& scratch,
                    TileRegisters& registers, int64_t group, int64_t num_keys)
      : task_(task), registers_(registers), group_(group), num_keys_(num_keys),
        scratch_{scratch, scratch} {
    scratch_[1].scores += kRows * kvn::kKeyGroup;
    scratch_[1].weights += kRows * kvn::kKeyGroup;
  }

  void attend() {
    const int64_t blocks = kvn::divide_up(task_.rows(), kRows);
    for (int64_t part = 0; part < count_score_parts(0); ++part) compute_score_part(0, part);
    for (int64_t block = 0; block < blocks; ++block) {
      const int64_t adding = block > 0 ? count_value_parts(block - 1) : 0;
      const int64_t parts = adding + (block + 1 < blocks ? count_score_parts(block + 1) : 0);
      int64_t part = 0;
      const auto compute_part = [&] {
        if (part < adding) {
          add_value_part(block - 1, part);
        } else {
          compute_score_part(block + 1, part - adding);
        }
        ++part;
      };
      const int64_t count = count_rows(block);
      int64_t row = 0;
      weigh_rows(task_, group_, num_keys_, block * kRows, count, scratch_[block % 2], [&] {
        // The parts are spread evenly over the rows.
        if (++row * (parts + 1) > (part + 1) * count && part < parts) compute_part();
      });
      while (part < parts) compute_part();
      scale_sums(scratch_[0], dim_, block * kRows, count);
    }
    for (int64_t part = 0; part < count_value_parts(blocks - 1); ++part)
      add_value_part(blocks - 1, part);
  }

 private:
  static constexpr int64_t kRows = AttentionScratch<Dot>::kRowsAtOnce;

  int64_t count_rows(int64_t block) const {
    const int64_t left = task_.rows() - block * kRows;
    return left < kRows ? left : kRows;
  }
  // Panels of one part, so that its sums fill the four tile registers for sums.
  int64_t part_panels(int64_t block) const { return count_rows(block) > kTileRows ? 2 : 4; }
  int64_t count_score_parts(int64_t block) const {
    return kvn::divide_up(num_keys_ / 16, part_panels(block));
  }
  int64_t count_value_parts(int64_t block) const {
    return kvn::divide_up(sum_stride_ / 16, part_panels(block));
  }

  void compute_score_part(int64_t block, int64_t part) {
    const int64_t at_once = part_panels(block), panel = part * at_once;
    const int64_t left = num_keys_ / 16 - panel, panel_values = query_stride_ * 16;
    const AttentionScratch<Dot>& scratch = scratch_[block % 2];
    TilePlan<Dot>::template multiply_few_rows<false>(
        scratch.query + block * kRows * query_stride_, query_stride_, count_rows(block),
        scratch.keys + panel * panel_values, panel_values, left < at_once ? left : at_once,
        query_stride_ / Dot::kStep, scratch.scores + panel * 16, kvn::kKeyGroup, registers_);
  }

  void add_value_part(int64_t block, int64_t part) {
    const int64_t at_once = part_panels(block), panel = part * at_once;
    const int64_t left = sum_stride_ / 16 - panel;
    add_weighted_values(scratch_[block % 2], dim_, num_keys_, block * kRows, count_rows(block),
                        panel, left < at_once ? left : at_once, registers_);
  }

  const AttentionTask& task_;
  TileRegisters& registers_;
  const int64_t group_, num_keys_;
  AttentionScratch<Dot> scratch_[2];  // of even and odd blocks, which differ in scores and weights
  const int64_t dim_ = task_.context.model.head_dim;
  const int64_t query_stride_ = AttentionScratch<Dot>::query_stride(dim_);
  const int64_t sum_stride_ = AttentionScratch<Dot>::sum_stride(dim_);
};

// Attention for up to 16 query rows, as decode steps have it: keys are the rows of tiles, so that
// they are multiplied where they lie in the cache, and the queries are packed instead. The next
// group's scores are computed between a group's weights and their product with the values. A core
// can fetch only so many lines before it waits for the first of them, so that a later group is
// fetched a few lines at a time, while something is computed.
template <class Dot>
class KeyRowAttention {
 public:
  KeyRowAttention(const AttentionTask& task, AttentionScratch<Dot>& scratch,
                  TileRegisters& registers)
      : task_(task), scratch_(scratch), registers_(registers) {
    const KvnContext& context = task.context;
    const int64_t page = context.cache.block_size * row_bytes_;
    const int64_t kv_heads = context.model.kv_heads;
    block_bytes_ = context.model.num_layers * 2 * kv_heads * page;
    for (int is_value = 0; is_value < 2; ++is_value)
      pages_[is_value] = static_cast<const char*>(context.cache.arena) +
                         ((task.layer * 2 + is_value) * kv_heads + task.head) * page;
  }

  // Whether 16 keys are rows of whole tiles, at equal distances in the cache, and there are so many
  // keys that this is faster than attend_groups.
  static bool is_chosen(const AttentionTask& task) {
    const KvnContext& context = task.context;
    return task.rows() <= kTileRows && context.cache.format != KVN_INT8 &&
           context.cache.block_size % kTileRows == 0 &&
           context.model.head_dim % (kTileSteps * Dot::kStep) == 0 &&
           task.end() - task.first_group() >= kMinKeys;
  }

  void attend() {
    const int64_t begin = task_.first_group(), rows = task_.rows();
    for (int64_t group = begin; group < begin + kGroupsAhead * kvn::kKeyGroup;
         group += kvn::kKeyGroup) {
      start_prefetch(group);
      while (prefetch_lines()) {}
    }
    pack_queries();
    score_keys(begin);
    for (int64_t group = begin; group < task_.end(); group += kvn::kKeyGroup) {
      const int64_t num_keys = count_key_panels(group) * kTileRows;
      start_prefetch(group + kGroupsAhead * kvn::kKeyGroup);
      pack_values(group);
      transpose_scores(group);
      weigh_rows(task_, group, num_keys, 0, rows, scratch_, [&] {
        for (int64_t part = 0; part < kTileRows; part += rows) prefetch_lines();
      });
      scale_sums(scratch_, dim_, 0, rows);
      if (group + kvn::kKeyGroup < task_.end()) score_keys(group + kvn::kKeyGroup);
      add_weighted_values(scratch_, dim_, num_keys, 0, rows, 0,
                          AttentionScratch<Dot>::sum_stride(dim_) / 16, registers_);
      while (prefetch_lines()) {}
    }
    restore_dimensions();
  }

 private:
  static constexpr int64_t kPanels = kvn::kKeyGroup / kTileRows;  // of 16 keys each
  static constexpr int64_t kGroupsAhead = 2;
  static constexpr int64_t kMinKeys = 192;  // with fewer, attend_groups is as fast

  // Panels of a group with keys, an even number. The last one may have none.
  int64_t count_key_panels(int64_t group) const {
    const int64_t left = task_.end() - group;
    return left < kvn::kKeyGroup ? kvn::round_up(left, 2 * kTileRows) / kTileRows : kPanels;
  }

  const char* find_row(int is_value, int64_t position) const {
    const int64_t size = task_.context.cache.block_size;
    return pages_[is_value] + task_.tile.table[position / size] * block_bytes_ +
           position % size * row_bytes_;
  }

  // The 16 rows from `position` on. Where there are fewer, a copy that repeats the last one; where
  // there are none, those of the panel before.
  const char* find_panel(int is_value, int64_t position) {
    const int64_t count = task_.end() - position;
    if (count >= kTileRows) return find_row(is_value, position);
    if (count <= 0) return find_panel(is_value, position - kTileRows);
    char* copy = reinterpret_cast<char*>(scratch_.decoded) + is_value * kTileRows * row_bytes_;
    for (int64_t row = 0; row < kTileRows; ++row)
      __builtin_memcpy(copy + row * row_bytes_,
                       find_row(is_value, position + (row < count ? row : count - 1)),
                       static_cast<size_t>(row_bytes_));
    return copy;
  }

  // Choose the group that prefetch_lines fetches.
  void start_prefetch(int64_t group) {
    num_prefetched_ = next_prefetched_ = 0;
    line_ = end_of_lines_ = nullptr;
    for (int is_value = 0; is_value < 2; ++is_value)
      for (int64_t panel = 0; panel < kPanels; ++panel)
        if (group + panel * kTileRows < task_.end())
          prefetched_[num_prefetched_++] = find_row(is_value, group + panel * kTileRows);
  }

  // Fetch the next of 64 parts of a group into the L2 cache. Returns false if there is none.
  bool prefetch_lines() {
    if (line_ == end_of_lines_) {
      if (next_prefetched_ == num_prefetched_) return false;
      line_ = prefetched_[next_prefetched_++];
      end_of_lines_ = line_ + kTileRows * row_bytes_;
    }
    const char* end = line_ + 2 * row_bytes_;
    for (; line_ != end; line_ += 64) _mm_prefetch(line_, _MM_HINT_T1);
    return true;
  }

  void pack_queries() {
    const int64_t words = dim_ / Dot::kStep;
    const auto* query = reinterpret_cast<const uint32_t*>(scratch_.query);
    for (int64_t word = 0; word < words; word += kTileSteps) {
      const uint32_t* rows[kTileRows];
      for (int64_t row = 0; row < kTileRows; ++row) rows[row] = query + row * words + word;
      transpose_words(rows, reinterpret_cast<uint32_t*>(scratch_.packed_queries) + word * 16);
    }
  }

  // Scores [key][row] of a group.
  void score_keys(int64_t group) {
    const char* panels[kPanels];
    const int64_t count = count_key_panels(group);
    for (int64_t panel = 0; panel < kPanels; ++panel)
      panels[panel] = find_panel(0, group + (panel < count ? panel : 0) * kTileRows);
    registers_.configure_whole_tiles();
    complete_stores(scratch_.packed_queries);
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t at = 0; at < row_bytes_; at += 64) {
      _tile_loadd(4, scratch_.packed_queries + at * kTileSteps / 2, 64);
      _tile_loadd(5, panels[0] + at, row_bytes_);
      _tile_dpbf16ps(0, 5, 4);
      _tile_loadd(6, panels[1] + at, row_bytes_);
      _tile_dpbf16ps(1, 6, 4);
      prefetch_lines();
      _tile_loadd(7, panels[2] + at, row_bytes_);
      _tile_dpbf16ps(2, 7, 4);
      _tile_loadd(5, panels[3] + at, row_bytes_);
      _tile_dpbf16ps(3, 5, 4);
      prefetch_lines();
    }
    _tile_stored(0, scratch_.key_scores, 64);
    _tile_stored(1, scratch_.key_scores + 256, 64);
    _tile_stored(2, scratch_.key_scores + 512, 64);
    _tile_stored(3, scratch_.key_scores + 768, 64);
    complete_stores(scratch_.key_scores);
  }

  // The scores as weigh_rows reads them, [row][key].
  void transpose_scores(int64_t group) {
    for (int64_t panel = 0; panel < count_key_panels(group); ++panel) {
      const uint32_t* keys[kTileRows];
      for (int64_t key = 0; key < kTileRows; ++key)
        keys[key] = reinterpret_cast<const uint32_t*>(scratch_.key_scores) +
                    (panel * kTileRows + key) * 16;
      transpose_words(keys, reinterpret_cast<uint32_t*>(scratch_.scores) + panel * kTileRows,
                      kvn::kKeyGroup);
      prefetch_lines();
      prefetch_lines();
    }
  }

  // Pack values as the weights of a product. Of each 32 dimensions, the first panel has 0 to 3, 8
  // to 11 and so on, and the second one the others: two instructions interleave two keys.
  void pack_values(int64_t group) {
    uint16_t* out = scratch_.values;
    for (int64_t panel = 0; panel < count_key_panels(group); ++panel) {
      const char* keys = find_panel(1, group + panel * kTileRows);
      for (int64_t key = 0; key < kTileRows; key += 2, keys += 2 * row_bytes_, out += 32) {
        for (int64_t i = 0; i < dim_; i += 32) {
          const __m512i a = _mm512_loadu_si512(keys + i * 2);
          const __m512i b = _mm512_loadu_si512(keys + row_bytes_ + i * 2);
          uint16_t* at = out + i * kvn::kKeyGroup;
          _mm512_store_si512(at, _mm512_unpacklo_epi16(a, b));
          _mm512_store_si512(at + 16 * kvn::kKeyGroup, _mm512_unpackhi_epi16(a, b));
        }
        prefetch_lines();
      }
    }
  }

  // Bring the sums of pack_values' panels into the order of their dimensions.
  void restore_dimensions() {
    const int64_t stride = AttentionScratch<Dot>::sum_stride(dim_);
    for (int64_t row = 0; row < task_.rows(); ++row)
      for (int64_t i = 0; i < dim_; i += 32) {
        float* sums = scratch_.sums + row * stride + i;
        float panels[2][16];
        __builtin_memcpy(panels, sums, sizeof panels);
        for (int four = 0; four < 8; ++four)
          __builtin_memcpy(sums + four * 4, panels[four % 2] + four / 2 * 4, 16);
      }
  }

  const AttentionTask& task_;
  AttentionScratch<Dot>& scratch_;
  TileRegisters& registers_;
  const int64_t dim_ = task_.context.model.head_dim;
  const int64_t row_bytes_ = count_row_bytes<Dot>(task_.context);
  int64_t block_bytes_ = 0;
  const char* pages_[2] = {};  // K and V of this layer and head in block 0
  const char* prefetched_[2 * kPanels];
  const char *line_ = nullptr, *end_of_lines_ = nullptr;
  int64_t num_prefetched_ = 0, next_prefetched_ = 0;
};

}  // namespace
