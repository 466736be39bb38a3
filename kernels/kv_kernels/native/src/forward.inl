// The forward pass of a step, in stages that the team's members share. Included by one file for
// each instruction set, inside its namespace.

using kvn::QueryTiles;
using kvn::ThreadTeam;

constexpr int64_t kRowsPerTask = 8;            // of elementwise stages
constexpr int64_t kPanelsPerTask = 4;
constexpr int64_t kTasksPerMember = 6;  // of a product, where its panels can be divided
constexpr float kMinPeak = 1e-12f;  // a row that is smaller is quantized as if it were this large

template <class Body>  // body(row)
static inline void share_rows(ThreadTeam& team, int member, int64_t rows, Body&& body) {
  const int64_t each = rows >= kRowsPerTask * team.num_used() ? kRowsPerTask : 1;
  team.share_tasks(member, kvn::divide_up(rows, each), [&](int64_t task) {
    const int64_t end = (task + 1) * each < rows ? (task + 1) * each : rows;
    for (int64_t row = task * each; row < end; ++row) body(row);
  });
}

// x * weight / sqrt(mean(x^2) + eps) (Zhang and Sennrich, 2019)
template <class Store>  // store(index, lanes, value)
static inline void normalize(const float* x, const float* weight, int64_t width, float eps,
                             Store&& store_value) {
  F16 squares = zero();
  for_lanes(width, [&](int64_t i, int lanes) {
    const F16 value = load_floats(x + i, lanes);
    squares = fma(value, value, squares);
  });
  const float mean = reduce_add(squares) / static_cast<float>(width);
  const F16 scale = set1(1.0f / __builtin_sqrtf(mean + eps));
  for_lanes(width, [&](int64_t i, int lanes) {
    store_value(i, lanes,
                mul(mul(load_floats(x + i, lanes), scale), load_floats(weight + i, lanes)));
  });
}

template <class Dot>
static void normalize_rows(KvnContext& context, int member, const float* weight, int64_t rows) {
  const int64_t hidden = context.model.hidden;
  share_rows(*context.team, member, rows, [&](int64_t row) {
    typename Dot::X* out =
        context.work.activation.as<typename Dot::X>() + row * context.activation_stride;
    normalize(context.work.hidden.as<float>() + row * hidden, weight, hidden,
              context.model.norm_eps,
              [&](int64_t i, int lanes, F16 value) { store_lanes<Dot>(out + i, value, lanes); });
    for (int64_t i = hidden; i < kvn::round_up(hidden, 4); ++i) out[i] = 0;
  });
}

// The largest magnitude of a row, at least kMinPeak, by which it is quantized symmetrically; NaN if
// a value of the row is not finite.
template <class Load>  // load(index, lanes)
static inline float find_peak(int64_t width, Load&& load_values) {
  F16 largest = set1(kMinPeak), poison = zero();  // NaN if any value is not finite
  for_lanes(width, [&](int64_t i, int lanes) {
    const F16 value = load_values(i, lanes);
    largest = max(largest, abs(value));
    poison = fma(value, zero(), poison);
  });
  return reduce_max(largest) + reduce_add(poison);
}

static inline F16 quantize(F16 value, F16 inverse) {
  return max(set1(-127.0f), min(round_to_even(mul(value, inverse)), set1(127.0f)));
}

// Quantize rows as unsigned numbers around 128. A row that is not finite gets a scale that is not,
// so that its row of the product is NaN.
template <class Dot>
static void quantize_rows(KvnContext& context, int member, const typename Dot::X* x,
                          int64_t stride, int64_t width, int64_t rows) {
  const int64_t padded = kvn::round_up(width, 64);
  share_rows(*context.team, member, rows, [&](int64_t row) {
    const typename Dot::X* from = x + row * stride;
    uint8_t* to = context.work.quantized.as<uint8_t>() + row * padded;
    const float peak = find_peak(
        width, [&](int64_t i, int lanes) { return load_lanes<Dot>(from + i, lanes); });
    const F16 inverse = set1(127.0f / peak);
    for_lanes(width, [&](int64_t i, int lanes) {
      store_u8(to + i, add(quantize(load_lanes<Dot>(from + i, lanes), inverse), set1(128.0f)));
    });
    for (int64_t i = width; i < padded; ++i) to[i] = 128;
    context.work.row_scales.as<float>()[row] = peak / 127.0f;
  });
}

