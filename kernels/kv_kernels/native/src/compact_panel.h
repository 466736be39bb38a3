// How a panel of a matrix in KVN_COMPACT_BFLOAT16 lies in memory: bfloat16 without loss, in 12 bits
// a weight. Sign and mantissa take 8 bits, and 4 bits are the number of one of the panel's 16 most
// frequent exponents. Weights with another exponent are listed.
//
// A panel has a header of whole cache lines, and blocks of 16 steps. The header is 16 exponents of
// one byte, then the list: numbers of 32 bits, position in the panel << 8 | exponent, ascending, of
// which the last is kNoMore. A block has 192 bytes for each four steps: two lines of words with sign
// and mantissa of two steps, [16 channels][2 inputs], the first step in the bits of a bfloat16 (15,
// and 6 to 0), the second with both bytes swapped; then a line of words with the exponents' numbers
// of the four steps, in bits 0, 8, 4 and 12.
#pragma once

#include <stdint.h>

#include "context.h"

namespace kvn {

constexpr int64_t kBlockSteps = 16;  // that are expanded together
constexpr int64_t kBlockWeights = kBlockSteps * 2 * kPanel;
constexpr int64_t kBlockBytes = kBlockWeights * 3 / 2;
constexpr int64_t kNumExponents = 16;
constexpr uint16_t kExponentBits = 0x7f80;
constexpr uint32_t kNoMore = UINT32_MAX;
constexpr int64_t kMaxCompactInputs = 1 << 19;  // so that positions are below that of kNoMore
constexpr int64_t kExpandedPanels = 2;          // that a task expands for several passes of rows

static inline int64_t count_blocks(int64_t in) { return divide_up(in, 2 * kBlockSteps); }
static inline int64_t count_header_bytes(int64_t in) { return 64 * (1 + divide_up(in, 1024)); }
// In the list, with kNoMore.
static inline int64_t count_rare_entries(int64_t in) {
  return (count_header_bytes(in) - kNumExponents) / 4;
}
static inline int64_t count_compact_bytes(int64_t in) {
  return count_header_bytes(in) + count_blocks(in) * kBlockBytes;
}
// Of a panel as in KVN_BFLOAT16, with whole blocks.
static inline int64_t count_expanded_bytes(int64_t in) {
  return count_blocks(in) * kBlockWeights * 2;
}

}  // namespace kvn
