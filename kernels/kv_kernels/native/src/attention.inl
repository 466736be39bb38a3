// Causal attention of query tiles over the paged cache: the online softmax of Dao et al. 2022 over
// groups of kKeyGroup keys, the same for prompts and for decoding. Included by one file for each
// instruction set, inside its namespace.

using kvn::QueryTile;

// Where one task keeps what it computes.
template <class Dot>
struct AttentionScratch {
  // Rows whose scores are computed and used before those of the next: they stay in the L1 cache.
  static constexpr int64_t kRowsAtOnce =
      kvn::round_up(2 * kTileRows, MatrixPlan<Dot>::Type::kRowsPerBlock);
  // Blocks of kRowsAtOnce rows that have scores and weights at a time.
  static constexpr int64_t kBlocks = MatrixPlan<Dot>::Type::kHasTileAttention ? 2 : 1;
  typename Dot::X* query;     // [rows][query_stride]
  typename Dot::W* keys;      // [key panels][query steps][16][kStep]
  typename Dot::W* values;    // [value panels][key steps][16][kStep]
  typename Dot::X* weights;   // [kBlocks][kRowsAtOnce][kKeyGroup], 1 for a row's maximum
  float* scores;              // [kBlocks][kRowsAtOnce][kKeyGroup], not scaled
  float* sums;                // [rows][head_dim], both rounded up
  float* maxima;              // [rows]
  float* totals;              // [rows][16], of the weights, by their place in a vector
  float* decays;              // [rows], of earlier sums in this group
  typename Dot::W* decoded;   // [kKeyGroup][sum_stride], of a cache in int8, or copied rows
  typename Dot::W* packed_queries;  // [query steps][16 rows][kStep], as a panel of weights
  float* key_scores;                // [kKeyGroup][16 rows]

  static int64_t query_stride(int64_t head_dim) { return kvn::round_up(head_dim, 16 * Dot::kStep); }
  static int64_t sum_stride(int64_t head_dim) { return kvn::round_up(head_dim, 16); }

  // Returns the bytes that a task needs; fills the pointers if there is memory.
  int64_t place(char* memory, int64_t rows, int64_t head_dim) {
    int64_t used = 0;
    const auto take = [&](int64_t bytes) {
      char* at = memory == nullptr ? nullptr : memory + used;
      used += kvn::round_up(bytes, 64);
      return at;
    };
    using X = typename Dot::X;
    using W = typename Dot::W;
    const int64_t row_size = sizeof(X), size = sizeof(W), stride = query_stride(head_dim);
    const int64_t whole_rows = kvn::round_up(rows, 2 * kTileRows);  // tiles read and store whole ones
    const int64_t block_scores = kBlocks * kRowsAtOnce * kvn::kKeyGroup;
    query = reinterpret_cast<X*>(take(whole_rows * stride * row_size));
    keys = reinterpret_cast<W*>(take(kvn::kKeyGroup * stride * size));
    values = reinterpret_cast<W*>(take(kvn::kKeyGroup * sum_stride(head_dim) * size));
    weights = reinterpret_cast<X*>(take(block_scores * row_size));
    scores = reinterpret_cast<float*>(take(block_scores * 4));
    sums = reinterpret_cast<float*>(take(whole_rows * sum_stride(head_dim) * 4));
    maxima = reinterpret_cast<float*>(take(rows * 4));
    totals = reinterpret_cast<float*>(take(rows * 64));
    decays = reinterpret_cast<float*>(take(rows * 4));
    decoded = reinterpret_cast<W*>(take(kvn::kKeyGroup * sum_stride(head_dim) * size));
    if (!MatrixPlan<Dot>::Type::kHasTileAttention) return used;
    packed_queries = reinterpret_cast<W*>(take(kTileRows * stride * size));
    key_scores = reinterpret_cast<float*>(take(kTileRows * kvn::kKeyGroup * 4));
    return used;
  }
};

// One tile of queries, and the query heads of one KV head in one layer.
struct AttentionTask {
  const KvnContext& context;
  int layer;
  int64_t head;
  const QueryTile& tile;

  int64_t heads_per_kv() const { return context.model.heads / context.model.kv_heads; }
  int64_t rows() const { return tile.count * heads_per_kv(); }
  int64_t window() const { return context.model.layers[layer].window; }
  // The first group of keys that any query sees, and the end of them all.
  int64_t first_group() const {
    const int64_t hidden = window() > 0 ? tile.position + 1 - window() : 0;
    return hidden > 0 ? hidden / kvn::kKeyGroup * kvn::kKeyGroup : 0;
  }
  int64_t end() const { return tile.position + tile.count; }
};

