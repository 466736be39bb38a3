// AVX-512, and products of matrices in bfloat16 and int8 by AMX.
#include <initializer_list>
#include <type_traits>

#include "bf16_avx512.h"
#include "compact_panel.h"
#include "context.h"

#define ISA avx512

namespace amx {
using namespace avx512;
constexpr int kMaxTileSums = 128;  // rows times panels; two panels of 64 rows
// In place of avx512's. TilePlan relies on 4 panels for the rows that vectors multiply.
static inline constexpr int choose_panels(int rows) { return rows <= 6 ? 4 : rows <= 12 ? 2 : 1; }
#include "products.inl"
#include "compact_products.inl"
#include "products_amx.inl"
#include "attention.inl"
#include "attention_amx.inl"
#include "forward.inl"
#include "sampling.inl"
}  // namespace amx

namespace kvn {
const Kernels amx_kernels = {
    amx::start_step,          amx::run_halves,        amx::compute_logits, amx::multiply_rows,
    amx::count_scratch_bytes, amx::count_tiled_bytes, amx::pick_tokens,
    sizeof(amx::DotBF16::X)};
}
