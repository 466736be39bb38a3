#include <initializer_list>
#include <type_traits>

#include "compact_panel.h"
#include "context.h"
#include "simd_avx2.h"

#define ISA avx2

namespace avx2 {
#include "products.inl"
#include "bf16_steps_avx2.inl"
#include "compact_products.inl"
#include "attention.inl"
#include "forward.inl"
#include "sampling.inl"
}  // namespace avx2

namespace kvn {
const Kernels avx2_kernels = {
    avx2::start_step,          avx2::run_halves,        avx2::compute_logits, avx2::multiply_rows,
    avx2::count_scratch_bytes, avx2::count_tiled_bytes, avx2::pick_tokens,
    sizeof(avx2::DotBF16::X)};
}