// Write one row of K or V to a cache in int8: values, and their scale. Those of a row that is not
// finite are 0, and its scale is NaN.
static inline void write_int8_row(const float* from, int64_t dim, char* to) {
  const float peak =
      find_peak(dim, [&](int64_t i, int lanes) { return load_floats(from + i, lanes); });
  const float scale = peak / 127.0f;
  int8_t* values = reinterpret_cast<int8_t*>(to);
  if (peak == peak) {
    const F16 inverse = set1(127.0f / peak);
    for_lanes(dim, [&](int64_t i, int lanes) {
      const F16 value = quantize(load_floats(from + i, lanes), inverse);
      if (lanes == 16) {
        store_i8(values + i, value);
      } else {
        store_i8_first(values + i, value, lanes);
      }
    });
  } else {
    __builtin_memset(values, 0, static_cast<size_t>(dim));
  }
  __builtin_memcpy(values + dim, &scale, sizeof scale);
}

// How a product is cut into tasks: blocks of rows that stay in a cache, times groups of panels.
template <class Plan>
struct ProductTasks {
  int64_t rows, rows_each, panels, panels_each, row_blocks, panel_groups;

  // A block of rows takes about `block_bytes` at most, and a row `row_bytes`.
  ProductTasks(int64_t num_rows, int64_t num_panels, int64_t most_panels, int64_t block_bytes,
               int64_t row_bytes, int members)
      : rows(num_rows), rows_each(num_rows), panels(num_panels), panels_each(most_panels) {
    if (!Plan::is_single_pass(rows)) {
      constexpr int64_t kLeast = Plan::kRowsPerBlock;
      int64_t most = block_bytes / row_bytes;
      if (most >= 2 * kLeast) most = most / kLeast * kLeast;
      if (most < kLeast) most = kLeast;
      const int64_t blocks = kvn::divide_up(rows, most);
      rows_each = kvn::round_up(kvn::divide_up(rows, blocks), kLeast);
    }
    row_blocks = kvn::divide_up(rows, rows_each);
    const int64_t enough = kTasksPerMember * members;
    while (panels_each > 2 && row_blocks * kvn::divide_up(panels, panels_each) < enough)
      panels_each /= 2;
    panel_groups = kvn::divide_up(panels, panels_each);
  }
  int64_t count() const { return row_blocks * panel_groups; }
  int64_t first_row(int64_t task) const { return task / panel_groups * rows_each; }
  int64_t num_rows(int64_t task) const {
    const int64_t left = rows - first_row(task);
    return left < rows_each ? left : rows_each;
  }
  int64_t first_panel(int64_t task) const { return task % panel_groups * panels_each; }
  int64_t num_panels(int64_t task) const {
    const int64_t left = panels - first_panel(task);
    return left < panels_each ? left : panels_each;
  }
};

// Sums of a tile's row and panel as floats, bias included.
template <class Dot>
static inline F16 finish_sums(const KvnLinear& linear, const typename Dot::Out* sums, int64_t panel,
                              float) {
  const F16 found = load(sums);
  return linear.bias == nullptr ? found : add(found, load(linear.bias + panel * 16));
}
template <>
inline F16 finish_sums<DotInt8>(const KvnLinear& linear, const int32_t* sums, int64_t panel,
                                float row_scale) {
  alignas(64) int32_t centred[16];
  for (int i = 0; i < 16; ++i)
    centred[i] = sums[i] - 128 * linear.channel_sums[panel * 16 + i];
  const F16 scaled = mul(load_i32_as_float(centred), set1(row_scale));
  const F16 found = mul(scaled, load(linear.scales + panel * 16));
  return linear.bias == nullptr ? found : add(found, load(linear.bias + panel * 16));
}

// Copy rows to the workspace in the order of tiles, see copy_tiles.
template <class X>
static const X* tile_rows(KvnContext& context, int member, const X* x, ptrdiff_t stride,
                          int64_t rows, int64_t steps) {
  const int64_t words = 4 / static_cast<int64_t>(sizeof(X));  // values of a step
  X* out = context.work.tiled.as<X>();
  context.team->share_tasks(member, kvn::divide_up(rows, kTileRows), [&](int64_t task) {
    const int64_t first = task * kTileRows, left = rows - first;
    copy_tiles(x + first * stride, stride * static_cast<int64_t>(sizeof(X)),
               left < kTileRows ? left : kTileRows, steps,
               out + first * kvn::round_up(steps, kTileSteps) * words);
  });
  return out;
}

