// How a panel of a matrix in KVN_COMPACT_BFLOAT16 lies in memory: bfloat16 without loss, in 12 bits
// a weight. Sign and mantissa take 8 bits, and 4 bits say which of the panel's 16 most frequent
// exponents a weight has. The few weights with another exponent are listed.
#pragma once

#include <stdint.h>

#include "context.h"

namespace kvn {

constexpr int64_t kBlockSteps = 16;  // steps that are expanded together
constexpr int64_t kBlockWeights = kBlockSteps * 2 * kPanel;
constexpr int64_t kBlockBytes = kBlockWeights * 3 / 2;
constexpr uint16_t kExponentBits = 0x7f80;

// What precedes the blocks of a panel. Of four consecutive steps, a block has 192 bytes: for two
// steps at a time, [16 channels][2 inputs] words with sign and mantissa of the first step in their
// bits of a bfloat16 (15, and 6 to 0), and of the second step with both bytes swapped; then as many
// words with the numbers of exponents, of the four steps in bits 0, 8, 4 and 12.
struct CompactHeader {
  uint8_t exponents[16];
  // position in the panel << 8 | exponent, ascending; [count_rare_entries(in)], the last kNoMore
  uint32_t rare[12];
};
constexpr uint32_t kNoMore = UINT32_MAX;
constexpr int64_t kMaxCompactInputs = 1 << 19;  // so that positions are below that of kNoMore

static inline int64_t count_blocks(int64_t in) { return divide_up(in, 2 * kBlockSteps); }
static inline int64_t count_header_bytes(int64_t in) {
  return static_cast<int64_t>(sizeof(CompactHeader)) + divide_up(in, 1024) * 64;
}
static inline int64_t count_rare_entries(int64_t in) { return (count_header_bytes(in) - 16) / 4; }
static inline int64_t count_compact_bytes(int64_t in) {
  return count_header_bytes(in) + count_blocks(in) * kBlockBytes;
}
constexpr int64_t kExpandedPanels = 2;  // that a task expands for several passes of rows

// Of a panel as in KVN_BFLOAT16, with whole blocks.
static inline int64_t count_expanded_bytes(int64_t in) {
  return count_blocks(in) * kBlockWeights * 2;
}

}  // namespace kvn
