// Forward passes of a small model with odd shapes, in all formats and instruction sets: what they
// read and write stays inside their memory, threads do not race, and a sequence's result depends
// on nothing but the sequence.
#include <cstring>
#include <deque>
#include <memory>
#include <random>
#include <vector>

#include "check.h"
#include "context.h"
#include "kv_model.h"

namespace {

constexpr int64_t kHidden = 38, kInner = 27, kVocab = 53;
constexpr int64_t kBlocks = 40, kLayers = 2;

struct AttentionShape {
  int64_t heads, kv_heads, dim, block_size;
  int64_t window = 70;  // of every other layer
};
// Of many heads for each KV head, small ones, attention needs most memory beside the products.
constexpr AttentionShape kOddShape = {46, 2, 10, 5};
// With AMX, up to 16 rows of these are multiplied by keys where they lie.
constexpr AttentionShape kTileShapes[] = {
    {14, 2, 64, 16, 200}, {16, 1, 96, 48, 230}, {2, 2, 32, 64, 250}, {2, 2, 64, 32, 250}};

// Each makes the library choose other kernels, if the CPU has their instructions.
constexpr uint32_t kFeatureSets[] = {~0u, KVN_AVX512_ALL, KVN_AVX512_VNNI_ALL, KVN_AVX2};

int64_t count_panels(int64_t out, bool is_gated) { return (out + 15) / 16 * (is_gated ? 2 : 1); }

// A model with random weights, and all memory that it points to.
class TestModel {
 public:
  TestModel(int32_t format, int32_t matrix_format, bool has_bias,
            const AttentionShape& shape = kOddShape)
      : random_(7), format_(format), matrix_format_(matrix_format), has_bias_(has_bias) {
    const int64_t heads = shape.heads, kv_heads = shape.kv_heads, dim = shape.dim;
    layers_.resize(kLayers);
    for (int64_t i = 0; i < kLayers; ++i) {
      KvnLayer& layer = layers_[static_cast<size_t>(i)];
      const int64_t channels = (heads + 2 * kv_heads) * dim;
      layer.attention_norm = draw(kHidden);
      layer.qk_norm = i % 2 ? draw((heads + kv_heads) * dim) : nullptr;
      layer.mlp_norm = draw(kHidden);
      layer.qkv = pack(channels, kHidden, false);
      layer.output = pack(kHidden, heads * dim, false);
      layer.gate_up = pack(kInner, kHidden, true);
      layer.down = pack(kHidden, kInner, false);
      layer.window = i % 2 ? 0 : shape.window;
    }
    model.format = format;
    model.num_layers = kLayers;
    model.hidden = kHidden;
    model.intermediate = kInner;
    model.heads = heads;
    model.kv_heads = kv_heads;
    model.head_dim = dim;
    model.vocab = kVocab;
    model.norm_eps = 1e-5f;
    model.frequencies = draw(dim / 2);
    model.final_norm = draw(kHidden);
    model.layers = layers_.data();
    model.embedding = draw_numbers(kVocab * kHidden);
    model.head = pack(kVocab, kHidden, false);
  }

  KvnModel model = {};

 private:
  const float* draw(int64_t count) {
    std::normal_distribution<float> normal(0.5f, 0.5f);
    floats_.emplace_back();
    for (int64_t i = 0; i < count; ++i) floats_.back().push_back(normal(random_));
    return floats_.back().data();
  }

  // In the model's format.
  const void* draw_numbers(int64_t count) {
    const float* values = draw(count);
    if (format_ == KVN_FLOAT32) return values;
    halves_.emplace_back(static_cast<size_t>(count));
    for (int64_t i = 0; i < count; ++i) {
      uint32_t bits;
      std::memcpy(&bits, values + i, sizeof bits);
      halves_.back()[static_cast<size_t>(i)] = static_cast<uint16_t>(bits >> 16);
    }
    return halves_.back().data();
  }