static int64_t count_tiled_bytes(int64_t rows, int64_t row_bytes) {
  if (!MatrixPlan<DotBF16>::Type::is_tiled(rows)) return 0;
  return kvn::round_up(rows, 2 * kTileRows) * kvn::round_up(row_bytes, 64);
}

// Finish the sums of a tile, whose rows and panels count from these, and store them.
template <class Dot, class StoreRow>
static inline void finish_tile(const KvnContext& context, const KvnLinear& linear,
                               const Tile<Dot>& tile, int64_t first_row, int64_t first_panel,
                               StoreRow& store_row) {
  F16 values[4];
  const int64_t panel = first_panel + tile.first_panel;
  for (int64_t r = 0; r < tile.num_rows; ++r) {
    const int64_t row = first_row + tile.first_row + r;
    const float scale =
        sizeof(typename Dot::X) == 1 ? context.work.row_scales.as<float>()[row] : 0.0f;
    for (int c = 0; c < tile.num_panels; ++c)
      values[c] = finish_sums<Dot>(linear, tile.at(r, c), panel + c, scale);
    store_row(row, panel, tile.num_panels, values);
  }
}

static inline int64_t count_panels(const KvnLinear& linear) {
  return kvn::divide_up(linear.out, kvn::kPanel) * (linear.is_gated ? 2 : 1);
}

static inline int64_t count_panel_bytes(const KvnLinear& linear, int64_t steps) {
  return linear.format == KVN_COMPACT_BFLOAT16 ? kvn::count_compact_bytes(linear.in) : steps * 64;
}

// The size of a block of rows at most. With compact weights it is larger if panels alone make enough
// tasks.
template <class Plan>
static int64_t choose_row_block_bytes(bool expands_once, int64_t panels, int members) {
  const bool is_large = expands_once && panels >= kvn::kExpandedPanels * kTasksPerMember * members;
  return is_large ? Plan::kCompactRowBlockBytes : Plan::kRowBlockBytes;
}

