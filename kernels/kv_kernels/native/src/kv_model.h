// The forward pass of a model, in C. Every structure is filled by the caller, who keeps
// what it points to alive; nothing here allocates for the caller or throws.
#pragma once

#include "kv_native.h"

// How the numbers of a matrix or of the KV cache are stored.
enum KvnFormat {
  KVN_FLOAT32 = 0,
  KVN_BFLOAT16 = 1,
  KVN_INT8 = 2,
  KVN_COMPACT_BFLOAT16 = 3,  // of a matrix: see compact_panel.h
};

enum KvnStatus {
  KVN_OK = 0,
  KVN_OUT_OF_MEMORY = 1,
  KVN_BAD_ARGUMENT = 2,
  KVN_INCOMPRESSIBLE = 3,  // too many exponents for KVN_COMPACT_BFLOAT16
};

// A matrix packed by kvn_pack_*: panels of 16 output channels, each [in / s][16][s], where s is 1
// for float32, 2 for bfloat16 and 4 for int8; or as compact_panel.h says. In a gated matrix the panels of gate and up take
// turns. Arrays by output channel are in the order of the panels, and padded like them.
struct KvnLinear {
  const void* weights;
  const float* bias;            // NULL for none
  const float* scales;          // int8: of each output channel
  const int32_t* channel_sums;  // int8: sum of the quantized weights of each output channel
  int64_t in;
  int64_t out;  // of a gated matrix: channels of the gate
  int32_t format;
  int32_t is_gated;
};

struct KvnLayer {
  const float* attention_norm;  // [hidden]
  const float* qk_norm;         // [heads + kv_heads][head_dim], or NULL
  const float* mlp_norm;        // [hidden]
  KvnLinear qkv;
  KvnLinear output;
  KvnLinear gate_up;
  KvnLinear down;
  int64_t window;  // tokens that a query attends to; 0 for all
};

struct KvnModel {
  int32_t format;  // of activations: KVN_FLOAT32 or KVN_BFLOAT16
  int32_t num_layers;
  int64_t hidden;
  int64_t intermediate;
  int64_t heads;
  int64_t kv_heads;
  int64_t head_dim;
  int64_t vocab;
  float norm_eps;
  const float* frequencies;  // [head_dim / 2], radians per position
  const void* embedding;     // [vocab][hidden] in `format`
  const float* final_norm;   // [hidden]
  const KvnLayer* layers;    // [num_layers]
  KvnLinear head;
};

// The paged cache: [blocks][layers][2][kv_heads][block_size] rows of head_dim numbers, which in int8
// are followed by the float32 scale of the row.
struct KvnCache {
  void* arena;
  int64_t num_blocks;
  int64_t block_size;
  int32_t format;  // the model's, or KVN_INT8
};

// Consecutive rows of a step: tokens of one sequence from `position` on.
struct KvnSlice {
  int64_t first_row;
  int64_t num_rows;
  int64_t position;
  int64_t table_begin;  // of its blocks in `block_tables`
  int64_t table_length;
};

struct KvnStep {
  const int64_t* token_ids;  // [num_rows]
  int64_t num_rows;
  const KvnSlice* slices;  // [num_slices], which cover the rows in their order
  int64_t num_slices;
  const int64_t* block_tables;  // [num_table_entries]
  int64_t num_table_entries;
  const int64_t* sampled_rows;  // [num_sampled], ascending: rows computed to the end
  int64_t num_sampled;
};

struct KvnContext;

// A model with its threads and buffers, for the features that kvn_cpu_features() has now. Returns
// NULL if there is no memory, no further thread or no kernel for these features.
KVN_EXPORT KvnContext* kvn_create(const KvnModel* model, int32_t threads);
KVN_EXPORT void kvn_destroy(KvnContext* context);
KVN_EXPORT void kvn_bind_cache(KvnContext* context, const KvnCache* cache);

// Share `cores` cores with other nodes of this host: a step uses as many of the threads as are its
// part. `page` is one that all of them map, zeros at first, and lives as long as the context. No
// other living node may have the same slot. See core_sharing.h.
KVN_EXPORT int32_t kvn_share_cores(KvnContext* context, void* page, int32_t slot, int32_t cores);

// Start a step: check it, look its tokens up. The step and what it points to have to live until the
// last call for it. Not thread-safe, as all calls with one context.
KVN_EXPORT int32_t kvn_begin_step(KvnContext* context, const KvnStep* step);

// The step has ended or failed: others may have its cores.
KVN_EXPORT void kvn_end_step(KvnContext* context);

// Compute halves of layers, from `first` to before `end`. Half 2 i of layer i ends with its KV in
// the cache, half 2 i + 1 with its output. After the last half, sampled rows alone are left.
// `ended_ns` gets the time of CLOCK_MONOTONIC at which they were computed, in nanoseconds.
KVN_EXPORT int32_t kvn_run_halves(KvnContext* context, int32_t first, int32_t end,
                                  int64_t* ended_ns);

// Logits [count][vocab] of sampled rows from `first` on.
KVN_EXPORT int32_t kvn_compute_logits(KvnContext* context, int64_t first, int64_t count,
                                      float* logits);

// How a token is drawn: softmax(logits / temperature), restricted by min_p, top_k and top_p in this
// order, with noise that depends on seed, position, choice and token alone.
struct KvnDraw {
  double top_p;       // 1: all
  uint64_t seed;
  int64_t top_k;      // 0: all
  float temperature;  // 0: the greatest logit
  float min_logit;    // logarithm of min_p; minus infinity: all
  uint32_t position;
  uint32_t choice;
};

// Draw a token for each row of logits [rows][vocab], which are overwritten. A token is -1 if the
// greatest logit of its row is not finite.
KVN_EXPORT int32_t kvn_pick_tokens(KvnContext* context, float* logits, int64_t rows,
                                   const KvnDraw* draws, int64_t* tokens);

// The product of `rows` rows [rows][in] in the model's format with one matrix: [rows][out] floats,
// for a gated matrix SiLU(gate) * up. As a forward pass computes it, without one.
KVN_EXPORT int32_t kvn_multiply(KvnContext* context, const KvnLinear* linear, const void* x,
                                int64_t rows, float* out);

// Packing. `weight` is [out][in] in `source_format` (KVN_FLOAT32 or KVN_BFLOAT16), rows `stride`
// elements apart. Its row i becomes channel i % 16 of panel first_panel + i / 16 * panel_step.
struct KvnPack {
  const void* weight;
  int64_t out;
  int64_t in;
  int32_t source_format;
  int32_t format;
  int64_t first_panel;
  int64_t panel_step;
  void* packed;
  float* scales;          // int8
  int32_t* channel_sums;  // int8
};
KVN_EXPORT int32_t kvn_pack(const KvnPack* pack);
KVN_EXPORT int64_t kvn_panel_bytes(int64_t in, int32_t format);