  KvnLinear pack(int64_t out, int64_t in, bool is_gated) {
    const int64_t panels = count_panels(out, is_gated);
    const int64_t bytes = panels * kvn_panel_bytes(in, matrix_format_);
    KvnLinear linear = {};
    // Aligned as the packed weights of a node are, and exact in size, so that a stray read is found.
    auto* packed = static_cast<char*>(std::aligned_alloc(64, static_cast<size_t>(bytes)));
    std::memset(packed, 0, static_cast<size_t>(bytes));
    memory_.push_back(packed);
    scales_.emplace_back(static_cast<size_t>(panels * 16));
    sums_.emplace_back(static_cast<size_t>(panels * 16));
    for (int part = 0; part < (is_gated ? 2 : 1); ++part) {
      KvnPack pack = {};
      pack.weight = draw(out * in);
      pack.out = out;
      pack.in = in;
      pack.source_format = KVN_FLOAT32;
      pack.format = matrix_format_;
      pack.first_panel = part;
      pack.panel_step = is_gated ? 2 : 1;
      pack.packed = packed;
      pack.scales = scales_.back().data();
      pack.channel_sums = sums_.back().data();
      CHECK(kvn_pack(&pack) == KVN_OK);
    }
    linear.weights = packed;
    linear.bias = has_bias_ ? draw(panels * 16) : nullptr;
    linear.scales = scales_.back().data();
    linear.channel_sums = sums_.back().data();
    linear.in = in;
    linear.out = out;
    linear.format = matrix_format_;
    linear.is_gated = is_gated;
    return linear;
  }

 public:
  ~TestModel() {
    for (char* packed : memory_) std::free(packed);
  }
  TestModel(const TestModel&) = delete;
  TestModel& operator=(const TestModel&) = delete;