// Bytes that the cache has of one token and head: in int8, a scale follows the values.
template <class Dot>
static inline int64_t count_row_bytes(const KvnContext& context) {
  const int64_t dim = context.model.head_dim;
  if (context.cache.format == KVN_INT8) return dim + static_cast<int64_t>(sizeof(float));
  return dim * static_cast<int64_t>(sizeof(typename Dot::W));
}

// The first token of a page: one head of K or V in one layer of one block.
template <class Dot>
static inline char* find_page(const KvnContext& context, int layer, int is_value, int64_t head,
                              int64_t block) {
  const KvnModel& model = context.model;
  const int64_t page = context.cache.block_size * count_row_bytes<Dot>(context);
  const int64_t number =
      ((block * model.num_layers + layer) * 2 + is_value) * model.kv_heads + head;
  return static_cast<char*>(context.cache.arena) + number * page;
}

// Where the rows of up to kKeyGroup positions from `begin` on are; those from `end` on repeat the
// last one.
template <class Dot>
static void find_rows(const KvnContext& context, int layer, int is_value, int64_t head,
                      const int64_t* table, int64_t begin, int64_t end, const char** rows) {
  const int64_t size = context.cache.block_size, bytes = count_row_bytes<Dot>(context);
  int64_t position = begin;
  while (position < end) {
    const int64_t first = position % size;
    const int64_t count = size - first < end - position ? size - first : end - position;
    const char* page =
        find_page<Dot>(context, layer, is_value, head, table[position / size]) + first * bytes;
    for (int64_t i = 0; i < count; ++i) rows[position - begin + i] = page + i * bytes;
    position += count;
  }
  for (int64_t i = end - begin; i < kvn::kKeyGroup; ++i) rows[i] = rows[end - begin - 1];
}

// Fetch rows that are scattered over the cache, before they are read.
static void prefetch_rows(const char* const* rows, int64_t count, int64_t bytes) {
  for (int64_t i = 0; i < count; ++i)
    for (int64_t at = 0; at < bytes; at += 64) _mm_prefetch(rows[i] + at, _MM_HINT_T0);
}

// Rows in the model's format: those of the cache, or values times scale of a cache in int8.
template <class Dot>
static const char* const* decode_rows(const KvnContext& context, const char* const* rows,
                                      int64_t count, AttentionScratch<Dot>& scratch,
                                      const char** decoded) {
  if (context.cache.format != KVN_INT8) return rows;
  const int64_t dim = context.model.head_dim, stride = AttentionScratch<Dot>::sum_stride(dim);
  for (int64_t row = 0; row < count; ++row) {
    const int8_t* values = reinterpret_cast<const int8_t*>(rows[row]);
    float scale;
    __builtin_memcpy(&scale, values + dim, sizeof scale);
    typename Dot::W* out = scratch.decoded + row * stride;
    for_lanes(dim, [&](int64_t i, int lanes) {
      const F16 value = lanes == 16 ? load_i8(values + i) : load_i8_first(values + i, lanes);
      store_lanes<Dot>(out + i, mul(value, set1(scale)), lanes);
    });
    decoded[row] = reinterpret_cast<const char*>(out);
  }
  return decoded;
}

// Pack keys as the weights of a product: [panel of 16 keys][steps][16 keys][kStep].
template <class Dot>
static void pack_keys(const char* const* rows, int64_t dim, int64_t num_panels,
                      AttentionScratch<Dot>& scratch) {
  constexpr int64_t kWordValues = 4 / sizeof(typename Dot::W);
  const int64_t words = kvn::divide_up(dim, kWordValues);
  const int64_t padded = AttentionScratch<Dot>::query_stride(dim) / kWordValues;
  uint32_t* out = reinterpret_cast<uint32_t*>(scratch.keys);
  for (int64_t panel = 0; panel < num_panels; ++panel) {
    for (int64_t word = 0; word < padded; word += 16) {
      uint32_t copies[16][16];
      const uint32_t* at[16];
      for (int i = 0; i < 16; ++i) {
        const uint32_t* row = reinterpret_cast<const uint32_t*>(rows[panel * 16 + i]);
        at[i] = row + word;
        if (word + 16 > words || dim % kWordValues) {
          __builtin_memset(copies[i], 0, sizeof copies[i]);
          const int64_t bytes = dim * static_cast<int64_t>(sizeof(typename Dot::W)) - word * 4;
          if (bytes > 0)
            __builtin_memcpy(copies[i], at[i], static_cast<size_t>(bytes < 64 ? bytes : 64));
          at[i] = copies[i];
        }
      }
      transpose_words(at, out + (panel * padded + word) * 16);
    }
  }
}