// Share the tasks of a product; `store_row(row, panel, panels, values)` gets the finished sums of a
// row, of `panels` panels of 16 each.
template <class Dot, class StoreRow>
static void share_product(KvnContext& context, int member, const KvnLinear& linear,
                          const typename Dot::X* x, int64_t stride, int64_t rows,
                          StoreRow&& store_row) {
  using Plan = typename MatrixPlan<Dot>::Type;
  const int64_t steps = kvn::divide_up(linear.in, Dot::kStep);
  const int64_t panel_bytes = count_panel_bytes(linear, steps);
  const auto* weights = static_cast<const char*>(linear.weights);
  const bool is_compact = linear.format == KVN_COMPACT_BFLOAT16;
  const bool is_tiled = Plan::is_tiled(rows);
  char* scratch = context.scratch_of(member);
  if (is_tiled) {
    x = tile_rows(context, member, x, stride, rows, steps);
    stride = kvn::round_up(steps, kTileSteps) * Dot::kStep;
  }
  const bool expands_in_passes = is_compact && Plan::expands_in_passes(rows);
  const bool uses_shared_blocks = is_compact && shares_blocks(rows);
  const bool expands_once = is_compact && !expands_in_passes && !uses_shared_blocks;
  const ProductTasks<Plan> tasks(rows, count_panels(linear),
                                 expands_once ? kvn::kExpandedPanels : kPanelsPerTask,
                                 choose_row_block_bytes<Plan>(expands_once, count_panels(linear),
                                                              context.team->num_used()),
                                 steps * Dot::kStep * static_cast<int64_t>(sizeof(*x)),
                                 context.team->num_used());
  const bool packs = Plan::is_packed(rows);
  auto* packed = reinterpret_cast<uint32_t*>(scratch);
  bool is_first_task = true;
  const auto make_plan = [packs, is_tiled](int64_t count) {
    return packs      ? Plan::packed(count)
           : is_tiled ? Plan::tiled(count)
                      : Plan::unpacked(count);
  };
  typename Plan::Registers registers;
  context.team->share_tasks(member, tasks.count(), [&](int64_t task) {
    if (packs && is_first_task) {  // each member has a copy in a cache of its own
      constexpr int64_t kWordValues = 4 / sizeof(*x);
      pack_rows(reinterpret_cast<const uint32_t*>(x), stride / kWordValues, rows,
                steps * Dot::kStep / kWordValues, packed);
      x = reinterpret_cast<const typename Dot::X*>(packed);
      is_first_task = false;
    }
    const int64_t row0 = tasks.first_row(task), panel0 = tasks.first_panel(task);
    const int64_t count = tasks.num_rows(task), num_panels = tasks.num_panels(task);
    const auto use_tile = [&](const Tile<Dot>& tile) {
      finish_tile(context, linear, tile, row0, panel0, store_row);
    };
    const char* from = weights + panel0 * panel_bytes;
    const auto* panels = reinterpret_cast<const typename Dot::W*>(from);
    int64_t panel_stride = panel_bytes / static_cast<int64_t>(sizeof(*panels));
    if constexpr (std::is_same_v<Dot, DotBF16>) {
      if constexpr (kMaxSharedBlockRows > 0) {
        if (uses_shared_blocks) {
          multiply_shared_blocks<Dot>(x + row0 * stride, stride, count, from, num_panels, linear.in,
                                      use_tile);
          return;
        }
      }
      if (expands_in_passes) {
        multiply_compact<Plan>(make_plan, x + row0 * stride, stride, count,
                               Plan::kPassRows, from,
                               num_panels, linear.in, registers, use_tile);
        return;
      }
      if (expands_once) {
        auto* expanded = reinterpret_cast<uint16_t*>(scratch);
        panel_stride = kvn::count_expanded_bytes(linear.in) / 2;
        for (int64_t panel = 0; panel < num_panels; ++panel)
          expand_panel(from + panel * panel_bytes, linear.in, expanded + panel * panel_stride);
        panels = expanded;
      }
    }
    multiply<Dot>(make_plan(count), x + row0 * stride, stride, count, panels, panel_stride,
                  num_panels, steps, NextWeights{from + num_panels * panel_bytes, 2 * panel_bytes},
                  registers, use_tile);
  });
}

// As share_product, for rows in the model's format, quantized first if the matrix is int8.
template <class Dot, class StoreRow>
static void share_linear(KvnContext& context, int member, const KvnLinear& linear,
                         const typename Dot::X* x, int64_t stride, int64_t rows,
                         StoreRow&& store_row) {
  if (linear.format != KVN_INT8) {
    share_product<Dot>(context, member, linear, x, stride, rows, store_row);
    return;
  }
  quantize_rows<Dot>(context, member, x, stride, linear.in, rows);
  share_product<DotInt8>(context, member, linear, context.work.quantized.as<uint8_t>(),
                         kvn::round_up(linear.in, 64), rows, store_row);
}

static inline void store_panels(float* out, int64_t width, int64_t panel, int panels,
                                const F16* values) {
  for (int c = 0; c < panels; ++c) {
    const int64_t left = width - (panel + c) * 16;
    store_floats(out + (panel + c) * 16, values[c], left < 16 ? static_cast<int>(left) : 16);
  }
}

// Rotate pairs (i, i + dim / 2) of a head (Su et al., 2021).
static inline void rotate(float* head, const float* angles, int64_t dim) {
  const int64_t half = dim / 2;
  for_lanes(half, [&](int64_t i, int lanes) {
    const F16 cosine = load_floats(angles + i, lanes), sine = load_floats(angles + half + i, lanes);
    const F16 a = load_floats(head + i, lanes), b = load_floats(head + half + i, lanes);
    store_floats(head + i, sub(mul(a, cosine), mul(b, sine)), lanes);
    store_floats(head + half + i, fma(b, cosine, mul(a, sine)), lanes);
  });
}

