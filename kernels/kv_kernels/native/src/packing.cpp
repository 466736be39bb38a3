// Packing of matrices; see KvnPack.
#include <math.h>
#include <string.h>

#include <new>

#include "compact_panel.h"
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

// The largest magnitude of a row; what is not finite exceeds all that is.
template <class T>
float find_peak(Source<T> source, int64_t count) {
  // The bits of magnitudes have the order of their values, and NaN comes after infinity.
  uint32_t peak_bits = 0;
  for (int64_t k = 0; k < count; ++k) {
    const float value = source.as_float(k);
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    bits &= 0x7fffffff;
    peak_bits = bits > peak_bits ? bits : peak_bits;
  }
  float peak;
  memcpy(&peak, &peak_bits, sizeof peak);
  return peak;
}

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
  const float peak = find_peak(source, pack.in);
  if (!isfinite(peak)) {
    // With this scale every result of the channel is NaN. Its values stay zero, as `packed` comes.
    pack.scales[panel * 16 + lane] = NAN;
    pack.channel_sums[panel * 16 + lane] = 0;
    return;
  }
  const float largest = fmaxf(kMinPeak, peak);
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

// Choose the most frequent upper bytes of `values` whatever their sign, of equally frequent ones the
// least, and then the same with a sign.
void choose_upper_bytes(const uint16_t* values, int64_t count, uint8_t* upper_bytes) {
  constexpr int kNumMagnitudes = kvn::kNumUpperBytes / 2;
  int64_t frequency[128] = {};
  for (int64_t i = 0; i < count; ++i) ++frequency[values[i] >> 8 & 0x7f];
  for (int number = 0; number < kNumMagnitudes; ++number) {
    int most = 0;
    for (int upper = 1; upper < 128; ++upper)
      if (frequency[upper] > frequency[most]) most = upper;
    upper_bytes[number] = static_cast<uint8_t>(most);
    upper_bytes[number + kNumMagnitudes] = static_cast<uint8_t>(most | 0x80);
    frequency[most] = -1;
  }
}

// Pack a panel of `in` inputs whose `values` lie as in KVN_BFLOAT16, with whole blocks. Returns
// false if too many of them have a rare exponent.
bool pack_compact_panel(const uint16_t* values, int64_t in, char* panel) {
  const int64_t count = kvn::count_blocks(in) * kvn::kBlockWeights;
  auto* upper_bytes = reinterpret_cast<uint8_t*>(panel);
  auto* rare = reinterpret_cast<uint32_t*>(panel + kvn::kNumUpperBytes);
  const int64_t most_rare = kvn::count_rare_entries(in) - 1;
  int64_t num_rare = 0;
  choose_upper_bytes(values, count, upper_bytes);
  uint8_t numbers[256];
  memset(numbers, 0xff, sizeof numbers);
  for (uint8_t number = 0; number < kvn::kNumUpperBytes; ++number)
    numbers[upper_bytes[number]] = number;
  const auto find_number = [&](int64_t position) -> uint8_t {
    const int value = values[position];
    if (numbers[value >> 8] != 0xff) return numbers[value >> 8];
    if (num_rare < most_rare)
      rare[num_rare] = static_cast<uint32_t>(position << 8 | (value >> 7 & 0xff));
    ++num_rare;
    return value >> 15 ? kvn::kNumUpperBytes / 2 : 0;  // a number of the same sign
  };
  auto* out = reinterpret_cast<uint8_t*>(panel + kvn::count_header_bytes(in));
  for (int64_t first = 0; first < count; first += 128, out += 192) {
    for (int64_t i = 0; i < 128; ++i) {  // in the order of the list of rare weights
      const int64_t step = i / 32, word = i % 32;
      const int64_t place = word / 8 * 16 + step % 2 * 8 + word % 8;
      out[step / 2 * 64 + place] = static_cast<uint8_t>(values[first + i]);
      const uint8_t number = find_number(first + i);
      uint8_t& pair = out[128 + place];
      pair = static_cast<uint8_t>(step < 2 ? number : pair | number << 4);
    }
  }
  if (num_rare > most_rare) return false;
  rare[num_rare] = kvn::kNoMore;
  return true;
}

template <class T>
int32_t pack_compact(const KvnPack& pack) {
  const int64_t count = kvn::count_blocks(pack.in) * kvn::kBlockWeights;
  auto* values = new (std::nothrow) uint16_t[static_cast<size_t>(count)];
  if (values == nullptr) return KVN_OUT_OF_MEMORY;
  bool is_packed = true;
  for (int64_t first = 0; is_packed && first < pack.out; first += kvn::kPanel) {
    memset(values, 0, static_cast<size_t>(count) * sizeof *values);
    for (int64_t lane = 0; lane < kvn::kPanel && first + lane < pack.out; ++lane) {
      const Source<T> source{static_cast<const T*>(pack.weight) + (first + lane) * pack.in};
      for (int64_t k = 0; k < pack.in; ++k)
        values[(k / 2 * 16 + lane) * 2 + k % 2] = source.as_bf16(k);
    }
    const int64_t panel = pack.first_panel + first / kvn::kPanel * pack.panel_step;
    is_packed = pack_compact_panel(
        values, pack.in,
        static_cast<char*>(pack.packed) + panel * kvn::count_compact_bytes(pack.in));
  }
  delete[] values;
  return is_packed ? KVN_OK : KVN_INCOMPRESSIBLE;
}

}  // namespace

int64_t kvn_panel_bytes(int64_t in, int32_t format) {
  if (format == KVN_COMPACT_BFLOAT16) return kvn::count_compact_bytes(in);
  const int64_t step = count_step_values(format);
  return kvn::divide_up(in, step) * 64;
}

// What pads panels and steps has to be zero: `packed` comes zeroed.
int32_t kvn_pack(const KvnPack* pack) {
  if (pack->out < 1 || pack->in < 1 || pack->panel_step < 1) return KVN_BAD_ARGUMENT;
  if (pack->format == KVN_COMPACT_BFLOAT16) {
    if (pack->in > kvn::kMaxCompactInputs) return KVN_INCOMPRESSIBLE;
    return pack->source_format == KVN_FLOAT32 ? pack_compact<float>(*pack)
                                              : pack_compact<uint16_t>(*pack);
  }
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