// Pack values as the weights of a product: [panel of 16 dimensions][steps of keys][16][kStep].
static void pack_values(const char* const* rows, int64_t dim, int64_t num_keys,
                        AttentionScratch<DotF32>& scratch) {
  for (int64_t key = 0; key < num_keys; ++key) {
    const float* row = reinterpret_cast<const float*>(rows[key]);
    for_lanes(dim, [&](int64_t i, int lanes) {
      store(scratch.values + i * kvn::kKeyGroup + key * 16, load_floats(row + i, lanes));
    });
  }
}
static void pack_values(const char* const* rows, int64_t dim, int64_t num_keys,
                        AttentionScratch<DotBF16>& scratch) {
  for (int64_t key = 0; key < num_keys; key += 2)
    for_lanes(dim, [&](int64_t i, int lanes) {
      const uint16_t* a = reinterpret_cast<const uint16_t*>(rows[key]) + i;
      const uint16_t* b = reinterpret_cast<const uint16_t*>(rows[key + 1]) + i;
      uint16_t copies[2][16] = {};
      if (lanes < 16) {
        __builtin_memcpy(copies[0], a, sizeof(uint16_t) * static_cast<size_t>(lanes));
        __builtin_memcpy(copies[1], b, sizeof(uint16_t) * static_cast<size_t>(lanes));
        a = copies[0];
        b = copies[1];
      }
      interleave_half_words(a, b, scratch.values + i * kvn::kKeyGroup + key * 16);
    });
}

// Set scores of a row to minus infinity: those of the first `begin` keys, and from `end` on.
static inline void hide_keys(float* scores, int64_t num_keys, int64_t begin, int64_t end) {
  const auto clamp = [](int64_t lane) {
    return static_cast<int>(lane < 0 ? 0 : lane > 16 ? 16 : lane);
  };
  for (int64_t i = 0; i < num_keys; i += 16)
    store(scores + i, keep_lanes(load(scores + i), clamp(begin - i), clamp(end - i)));
}

// Turn the scores of one row into weights, 2^(exponent_scale * (score - maximum)). exponent_scale is
// positive, so that the maximum is that of the unscaled scores. The first `begin` keys and those from
// `end` on are hidden from the row. Scores and weights are those of rows from `first` on.
template <class Dot>
static inline void weigh_row(AttentionScratch<Dot>& scratch, int64_t row, int64_t first,
                             int64_t num_keys, int64_t begin, int64_t end, float exponent_scale) {
  float* scores = scratch.scores + (row - first) * kvn::kKeyGroup;
  if (begin > 0 || end < num_keys) hide_keys(scores, num_keys, begin, end);
  F16 largest = set1(-__builtin_inff());
  for (int64_t i = 0; i < num_keys; i += 16) largest = max(largest, load(scores + i));
  const float before = scratch.maxima[row];
  const bool is_larger = any_greater(largest, set1(before));  // rarely, after some groups
  const float found = is_larger ? reduce_max(largest) : before;
  const float maximum = found > before ? found : before;
  const float origin = maximum == -__builtin_inff() ? 0.0f : maximum;
  F16 total = zero();
  for (int64_t i = 0; i < num_keys; i += 16) {
    const F16 weight =
        exp2_nonpositive(mul(sub(load(scores + i), set1(origin)), set1(exponent_scale)));
    total = add(total, weight);
    Numbers<Dot>::store(scratch.weights + (row - first) * kvn::kKeyGroup + i, weight);
  }
  float decay = 1.0f;
  if (is_larger) {
    alignas(64) float lanes[16];
    store(lanes, exp2_nonpositive(set1((before - origin) * exponent_scale)));
    decay = lanes[0];
  }
  scratch.decays[row] = decay;
  float* totals = scratch.totals + row * 16;
  store(totals, fma(load(totals), set1(decay), total));
  scratch.maxima[row] = maximum;
}

