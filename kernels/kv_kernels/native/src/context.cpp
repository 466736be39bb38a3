#include "context.h"

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

#include <initializer_list>
#include <new>

namespace kvn {
namespace {

constexpr int64_t kHugePage = 2 << 20;
// After so many halves of layers a step looks again which cores it may use: half a layer of a prompt
// may last as long as a decode step of another node.
constexpr int32_t kHalvesBetweenLooks = 8, kHalvesOfLongStep = 1;
constexpr int64_t kLongStepRows = 64;

// Of a number in the rows that are multiplied.
int64_t count_row_value_bytes(const KvnContext& context) {
  return context.model.format == KVN_FLOAT32 ? 4 : context.kernels->bf16_row_bytes;
}

bool is_int8(const KvnModel& model) {
  for (int32_t i = 0; i < model.num_layers; ++i) {
    const KvnLayer& layer = model.layers[i];
    for (const KvnLinear* linear : {&layer.qkv, &layer.output, &layer.gate_up, &layer.down})
      if (linear->format == KVN_INT8) return true;
  }
  return model.head.format == KVN_INT8;
}

const Kernels* choose_kernels(uint32_t features) {
  if ((features & KVN_AMX_ALL) == KVN_AMX_ALL) return &amx_kernels;
  if ((features & KVN_AVX512_ALL) == KVN_AVX512_ALL && !(features & KVN_SLOW_BF16))
    return &avx512_kernels;
  if ((features & KVN_AVX512_VNNI_ALL) == KVN_AVX512_VNNI_ALL) return &avx512_widened_kernels;
  if (features & KVN_AVX2) return &avx2_kernels;
  return nullptr;
}

int64_t count_heads_per_kv(const KvnModel& model) { return model.heads / model.kv_heads; }

// Positions of one sequence that one task attends for.
int64_t count_tile_positions(const KvnModel& model, int64_t query_rows) {
  const int64_t positions = query_rows / count_heads_per_kv(model);
  return positions > 0 ? positions : 1;
}

// As count_tile_positions, for a step. A task computes the scores of all keys that its last query
// sees: with few heads for a KV head, long tasks have more positions that do not see them.
int64_t choose_tile_positions(const KvnContext& context) {
  constexpr int64_t kTasksPerMember = 4, kManyHeads = 4;
  const KvnModel& model = context.model;
  const int64_t longest = count_tile_positions(model, kQueryRows);
  const int64_t tasks = context.step.num_rows / longest * model.kv_heads;
  return count_heads_per_kv(model) >= kManyHeads && tasks >= kTasksPerMember * context.team->size()
             ? longest
             : count_tile_positions(model, kFewQueryRows);
}

bool reserve_buffers(KvnContext& context, int64_t rows) {
  const KvnModel& model = context.model;
  Workspace& work = context.work;
  const int64_t size = count_row_value_bytes(context);
  const int64_t channels = (model.heads + 2 * model.kv_heads) * model.head_dim;
  const int64_t widest = context.inner_stride > context.activation_stride
                             ? context.inner_stride
                             : context.activation_stride;
  return work.hidden.reserve(rows * model.hidden * 4) && work.qkv.reserve(rows * channels * 4) &&
         work.activation.reserve(rows * context.activation_stride * size) &&
         work.inner.reserve(rows * context.inner_stride * size) &&
         work.angles.reserve(rows * model.head_dim * 4) &&
         work.tiled.reserve(context.kernels->count_tiled_bytes(rows, widest * size)) &&
         (!context.has_int8 || (work.quantized.reserve(rows * round_up(widest, 64)) &&
                                work.row_scales.reserve(rows * 4)));
}

// Memory of each member: for attention, and for the rows of a product with `in` inputs.
bool reserve_scratch(KvnContext& context, int64_t in) {
  const KvnModel& model = context.model;
  const int64_t rows = count_tile_positions(model, kQueryRows) * count_heads_per_kv(model);
  const int64_t words = round_up(in, 4) * count_row_value_bytes(context) / 4;  // of whole steps
  const int64_t bytes = round_up(context.kernels->count_scratch_bytes(model, rows, words), 4096);
  if (bytes > context.scratch_bytes) context.scratch_bytes = bytes;
  return context.work.scratch.reserve(context.scratch_bytes * context.team->size());
}

bool is_valid(const KvnContext& context, const KvnStep& step) {
  const int64_t size = context.cache.block_size;
  int64_t row = 0;
  for (int64_t i = 0; i < step.num_slices; ++i) {
    const KvnSlice& slice = step.slices[i];
    const int64_t entries = divide_up(slice.position + slice.num_rows, size);
    if (slice.first_row != row || slice.num_rows < 1 || slice.position < 0 ||
        slice.table_begin < 0 || slice.table_length < entries ||
        slice.table_begin + slice.table_length > step.num_table_entries)
      return false;
    for (int64_t entry = 0; entry < entries; ++entry) {
      const int64_t block = step.block_tables[slice.table_begin + entry];
      if (block < 0 || block >= context.cache.num_blocks) return false;
    }
    row += slice.num_rows;
  }
  for (int64_t i = 0; i < step.num_rows; ++i)
    if (step.token_ids[i] < 0 || step.token_ids[i] >= context.model.vocab) return false;
  for (int64_t i = 0; i < step.num_sampled; ++i) {
    const int64_t before = i == 0 ? -1 : step.sampled_rows[i - 1];
    if (step.sampled_rows[i] <= before || step.sampled_rows[i] >= step.num_rows) return false;
  }
  return row == step.num_rows && row > 0;
}

// Cut the slices into tiles. Returns false without memory.
bool plan_queries(KvnContext& context) {
  const KvnStep& step = context.step;
  const int64_t each = choose_tile_positions(context);
  const int64_t most = step.num_slices + step.num_rows / each + step.num_sampled;
  if (!context.work.tiles.reserve(most * static_cast<int64_t>(sizeof(QueryTile)))) return false;
  QueryTile* tiles = context.work.tiles.as<QueryTile>();
  context.all_queries = {tiles, 0};
  for (int64_t i = 0; i < step.num_slices; ++i) {
    const KvnSlice& slice = step.slices[i];
    for (int64_t done = 0; done < slice.num_rows; done += each) {
      const int64_t left = slice.num_rows - done;
      tiles[context.all_queries.count++] = {slice.first_row + done, left < each ? left : each,
                                            slice.position + done,
                                            step.block_tables + slice.table_begin};
    }
  }
  context.sampled_queries = {tiles + context.all_queries.count, step.num_sampled};
  int64_t slice = 0;
  for (int64_t i = 0; i < step.num_sampled; ++i) {
    const int64_t row = step.sampled_rows[i];
    while (step.slices[slice].first_row + step.slices[slice].num_rows <= row) ++slice;
    const KvnSlice& found = step.slices[slice];
    context.sampled_queries.tiles[i] = {row, 1, found.position + row - found.first_row,
                                        step.block_tables + found.table_begin};
  }
  return true;
}

// Let the team use the cores that are this step's now.
void use_shared_cores(KvnContext& context) {
  if (context.sharing != nullptr) context.team->use_members(context.sharing->choose_num_threads());
}

}  // namespace

Buffer::~Buffer() {
  if (memory_ != nullptr) munmap(memory_, static_cast<size_t>(bytes_));
}

bool Buffer::reserve(int64_t bytes) {
  if (bytes <= bytes_) return true;
  const int64_t wanted = round_up(bytes + 64, bytes >= kHugePage ? kHugePage : 4096);
  void* found = mmap(nullptr, static_cast<size_t>(wanted), PROT_READ | PROT_WRITE,
                     MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (found == MAP_FAILED) return false;
  if (wanted >= kHugePage) madvise(found, static_cast<size_t>(wanted), MADV_HUGEPAGE);
  if (memory_ != nullptr) munmap(memory_, static_cast<size_t>(bytes_));
  memory_ = found;
  bytes_ = wanted;
  return true;
}

}  // namespace kvn

using kvn::reserve_buffers;

KvnContext* kvn_create(const KvnModel* model, int32_t threads) {
  const kvn::Kernels* kernels = kvn::choose_kernels(kvn_cpu_features());
  if (kernels == nullptr || threads < 1 || model->heads % model->kv_heads) return nullptr;
  KvnContext* context = new (std::nothrow) KvnContext();
  if (context == nullptr) return nullptr;
  context->model = *model;
  context->kernels = kernels;
  context->has_int8 = kvn::is_int8(*model);
  const int64_t attended = model->heads * model->head_dim;
  const int64_t widest = attended > model->hidden ? attended : model->hidden;
  context->activation_stride = kvn::round_up(widest, 16);
  context->inner_stride = kvn::round_up(model->intermediate, 16);
  context->team = kvn::ThreadTeam::create(threads);
  const int64_t most_inputs = context->activation_stride > context->inner_stride
                                  ? context->activation_stride
                                  : context->inner_stride;
  if (context->team != nullptr && kvn::reserve_scratch(*context, most_inputs)) return context;
  kvn_destroy(context);
  return nullptr;
}

void kvn_destroy(KvnContext* context) {
  if (context == nullptr) return;
  delete context->sharing;
  delete context->team;
  delete context;
}

void kvn_bind_cache(KvnContext* context, const KvnCache* cache) { context->cache = *cache; }

int32_t kvn_share_cores(KvnContext* context, void* page, int32_t slot, int32_t cores) {
  if (slot < 0 || slot >= kvn::kSharingSlots || cores < 1 || context->sharing != nullptr)
    return KVN_BAD_ARGUMENT;
  auto* mapped = static_cast<kvn::SharingPage*>(page);
  context->sharing = new (std::nothrow) kvn::CoreSharing(mapped, slot, cores);
  return context->sharing == nullptr ? KVN_OUT_OF_MEMORY : KVN_OK;
}

int32_t kvn_begin_step(KvnContext* context, const KvnStep* step) {
  if (context->cache.arena == nullptr || !kvn::is_valid(*context, *step)) return KVN_BAD_ARGUMENT;
  context->step = *step;
  if (!reserve_buffers(*context, step->num_rows) || !kvn::plan_queries(*context))
    return KVN_OUT_OF_MEMORY;
  kvn::use_shared_cores(*context);
  context->kernels->start_step(*context);
  return KVN_OK;
}

void kvn_end_step(KvnContext* context) {
  if (context->sharing != nullptr) context->sharing->end_step();
}

int32_t kvn_run_halves(KvnContext* context, int32_t first, int32_t end, int64_t* ended_ns) {
  if (first < 0 || end > 2 * context->model.num_layers) return KVN_BAD_ARGUMENT;
  const int32_t halves = context->sharing == nullptr                    ? end - first
                         : context->step.num_rows < kvn::kLongStepRows ? kvn::kHalvesBetweenLooks
                                                                       : kvn::kHalvesOfLongStep;
  for (int32_t half = first; half < end; half += halves) {
    kvn::use_shared_cores(*context);
    const int32_t next = half + halves;
    context->kernels->run_halves(*context, half, next < end ? next : end);
  }
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  *ended_ns = int64_t{now.tv_sec} * 1'000'000'000 + now.tv_nsec;
  return KVN_OK;
}

int32_t kvn_compute_logits(KvnContext* context, int64_t first, int64_t count, float* logits) {
  const int64_t available =
      context->is_all_sampled() ? context->step.num_rows : context->step.num_sampled;
  if (first < 0 || count < 1 || first + count > available) return KVN_BAD_ARGUMENT;
  kvn::use_shared_cores(*context);
  context->kernels->compute_logits(*context, first, count, logits);
  return KVN_OK;
}

int32_t kvn_pick_tokens(KvnContext* context, float* logits, int64_t rows, const KvnDraw* draws,
                        int64_t* tokens) {
  if (rows < 1) return KVN_BAD_ARGUMENT;
  const int64_t floats = 2 * kvn::round_up(context->model.vocab, 16);
  if (!context->work.candidates.reserve(floats * 4 * context->team->size()))
    return KVN_OUT_OF_MEMORY;
  context->kernels->pick_tokens(*context, logits, rows, draws, tokens);
  return KVN_OK;
}

int32_t kvn_multiply(KvnContext* context, const KvnLinear* linear, const void* x, int64_t rows,
                     float* out) {
  if (rows < 1 || linear->in < 1 || linear->out < 1) return KVN_BAD_ARGUMENT;
  if (linear->format == KVN_COMPACT_BFLOAT16 && context->model.format != KVN_BFLOAT16)
    return KVN_BAD_ARGUMENT;
  kvn::Workspace& work = context->work;
  const int64_t stride = kvn::round_up(linear->in, 64);
  if (!work.inner.reserve(rows * stride * 4) || !work.quantized.reserve(rows * stride) ||
      !work.row_scales.reserve(rows * 4) || !kvn::reserve_scratch(*context, linear->in) ||
      !work.tiled.reserve(context->kernels->count_tiled_bytes(rows, stride * 4)))
    return KVN_OUT_OF_MEMORY;
  context->kernels->multiply(*context, *linear, x, rows, out);
  return KVN_OK;
}