// Rotate queries and keys of a row, and write its keys and values to the cache.
template <class Dot>
static void finish_qkv(KvnContext& context, int layer, const KvnSlice& slice, int64_t row) {
  const KvnModel& model = context.model;
  const int64_t dim = model.head_dim, size = context.cache.block_size;
  const int64_t bytes = count_row_bytes<Dot>(context);
  const int64_t position = slice.position + row - slice.first_row;
  const int64_t block = context.step.block_tables[slice.table_begin + position / size];
  float* qkv = context.work.qkv.as<float>() + row * (model.heads + 2 * model.kv_heads) * dim;
  const float* angles = context.work.angles.as<float>() + row * dim;
  const float* norm = model.layers[layer].qk_norm;
  for (int64_t head = 0; head < model.heads + model.kv_heads; ++head) {
    float* at = qkv + head * dim;
    if (norm != nullptr)
      normalize(at, norm + head * dim, dim, model.norm_eps,
                [&](int64_t i, int lanes, F16 value) { store_floats(at + i, value, lanes); });
    rotate(at, angles, dim);
  }
  for (int64_t index = 0; index < 2 * model.kv_heads; ++index) {
    const int is_value = index >= model.kv_heads;
    const float* from = qkv + (model.heads + index) * dim;
    char* to = find_page<Dot>(context, layer, is_value, index % model.kv_heads, block) +
               position % size * bytes;
    if (context.cache.format == KVN_INT8) {
      write_int8_row(from, dim, to);
    } else {
      auto* row_values = reinterpret_cast<typename Dot::W*>(to);
      for_lanes(dim, [&](int64_t i, int lanes) {
        store_lanes<Dot>(row_values + i, load_floats(from + i, lanes), lanes);
      });
    }
    // What follows the sequence's newest token in its block is zero, not what was there before.
    const bool is_last = row + 1 == slice.first_row + slice.num_rows;
    const int64_t begun = slice.position + slice.num_rows;
    if (is_last && begun % size && begun / size * size >= slice.position)
      __builtin_memset(to + bytes, 0, static_cast<size_t>((size - begun % size) * bytes));
  }
}

static inline const KvnSlice& find_slice(const KvnStep& step, int64_t row) {
  int64_t low = 0, high = step.num_slices;
  while (high - low > 1) {
    const int64_t middle = (low + high) / 2;
    (step.slices[middle].first_row <= row ? low : high) = middle;
  }
  return step.slices[low];
}

template <class Dot>
static void run_first_half(KvnContext& context, int layer, int member) {
  const KvnModel& model = context.model;
  const KvnLayer& weights = model.layers[layer];
  const int64_t rows = context.step.num_rows, channels = weights.qkv.out;
  normalize_rows<Dot>(context, member, weights.attention_norm, rows);
  float* qkv = context.work.qkv.as<float>();
  share_linear<Dot>(context, member, weights.qkv, context.work.activation.as<typename Dot::X>(),
                    context.activation_stride, rows,
                    [&](int64_t row, int64_t panel, int panels, const F16* values) {
                      store_panels(qkv + row * channels, channels, panel, panels, values);
                    });
  share_rows(*context.team, member, rows, [&](int64_t row) {
    finish_qkv<Dot>(context, layer, find_slice(context.step, row), row);
  });
}

// Keep the residual of sampled rows alone, in their order.
static void select_sampled_rows(KvnContext& context, int member) {
  const int64_t hidden = context.model.hidden;
  float* rows = context.work.hidden.as<float>();
  // One task, in ascending order: no row is overwritten before its move.
  context.team->share_tasks(member, 1, [&](int64_t) {
    for (int64_t i = 0; i < context.step.num_sampled; ++i)
      __builtin_memmove(rows + i * hidden, rows + context.step.sampled_rows[i] * hidden,
                        sizeof(float) * static_cast<size_t>(hidden));
  });
}

template <class Dot>
static void attend(KvnContext& context, int layer, const QueryTiles& queries, bool is_sampled,
                   int member) {
  const int64_t kv_heads = context.model.kv_heads;
  char* scratch = context.scratch_of(member);
  // The last tiles of a prompt see the most keys: they come first.
  constexpr auto kOrder = kvn::TaskOrder::kInterleaved;
  context.team->share_tasks<kOrder>(member, queries.count * kv_heads, [&](int64_t task) {
    const int64_t index = queries.count - 1 - task / kv_heads;
    const QueryTile& tile = queries.tiles[index];
    attend_tile<Dot>({context, layer, task % kv_heads, tile},
                     is_sampled ? index : tile.first_row, scratch);
  });
}

