// AVX-512 without the instructions of AVX512-BF16: bfloat16 is widened to float32.
#include <initializer_list>
#include <type_traits>

#include "compact_panel.h"
#include "context.h"
#include "widened_avx512.h"

#define ISA avx512_widened

namespace avx512_widened {
#include "products.inl"
#include "compact_products.inl"
#include "attention.inl"
#include "forward.inl"
#include "sampling.inl"
}  // namespace avx512_widened

namespace kvn {
const Kernels avx512_widened_kernels = {
    avx512_widened::start_step,          avx512_widened::run_halves,
    avx512_widened::compute_logits,      avx512_widened::multiply_rows,
    avx512_widened::count_scratch_bytes, avx512_widened::count_tiled_bytes,
    avx512_widened::pick_tokens,         sizeof(avx512_widened::DotBF16::X)};
}