// Turn the scores of `count` rows from `first` on into weights; calls after_row() after each.
template <class Dot, class AfterRow>
static void weigh_rows(const AttentionTask& task, int64_t group, int64_t num_keys, int64_t first,
                       int64_t count, AttentionScratch<Dot>& scratch, AfterRow&& after_row) {
  const int64_t heads_per_kv = task.heads_per_kv(), window = task.window();
  constexpr float kLog2E = 1.44269504088896341f;  // exp(x) is 2^(x log2(e))
  const float exponent_scale =
      kLog2E / __builtin_sqrtf(static_cast<float>(task.context.model.head_dim));
  int64_t head = first % heads_per_kv, position = task.tile.position + first / heads_per_kv;
  for (int64_t row = first; row < first + count; ++row) {
    const int64_t visible_from = window > 0 ? position + 1 - window : 0;
    weigh_row<Dot>(scratch, row, first, num_keys, visible_from - group, position + 1 - group,
                   exponent_scale);
    after_row();
    if (++head == heads_per_kv) {
      head = 0;
      ++position;
    }
  }
}

// Add the weighted values of a group to the sums of `count` rows from `first` on.
template <class Dot, class Plan>
static void add_values(const Plan& plan, int64_t dim, int64_t num_keys, int64_t first,
                       int64_t count, AttentionScratch<Dot>& scratch,
                       typename Plan::Registers& registers) {
  const int64_t stride = AttentionScratch<Dot>::sum_stride(dim);
  multiply<Dot>(plan, scratch.weights, kvn::kKeyGroup, count, scratch.values, kvn::kKeyGroup * 16,
                stride / 16, num_keys / Dot::kStep, NextWeights{}, registers,
                [&](const Tile<Dot>& weighted) {
                  for (int64_t r = 0; r < weighted.num_rows; ++r) {
                    const int64_t row = first + weighted.first_row + r;
                    const F16 decay = set1(scratch.decays[row]);
                    for (int c = 0; c < weighted.num_panels; ++c) {
                      float* sum = scratch.sums + row * stride + (weighted.first_panel + c) * 16;
                      store(sum, fma(load(sum), decay, load(weighted.at(r, c))));
                    }
                  }
                });
}

// Attend a packed group of keys for all rows of a task, by vector instructions.
template <class Dot>
static void attend_rows(const AttentionTask& task, int64_t group, int64_t num_keys,
                        AttentionScratch<Dot>& scratch,
                        typename MatrixPlan<Dot>::Type::Registers& registers) {
  const int64_t dim = task.context.model.head_dim, rows = task.rows();
  const int64_t stride = AttentionScratch<Dot>::query_stride(dim);
  constexpr int64_t kRows = AttentionScratch<Dot>::kRowsAtOnce;
  for (int64_t first = 0; first < rows; first += kRows) {
    const int64_t count = rows - first < kRows ? rows - first : kRows;
    const auto plan = MatrixPlan<Dot>::Type::unpacked(count);
    multiply<Dot>(plan, scratch.query + first * stride, stride, count, scratch.keys, stride * 16,
                  num_keys / 16, stride / Dot::kStep, NextWeights{}, registers,
                  [&](const Tile<Dot>& found) {
                    for (int64_t r = 0; r < found.num_rows; ++r)
                      for (int c = 0; c < found.num_panels; ++c)
                        store(scratch.scores + (found.first_row + r) * kvn::kKeyGroup +
                                  (found.first_panel + c) * 16,
                              load(found.at(r, c)));
                  });
    weigh_rows(task, group, num_keys, first, count, scratch, [] {});
    add_values(plan, dim, num_keys, first, count, scratch, registers);
  }
}

namespace {
template <class Dot>
class RowBlockAttention;  // attention_amx.inl
}

// Attend one group of keys, from position `group` on. `keys` and `values` are their rows.
template <class Dot>
static void attend_group(const AttentionTask& task, int64_t group, const char* const* keys,
                         const char* const* values, AttentionScratch<Dot>& scratch,
                         typename MatrixPlan<Dot>::Type::Registers& registers) {
  using Plan = typename MatrixPlan<Dot>::Type;
  const KvnContext& context = task.context;
  const int64_t dim = context.model.head_dim, left = task.end() - group;
  // How many keys there are depends on the step. Those that no query sees have the weight 0, so
  // that they change nothing, as long as the sums of the others are in the same order.
  const int64_t num_keys =
      kvn::round_up(left < kvn::kKeyGroup ? left : kvn::kKeyGroup, Plan::kKeyMultiple);
  const char* decoded[kvn::kKeyGroup];
  pack_keys<Dot>(decode_rows<Dot>(context, keys, num_keys, scratch, decoded), dim, num_keys / 16,
                 scratch);
  pack_values(decode_rows<Dot>(context, values, num_keys, scratch, decoded), dim, num_keys,
              scratch);
  if constexpr (Plan::kHasTileAttention) {
    RowBlockAttention<Dot>(task, scratch, registers, group, num_keys).attend();
  } else {
    attend_rows<Dot>(task, group, num_keys, scratch, registers);
  }
}