template <class Dot>
static void run_second_half(KvnContext& context, int layer, int member) {
  const KvnModel& model = context.model;
  const KvnLayer& weights = model.layers[layer];
  const bool is_reduced = layer + 1 == model.num_layers && !context.is_all_sampled();
  const int64_t rows = is_reduced ? context.step.num_sampled : context.step.num_rows;
  if (rows == 0) return;
  using X = typename Dot::X;
  attend<Dot>(context, layer, is_reduced ? context.sampled_queries : context.all_queries,
              is_reduced, member);
  if (is_reduced) select_sampled_rows(context, member);
  float* hidden = context.work.hidden.as<float>();
  X *activation = context.work.activation.as<X>(), *inner = context.work.inner.as<X>();
  const auto add_to_hidden = [&](int64_t row, int64_t panel, int panels, const F16* values) {
    float* at = hidden + row * model.hidden;
    for (int c = 0; c < panels; ++c) {
      const int64_t left = model.hidden - (panel + c) * 16;
      const int lanes = left < 16 ? static_cast<int>(left) : 16;
      float* sum = at + (panel + c) * 16;
      store_floats(sum, add(load_floats(sum, lanes), values[c]), lanes);
    }
  };
  share_linear<Dot>(context, member, weights.output, activation, context.activation_stride, rows,
                    add_to_hidden);
  normalize_rows<Dot>(context, member, weights.mlp_norm, rows);
  share_linear<Dot>(context, member, weights.gate_up, activation, context.activation_stride, rows,
                    [&](int64_t row, int64_t panel, int panels, const F16* values) {
                      X* out = inner + row * context.inner_stride + panel / 2 * 16;
                      for (int c = 0; c + 1 < panels; c += 2)
                        Numbers<Dot>::store(out + c / 2 * 16, silu_mul(values[c], values[c + 1]));
                    });
  share_linear<Dot>(context, member, weights.down, inner, context.inner_stride, rows, add_to_hidden);
}

template <class Dot>
static void start_rows(KvnContext& context, int member) {
  const KvnModel& model = context.model;
  const int64_t half = model.head_dim / 2;
  share_rows(*context.team, member, context.step.num_rows, [&](int64_t row) {
    const auto* from = static_cast<const typename Dot::W*>(model.embedding) +
                       context.step.token_ids[row] * model.hidden;
    float* to = context.work.hidden.as<float>() + row * model.hidden;
    for_lanes(model.hidden, [&](int64_t i, int lanes) {
      store_floats(to + i, load_lanes<Dot>(from + i, lanes), lanes);
    });
    const KvnSlice& slice = find_slice(context.step, row);
    const float position = static_cast<float>(slice.position + row - slice.first_row);
    float* angles = context.work.angles.as<float>() + row * model.head_dim;
    for (int64_t i = 0; i < half; ++i) {
      angles[i] = __builtin_cosf(position * model.frequencies[i]);
      angles[half + i] = __builtin_sinf(position * model.frequencies[i]);
    }
  });
}

struct HalvesJob {
  KvnContext* context;
  int first, end;
};

template <class Dot>
static void run_halves_member(void* argument, int member) {
  const HalvesJob& job = *static_cast<HalvesJob*>(argument);
  for (int half = job.first; half < job.end; ++half) {
    if (half % 2 == 0) {
      run_first_half<Dot>(*job.context, half / 2, member);
    } else {
      run_second_half<Dot>(*job.context, half / 2, member);
    }
  }
}

struct LogitsJob {
  KvnContext* context;
  int64_t first, count;
  float* logits;
};

template <class Dot>
static void compute_logits_member(void* argument, int member) {
  const LogitsJob& job = *static_cast<LogitsJob*>(argument);
  KvnContext& context = *job.context;
  const KvnModel& model = context.model;
  using X = typename Dot::X;
  share_rows(*context.team, member, job.count, [&](int64_t row) {
    X* out = context.work.activation.as<X>() + row * context.activation_stride;
    normalize(context.work.hidden.as<float>() + (job.first + row) * model.hidden, model.final_norm,
              model.hidden, model.norm_eps,
              [&](int64_t i, int lanes, F16 value) { store_lanes<Dot>(out + i, value, lanes); });
    for (int64_t i = model.hidden; i < kvn::round_up(model.hidden, 4); ++i) out[i] = 0;
  });
  share_linear<Dot>(context, member, model.head, context.work.activation.as<X>(),
                    context.activation_stride, job.count,
                    [&](int64_t row, int64_t panel, int panels, const F16* values) {
                      store_panels(job.logits + row * model.vocab, model.vocab, panel, panels,
                                   values);
                    });
}

