// Packing of matrices; see KvnPack.
#include <math.h>
#include <string.h>

#include "context.h"

namespace {

constexpr float kMinPeak = 1e-12f;  // a channel that is smaller is quantized as if it were so large

int64_t count_step_values(int32_t format) {
  return format == KVN_FLOAT32 ? 1 : format == KVN_BFLOAT16 ? 2 : 4;
}

float widen(uint16_t value) {
  const uint32_t bits = static_cast<uint32_t>(value) << 16;
  float found;
  memcpy(&found, &bits, sizeof found);
  return found;
}

uint16_t narrow(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  if (value != value) return static_cast<uint16_t>(bits >> 16 | 0x40);
  return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

template <class T>
struct Source {
  const T* row;
  float as_float(int64_t k) const {
    if constexpr (sizeof(T) == 4) return row[k];
    else return widen(row[k]);
  }
  uint16_t as_bf16(int64_t k) const {
    if constexpr (sizeof(T) == 4) return narrow(row[k]);
    else return row[k];
  }
};

template <class T>
void pack_row(const KvnPack& pack, Source<T> source, int64_t panel, int64_t lane) {
  const int64_t step = count_step_values(pack.format);
  const int64_t base = panel * kvn::divide_up(pack.in, step) * 16 * step;
  const auto place = [&](int64_t k) { return base + (k / step * 16 + lane) * step + k % step; };
  if (pack.format == KVN_FLOAT32) {
    float* out = static_cast<float*>(pack.packed);
    for (int64_t k = 0; k < pack.in; ++k) out[place(k)] = source.as_float(k);
    return;
  }
  if (pack.format == KVN_BFLOAT16) {
    uint16_t* out = static_cast<uint16_t*>(pack.packed) + base + lane * 2;
    const int64_t pairs = pack.in / 2;
    for (int64_t k = 0; k < pairs; ++k) {
      out[k * 32] = source.as_bf16(2 * k);
      out[k * 32 + 1] = source.as_bf16(2 * k + 1);
    }
    if (pack.in % 2) out[pairs * 32] = source.as_bf16(pack.in - 1);
    return;
  }
  float largest = kMinPeak;
  for (int64_t k = 0; k < pack.in; ++k) largest = fmaxf(largest, fabsf(source.as_float(k)));
  const float scale = largest / 127.0f, inverse = 127.0f / largest;
  int8_t* out = static_cast<int8_t*>(pack.packed);
  int32_t sum = 0;
  for (int64_t k = 0; k < pack.in; ++k) {
    const float rounded = nearbyintf(source.as_float(k) * inverse);
    const auto value = static_cast<int8_t>(fmaxf(-127.0f, fminf(127.0f, rounded)));
    out[place(k)] = value;
    sum += value;
  }
  pack.scales[panel * 16 + lane] = scale;
  pack.channel_sums[panel * 16 + lane] = sum;
}

}  // namespace

int64_t kvn_panel_bytes(int64_t in, int32_t format) {
  const int64_t step = count_step_values(format);
  return kvn::divide_up(in, step) * 64;
}

// What pads panels and steps has to be zero: `packed` comes zeroed.
int32_t kvn_pack(const KvnPack* pack) {
  if (pack->out < 1 || pack->in < 1 || pack->panel_step < 1) return KVN_BAD_ARGUMENT;
  for (int64_t row = 0; row < pack->out; ++row) {
    const int64_t panel = pack->first_panel + row / 16 * pack->panel_step;
    if (pack->source_format == KVN_FLOAT32) {
      pack_row(*pack, Source<float>{static_cast<const float*>(pack->weight) + row * pack->in},
               panel, row % 16);
    } else {
      pack_row(*pack, Source<uint16_t>{static_cast<const uint16_t*>(pack->weight) + row * pack->in},
               panel, row % 16);
    }
  }
  return KVN_OK;
}
