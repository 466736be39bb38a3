// What a model computes with: its threads, its buffers and the step in progress.
#pragma once

#include <stdint.h>

#include "core_sharing.h"
#include "kv_model.h"
#include "thread_team.h"

namespace kvn {

// Keys are read in groups of this many positions, counted from the start of the sequence, so that
// sums do not depend on how a sequence is cut into steps.
constexpr int64_t kKeyGroup = 64;
// Query rows (positions times the query heads of one KV head) that one task attends for: the more,
// the fewer times keys are packed. Short steps have more tasks, so that each member gets some.
constexpr int64_t kQueryRows = 192, kFewQueryRows = 96;
constexpr int64_t kPanel = 16;  // output channels that are computed together

static inline constexpr int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }
static inline constexpr int64_t round_up(int64_t a, int64_t b) { return divide_up(a, b) * b; }

// Zero-filled memory that starts on a cache line; large ones on huge pages where possible.
class Buffer {
 public:
  Buffer() = default;
  ~Buffer();
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  // Returns whether there are `bytes`; the contents are lost if the buffer has to grow.
  bool reserve(int64_t bytes);
  template <class T>
  __attribute__((always_inline)) T* as() const {
    return static_cast<T*>(memory_);
  }

 private:
  void* memory_ = nullptr;
  int64_t bytes_ = 0;
};

// Consecutive queries of one sequence that one task attends for.
struct QueryTile {
  int64_t first_row;
  int64_t count;
  int64_t position;
  const int64_t* table;
};

struct QueryTiles {
  QueryTile* tiles = nullptr;
  int64_t count = 0;
};

// Row strides are in elements, and rows are padded with zeros to them.
struct Workspace {
  Buffer hidden;      // float [rows][hidden]
  Buffer activation;  // normed rows, or attended ones: [rows][stride] of Dot::X
  Buffer qkv;         // float [rows][qkv channels]
  Buffer inner;       // SiLU(gate) * up: [rows][inner_stride] of Dot::X
  Buffer angles;      // float [rows][2][head_dim / 2]: cosines, sines
  Buffer quantized;   // uint8 [rows][stride]
  Buffer tiled;       // rows of a product in the order of its tiles, by kernels that have tiles
  Buffer row_scales;  // float [rows]
  Buffer scratch;     // of one member's task: [threads][scratch_bytes]
  Buffer candidates;  // of drawing: float [threads][2][vocab], rounded up
  Buffer tiles;       // QueryTile, of all rows and of sampled rows
};

struct Kernels;

}  // namespace kvn

struct KvnContext {
  KvnModel model = {};
  KvnCache cache = {};
  KvnStep step = {};
  const kvn::Kernels* kernels = nullptr;
  kvn::ThreadTeam* team = nullptr;
  kvn::CoreSharing* sharing = nullptr;  // null: each step uses all threads
  kvn::Workspace work;
  kvn::QueryTiles all_queries;
  kvn::QueryTiles sampled_queries;
  int64_t activation_stride = 0;
  int64_t inner_stride = 0;
  int64_t scratch_bytes = 0;
  bool has_int8 = false;

  __attribute__((always_inline)) char* scratch_of(int member) const {
    return work.scratch.as<char>() + member * scratch_bytes;
  }
  // All rows pass through the last layer.
  __attribute__((always_inline)) bool is_all_sampled() const { return step.num_sampled == step.num_rows; }
};

namespace kvn {

// The kernels of one instruction set.
struct Kernels {
  void (*start_step)(KvnContext& context);
  void (*run_halves)(KvnContext& context, int first, int end);
  void (*compute_logits)(KvnContext& context, int64_t first, int64_t count, float* logits);
  void (*multiply)(KvnContext& context, const KvnLinear& linear, const void* x, int64_t rows,
                   float* out);
  int64_t (*count_scratch_bytes)(const KvnModel& model, int64_t rows, int64_t words);
  // Of Workspace::tiled, for rows of so many bytes.
  int64_t (*count_tiled_bytes)(int64_t rows, int64_t row_bytes);
  void (*pick_tokens)(KvnContext& context, float* logits, int64_t rows, const KvnDraw* draws,
                      int64_t* tokens);
  int64_t bf16_row_bytes;  // of a number in the rows of a model in bfloat16
};

extern const Kernels amx_kernels;
extern const Kernels avx512_kernels;
extern const Kernels avx512_widened_kernels;
extern const Kernels avx2_kernels;

}  // namespace kvn