 private:
  std::mt19937 random_;
  int32_t format_, matrix_format_;
  bool has_bias_;
  std::deque<std::vector<float>> floats_;
  std::deque<std::vector<uint16_t>> halves_;
  std::deque<std::vector<float>> scales_;
  std::deque<std::vector<int32_t>> sums_;
  std::vector<char*> memory_;
  std::vector<KvnLayer> layers_;
};

// Part of a sequence: `count` tokens from `position` on, in the blocks of `sequence`.
struct Part {
  int64_t sequence, position, count;
};

std::vector<float> run_step(KvnContext* context, const std::vector<Part>& parts, bool by_halves) {
  const int64_t block_size = context->cache.block_size;
  std::vector<int64_t> tokens, tables, sampled;
  std::vector<KvnSlice> slices;
  for (const Part& part : parts) {
    const int64_t entries = (part.position + part.count + block_size - 1) / block_size;
    slices.push_back({static_cast<int64_t>(tokens.size()), part.count, part.position,
                      static_cast<int64_t>(tables.size()), entries});
    for (int64_t i = 0; i < entries; ++i) tables.push_back(part.sequence * 20 + 19 - i);
    for (int64_t i = 0; i < part.count; ++i)
      tokens.push_back((part.sequence * 31 + (part.position + i) * 7) % kVocab);
    sampled.push_back(static_cast<int64_t>(tokens.size()) - 1);
  }
  KvnStep step = {};
  step.token_ids = tokens.data();
  step.num_rows = static_cast<int64_t>(tokens.size());
  step.slices = slices.data();
  step.num_slices = static_cast<int64_t>(slices.size());
  step.block_tables = tables.data();
  step.num_table_entries = static_cast<int64_t>(tables.size());
  step.sampled_rows = sampled.data();
  step.num_sampled = static_cast<int64_t>(sampled.size());
  CHECK(kvn_begin_step(context, &step) == KVN_OK);
  int64_t ended_ns = 0;
  for (int half = 0; by_halves && half < 2 * kLayers; ++half) {
    const int64_t before = ended_ns;
    CHECK(kvn_run_halves(context, half, half + 1, &ended_ns) == KVN_OK);
    CHECK(ended_ns > before);
  }
  if (!by_halves) CHECK(kvn_run_halves(context, 0, 2 * kLayers, &ended_ns) == KVN_OK);
  std::vector<float> logits(sampled.size() * kVocab);
  CHECK(kvn_compute_logits(context, 0, step.num_sampled, logits.data()) == KVN_OK);
  return logits;
}

// Memory for a cache of kBlocks blocks.
std::vector<char> make_arena(const AttentionShape& shape, int64_t value_bytes,
                             int64_t scale_bytes = 0) {
  const int64_t row_bytes = shape.dim * value_bytes + scale_bytes;
  return std::vector<char>(static_cast<size_t>(kBlocks * kLayers * 2 * shape.kv_heads *
                                               shape.block_size * row_bytes));
}

void check_sequences(int32_t format, int32_t matrix_format, bool has_bias, bool has_int8_kv) {
  TestModel test(format, matrix_format, has_bias);
  const int64_t value_bytes = has_int8_kv ? 1 : format == KVN_FLOAT32 ? 4 : 2;
  std::vector<char> arena = make_arena(kOddShape, value_bytes, has_int8_kv ? 4 : 0);
  const KvnCache cache = {arena.data(), kBlocks, kOddShape.block_size,
                          has_int8_kv ? static_cast<int32_t>(KVN_INT8) : format};
  std::vector<float> expected;
  for (const int threads : {1, 3}) {
    KvnContext* context = kvn_create(&test.model, threads);
    CHECK(context != nullptr);
    kvn_bind_cache(context, &cache);
    const std::vector<float> whole = run_step(context, {{0, 0, 93}}, false);
    CHECK(whole.size() == static_cast<size_t>(kVocab));
    if (expected.empty()) expected = whole;
    CHECK(whole == expected);
    run_step(context, {{0, 0, 30}, {1, 0, 9}}, true);
    run_step(context, {{1, 9, 1}, {0, 30, 62}}, false);
    const std::vector<float> last = run_step(context, {{0, 92, 1}, {1, 10, 14}}, true);
    CHECK(std::vector<float>(last.begin(), last.begin() + kVocab) == expected);
    kvn_destroy(context);
  }
}

// Chunks of one to three tokens, and of 33, behind hundreds, with whole and partial panels of keys.
// With 33 rows, more tiles are multiplied beside the last row than one at a time.
void check_few_queries_behind_many_keys(const AttentionShape& shape) {
  TestModel test(KVN_BFLOAT16, KVN_BFLOAT16, false, shape);
  std::vector<char> arena = make_arena(shape, 2);
  const KvnCache cache = {arena.data(), kBlocks, shape.block_size, KVN_BFLOAT16};
  KvnContext* context = kvn_create(&test.model, 2);
  kvn_bind_cache(context, &cache);
  for (const int64_t length : {192, 193, 209, 224, 225, 256, 257, 300}) {
    const std::vector<float> whole = run_step(context, {{0, 0, length}}, false);
    std::memset(arena.data(), 0, arena.size());
    run_step(context, {{0, 0, 180}}, false);
    std::vector<float> found;
    for (int64_t begin = 180, count = 1; begin < length; begin += count) {
      count = count % 3 + 1 < length - begin ? count % 3 + 1 : length - begin;
      found = run_step(context, {{0, begin, count}}, false);
    }
    CHECK(found == whole);
    run_step(context, {{0, 0, length - 33}}, false);
    CHECK(run_step(context, {{0, length - 33, 33}}, false) == whole);
  }
  kvn_destroy(context);
}

void check_all_instruction_sets(int32_t format, int32_t matrix_format, bool has_bias) {
  for (const uint32_t features : kFeatureSets) {
    kvn_limit_cpu_features(features);
    for (const bool has_int8_kv : {false, true})
      if (kvn_cpu_features()) check_sequences(format, matrix_format, has_bias, has_int8_kv);
  }
  kvn_limit_cpu_features(~0u);
}

}  // namespace

TEST(a_sequence_is_computed_in_float32) {
  check_all_instruction_sets(KVN_FLOAT32, KVN_FLOAT32, true);
}
TEST(a_sequence_is_computed_in_bfloat16) {
  check_all_instruction_sets(KVN_BFLOAT16, KVN_BFLOAT16, false);
}
TEST(a_sequence_is_computed_with_compact_weights) {
  check_all_instruction_sets(KVN_BFLOAT16, KVN_COMPACT_BFLOAT16, true);
}
TEST(few_queries_get_the_scores_of_a_prompt) {
  for (const uint32_t features : kFeatureSets) {
    kvn_limit_cpu_features(features);
    for (const AttentionShape& shape : kTileShapes)
      if (kvn_cpu_features()) check_few_queries_behind_many_keys(shape);
  }
  kvn_limit_cpu_features(~0u);
}
TEST(a_sequence_is_computed_in_int8) { check_all_instruction_sets(KVN_FLOAT32, KVN_INT8, true); }
TEST(a_sequence_is_computed_in_int8_and_bfloat16) {
  check_all_instruction_sets(KVN_BFLOAT16, KVN_INT8, false);
}