template <class Dot>
static void start_step_member(void* argument, int member) {
  start_rows<Dot>(*static_cast<KvnContext*>(argument), member);
}

static void start_step(KvnContext& context) {
  const bool is_bf16 = context.model.format == KVN_BFLOAT16;
  context.team->run(is_bf16 ? start_step_member<DotBF16> : start_step_member<DotF32>, &context);
}

static void run_halves(KvnContext& context, int first, int end) {
  HalvesJob job{&context, first, end};
  const bool is_bf16 = context.model.format == KVN_BFLOAT16;
  context.team->run(is_bf16 ? run_halves_member<DotBF16> : run_halves_member<DotF32>, &job);
}

static void compute_logits(KvnContext& context, int64_t first, int64_t count, float* logits) {
  LogitsJob job{&context, first, count, logits};
  const bool is_bf16 = context.model.format == KVN_BFLOAT16;
  context.team->run(is_bf16 ? compute_logits_member<DotBF16> : compute_logits_member<DotF32>, &job);
}

struct ProductJob {
  KvnContext* context;
  const KvnLinear* linear;
  const void* x;
  int64_t rows;
  float* out;
};

template <class Dot>
static void multiply_member(void* argument, int member) {
  const ProductJob& job = *static_cast<ProductJob*>(argument);
  KvnContext& context = *job.context;
  using X = typename Dot::X;
  const int64_t in = job.linear->in, out = job.linear->out, stride = kvn::round_up(in, 64);
  X* padded = context.work.inner.as<X>();
  share_rows(*context.team, member, job.rows, [&](int64_t row) {
    X* to = padded + row * stride;
    const auto* from = static_cast<const typename Dot::W*>(job.x) + row * in;
    for_lanes(in, [&](int64_t i, int lanes) {
      store_lanes<Dot>(to + i, load_lanes<Dot>(from + i, lanes), lanes);
    });
    for (int64_t i = in; i < stride; ++i) to[i] = 0;
  });
  share_linear<Dot>(context, member, *job.linear, padded, stride, job.rows,
                    [&](int64_t row, int64_t panel, int panels, const F16* values) {
                      if (!job.linear->is_gated) {
                        store_panels(job.out + row * out, out, panel, panels, values);
                        return;
                      }
                      for (int c = 0; c + 1 < panels; c += 2) {
                        const F16 gated = silu_mul(values[c], values[c + 1]);
                        store_panels(job.out + row * out, out, (panel + c) / 2, 1, &gated);
                      }
                    });
}

static void multiply_rows(KvnContext& context, const KvnLinear& linear, const void* x,
                          int64_t rows, float* out) {
  ProductJob job{&context, &linear, x, rows, out};
  const bool is_bf16 = context.model.format == KVN_BFLOAT16;
  context.team->run(is_bf16 ? multiply_member<DotBF16> : multiply_member<DotF32>, &job);
}

// Of a member that attends for `rows` query rows, or packs rows of `words` words for a product.
static int64_t count_scratch_bytes(const KvnModel& model, int64_t rows, int64_t words) {
  const int64_t float32 = AttentionScratch<DotF32>().place(nullptr, rows, model.head_dim);
  const int64_t bfloat16 = AttentionScratch<DotBF16>().place(nullptr, rows, model.head_dim);
  const int64_t attention = float32 > bfloat16 ? float32 : bfloat16;
  const int64_t inputs = words * 4 / static_cast<int64_t>(sizeof(DotBF16::X));
  const int64_t expanded = kvn::kExpandedPanels * kvn::count_expanded_bytes(inputs);
  int64_t most = attention;
  for (const int64_t bytes : {(kMaxPackedRows * words + 16) * 4, expanded})
    if (bytes > most) most = bytes;
  return most;
}