template <class Dot>
static void attend_groups(const AttentionTask& task, AttentionScratch<Dot>& scratch,
                          typename MatrixPlan<Dot>::Type::Registers& registers) {
  const int64_t last = task.end();
  const char* keys[2][kvn::kKeyGroup];
  const char* values[kvn::kKeyGroup];
  const auto fetch = [&](int is_value, int64_t begin, const char** found) {
    if (begin >= last) return;
    const int64_t end = begin + kvn::kKeyGroup < last ? begin + kvn::kKeyGroup : last;
    find_rows<Dot>(task.context, task.layer, is_value, task.head, task.tile.table, begin, end,
                   found);
    prefetch_rows(found, end - begin, count_row_bytes<Dot>(task.context));
  };
  int64_t group = task.first_group();
  fetch(0, group, keys[0]);
  for (int turn = 0; group < last; group += kvn::kKeyGroup, turn ^= 1) {
    fetch(1, group, values);
    fetch(0, group + kvn::kKeyGroup, keys[turn ^ 1]);
    attend_group<Dot>(task, group, keys[turn], values, scratch, registers);
  }
}

// Copy the queries of a task in the model's format, and begin their sums.
template <class Dot>
static void start_queries(const AttentionTask& task, AttentionScratch<Dot>& scratch) {
  const KvnModel& model = task.context.model;
  const int64_t dim = model.head_dim, heads_per_kv = task.heads_per_kv();
  const int64_t channels = (model.heads + 2 * model.kv_heads) * dim;
  const int64_t stride = AttentionScratch<Dot>::query_stride(dim);
  const int64_t sum_stride = AttentionScratch<Dot>::sum_stride(dim);
  for (int64_t row = 0; row < task.rows(); ++row) {
    const float* query = task.context.work.qkv.as<float>() +
                         (task.tile.first_row + row / heads_per_kv) * channels +
                         (task.head * heads_per_kv + row % heads_per_kv) * dim;
    typename Dot::X* copy = scratch.query + row * stride;
    for (int64_t i = 0; i < stride; i += 16) Numbers<Dot>::store(copy + i, zero());
    for_lanes(dim, [&](int64_t i, int lanes) {
      store_lanes<Dot>(copy + i, load_floats(query + i, lanes), lanes);
    });
    for (int64_t i = 0; i < sum_stride; i += 16) store(scratch.sums + row * sum_stride + i, zero());
    scratch.maxima[row] = -__builtin_inff();
    store(scratch.totals + row * 16, zero());
  }
}

// Divide the sums of a task by the totals of their weights, and store them from row `first` on.
template <class Dot>
static void store_attended(const AttentionTask& task, int64_t first,
                           const AttentionScratch<Dot>& scratch) {
  const int64_t dim = task.context.model.head_dim, heads_per_kv = task.heads_per_kv();
  const int64_t sum_stride = AttentionScratch<Dot>::sum_stride(dim);
  auto* attended = task.context.work.activation.as<typename Dot::X>();
  for (int64_t row = 0; row < task.rows(); ++row) {
    typename Dot::X* out =
        attended + (first + row / heads_per_kv) * task.context.activation_stride +
        (task.head * heads_per_kv + row % heads_per_kv) * dim;
    const F16 inverse = div(set1(1.0f), set1(reduce_add(load(scratch.totals + row * 16))));
    for_lanes(dim, [&](int64_t i, int lanes) {
      store_lanes<Dot>(out + i, mul(load(scratch.sums + row * sum_stride + i), inverse), lanes);
    });
  }
}

namespace {
template <class Dot>
class KeyRowAttention;  // attention_amx.inl
}

// Attend for one task; writes rows of `activation` from `out_row` on.
template <class Dot>
static void attend_tile(const AttentionTask& task, int64_t out_row, char* memory) {
  using Plan = typename MatrixPlan<Dot>::Type;
  AttentionScratch<Dot> scratch;
  scratch.place(memory, task.rows(), task.context.model.head_dim);
  start_queries(task, scratch);
  typename Plan::Registers registers;
  bool by_key_rows = false;
  if constexpr (Plan::kHasTileAttention) {
    by_key_rows = KeyRowAttention<Dot>::is_chosen(task);
    if (by_key_rows) KeyRowAttention<Dot>(task, scratch, registers).attend();
  }
  if (!by_key_rows) attend_groups(task, scratch, registers);
  store_attended(task, out_row, scratch);
}
