#include <initializer_list>
#include <type_traits>

#include "bf16_avx512.h"
#include "compact_panel.h"
#include "context.h"

#define ISA avx512

namespace avx512 {
#include "products.inl"
#include "compact_products.inl"
#include "attention.inl"
#include "forward.inl"
#include "sampling.inl"
}  // namespace avx512

namespace kvn {
const Kernels avx512_kernels = {
    avx512::start_step,          avx512::run_halves,        avx512::compute_logits, avx512::multiply_rows,
    avx512::count_scratch_bytes, avx512::count_tiled_bytes, avx512::pick_tokens,
    sizeof(avx512::DotBF16::X)};
}
