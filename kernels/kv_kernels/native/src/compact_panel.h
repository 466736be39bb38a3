// How a panel of a matrix in KVN_COMPACT_BFLOAT16 lies in memory: bfloat16 without loss, in 12 bits
// a weight. The lower byte of a weight (the last bit of its exponent and its mantissa) takes 8 bits.
// The other 4 are the number of its upper byte (its sign and the rest of its exponent) in a table of
// the panel: eight upper bytes, the most frequent ones, and the same with the other sign. So the
// table has eight pairs of exponents that differ in the last bit. Weights with another exponent are
// listed.
//
// A panel has a header of whole cache lines, and blocks of 16 steps. The header is the table, then
// the list: numbers of 32 bits, position in the panel << 8 | exponent, ascending, of which the last
// is kNoMore. A block has 192 bytes for each four steps: a line with the lower bytes of the first two
// steps, one with those of the others, and one with the numbers of upper bytes, for the first two
// steps in bits 0 to 3. In a line, eight bytes of one step and eight of the other take turns.
#pragma once

#include <stdint.h>

#include "context.h"

namespace kvn {

constexpr int64_t kBlockSteps = 16;  // that are expanded together
constexpr int64_t kBlockWeights = kBlockSteps * 2 * kPanel;
constexpr int64_t kBlockBytes = kBlockWeights * 3 / 2;
constexpr int64_t kNumUpperBytes = 16;
constexpr uint16_t kExponentBits = 0x7f80;
constexpr uint32_t kNoMore = UINT32_MAX;
constexpr int64_t kMaxCompactInputs = 1 << 19;  // so that positions are below that of kNoMore
constexpr int64_t kExpandedPanels = 2;          // that a task expands for several passes of rows

static inline int64_t count_blocks(int64_t in) { return divide_up(in, 2 * kBlockSteps); }
static inline int64_t count_header_bytes(int64_t in) { return 64 * (1 + divide_up(in, 1024)); }
// In the list, with kNoMore.
static inline int64_t count_rare_entries(int64_t in) {
  return (count_header_bytes(in) - kNumUpperBytes) / 4;
}
static inline int64_t count_compact_bytes(int64_t in) {
  return count_header_bytes(in) + count_blocks(in) * kBlockBytes;
}
// Of a panel as in KVN_BFLOAT16, with whole blocks.
static inline int64_t count_expanded_bytes(int64_t in) {
  return count_blocks(in) * kBlockWeights * 2;
}

}  // namespace kvn
