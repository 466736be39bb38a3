#pragma once

namespace kvn {

// Whether a vdpbf16ps takes longer than the two multiplications in float32 that compute the same.
// Only for CPUs with KVN_AVX512_ALL. Takes less than a millisecond.
bool is_bf16_slow();

}  // namespace kvn