TEST(tokens_do_not_depend_on_threads_or_other_rows) {
  TestModel test(KVN_FLOAT32, KVN_FLOAT32, false);
  std::mt19937 random(3);
  std::normal_distribution<float> normal(0.0f, 2.0f);
  std::vector<float> logits(6 * kVocab);
  for (float& logit : logits) logit = normal(random);
  std::vector<KvnDraw> draws(6, KvnDraw{1.0, 1, 0, 1.0f, -1e30f, 2, 3});
  draws[1].temperature = 0.0f;
  draws[2].top_k = 5;
  draws[3].top_p = 0.7;
  draws[4].min_logit = -1.0f;
  for (const uint32_t features : kFeatureSets) {
    kvn_limit_cpu_features(features);
    std::vector<int64_t> expected(6), found(6);
    KvnContext* alone = kvn_create(&test.model, 1);
    KvnContext* team = kvn_create(&test.model, 3);
    std::vector<float> rows = logits, again = logits;
    for (size_t i = 0; i < draws.size(); ++i)
      CHECK(kvn_pick_tokens(alone, &rows[i * kVocab], 1, &draws[i], &expected[i]) == KVN_OK);
    CHECK(kvn_pick_tokens(team, again.data(), 6, draws.data(), found.data()) == KVN_OK);
    CHECK(found == expected);
    CHECK(found[0] >= 0 && found[0] < kVocab);
    kvn_destroy(alone);
    kvn_destroy(team);
  }
  kvn_limit_cpu_features(~0u);
}

TEST(a_step_uses_its_part_of_shared_cores) {
  TestModel test(KVN_FLOAT32, KVN_FLOAT32, false);
  std::vector<char> arena = make_arena(kOddShape, 4);
  const KvnCache cache = {arena.data(), kBlocks, kOddShape.block_size, KVN_FLOAT32};
  auto page = std::make_unique<kvn::SharingPage>();
  KvnContext* context = kvn_create(&test.model, 3);
  KvnContext* other = kvn_create(&test.model, 1);
  kvn_bind_cache(context, &cache);
  const std::vector<float> expected = run_step(context, {{0, 0, 93}}, false);
  CHECK(context->team->num_used() == 3);
  CHECK(kvn_share_cores(context, page.get(), kvn::kSharingSlots, 4) == KVN_BAD_ARGUMENT);
  CHECK(kvn_share_cores(context, page.get(), 0, 4) == KVN_OK);
  CHECK(kvn_share_cores(context, page.get(), 1, 4) == KVN_BAD_ARGUMENT);
  CHECK(kvn_share_cores(other, page.get(), 1, 4) == KVN_OK);
  CHECK(run_step(context, {{0, 0, 93}}, false) == expected);
  CHECK(context->team->num_used() == 3);  // of 4 cores
  other->sharing->choose_num_threads();
  CHECK(run_step(context, {{0, 0, 93}}, false) == expected);
  CHECK(context->team->num_used() == 2);
  page->slots[1].busy_until = 0;
  CHECK(run_step(context, {{0, 0, 9}}, false).size() == static_cast<size_t>(kVocab));
  CHECK(context->team->num_used() == 3);
  kvn_end_step(context);
  kvn_destroy(context);
  CHECK(page->slots[0].busy_until == 0);
  kvn_destroy(other);
}

TEST(threads_end_with_their_context) {
  TestModel test(KVN_FLOAT32, KVN_FLOAT32, false);
  for (int i = 0; i < 20; ++i) {
    KvnContext* context = kvn_create(&test.model, 1 + i % 4);
    CHECK(context != nullptr);
    kvn_destroy(context);
  }
}
