// Draws tokens from logits: temperature, min_p, top_k and top_p, then Gumbel-max with noise that is
// a function of seed, position, choice and token alone. Equal to node_engine/model/sampling/sampler.py
// but for rounding. Included by one file for each instruction set, inside its namespace.

constexpr int64_t kNoiseGroup = 64;  // tokens whose noise is computed together
constexpr int kBuckets = 1024;

// Philox4x32-10 (Salmon et al., 2011) of counters from `first` on, of which each has the words of
// four tokens. The upper halves of lanes are ignored.
static void compute_noise_words(const KvnDraw& draw, uint64_t first, uint32_t* words) {
  for (uint64_t done = 0; done < kNoiseGroup / 4; done += kWideLanes) {
    uint64_t counters[kWideLanes];
    for (uint64_t i = 0; i < kWideLanes; ++i) counters[i] = first + done + i;
    U64 a = load_wide(counters), b = set1_wide(draw.position), c = set1_wide(draw.choice);
    U64 d = set1_wide(0);
    uint64_t key0 = draw.seed, key1 = draw.seed >> 32;
    for (int round = 0; round < 10; ++round) {
      const U64 product = mul_low(a, set1_wide(0xD2511F53u));
      const U64 other = mul_low(c, set1_wide(0xCD9E8D57u));
      a = bit_xor(bit_xor(high_half(other), b), set1_wide(key0));
      c = bit_xor(bit_xor(high_half(product), d), set1_wide(key1));
      b = other;
      d = product;
      key0 += 0x9E3779B9u;
      key1 += 0xBB67AE85u;
    }
    uint64_t pairs[2][kWideLanes];
    store_wide(pairs[0], join_low(a, b));
    store_wide(pairs[1], join_low(c, d));
    for (uint64_t i = 0; i < kWideLanes; ++i) {
      __builtin_memcpy(words + 4 * (done + i), &pairs[0][i], 8);
      __builtin_memcpy(words + 4 * (done + i) + 2, &pairs[1][i], 8);
    }
  }
}

static inline float to_uniform(uint32_t word) {
  return (static_cast<float>(word) + 0.5f) * 0x1p-32f;
}

// A standard Gumbel variable, -log(-log(1 - u)).
static inline float to_gumbel(float uniform) {
  const float below_one = uniform < 1.0f - 0x1p-24f ? uniform : 1.0f - 0x1p-24f;
  return -__builtin_logf(-__builtin_log1pf(-below_one));
}

// No smaller than to_gumbel(uniform): that is at most -log(u), and u at least 2 to its exponent.
static inline float bound_gumbel(float uniform) {
  int32_t bits;
  __builtin_memcpy(&bits, &uniform, sizeof bits);
  return static_cast<float>(127 - (bits >> 23)) * 0.693148f + 1e-5f;
}

// The token of the greatest sum of logit and noise, the first of equal ones, among logits of `floor`
// or more.
static int64_t find_best_sum(const float* scaled, int64_t vocab, float floor, const KvnDraw& draw) {
  float best = -__builtin_inff();
  int64_t found = 0;
  for (int64_t group = 0; group < vocab; group += kNoiseGroup) {
    const int64_t left = vocab - group, count = left < kNoiseGroup ? left : kNoiseGroup;
    int kept = 0;
    for (int64_t i = 0; i < count; ++i) kept |= scaled[group + i] >= floor;
    if (!kept) continue;
    uint32_t words[kNoiseGroup];
    float uniform[kNoiseGroup];
    compute_noise_words(draw, static_cast<uint64_t>(group) / 4, words);
    int is_candidate = 0;
    for (int64_t i = 0; i < count; ++i) {
      uniform[i] = to_uniform(words[i]);
      const float bound = scaled[group + i] + bound_gumbel(uniform[i]);
      is_candidate |= (scaled[group + i] >= floor) & (bound >= best);
    }
    if (!is_candidate) continue;
    for (int64_t i = 0; i < count; ++i) {
      const float logit = scaled[group + i];
      if (logit < floor || logit + bound_gumbel(uniform[i]) < best) continue;
      const float sum = logit + to_gumbel(uniform[i]);
      if (sum > best) {
        best = sum;
        found = group + i;
      }
    }
  }
  return found;
}

// Restore the order of a heap whose root is its least value, below index `at`.
static void sift_down(float* heap, int64_t count, int64_t at) {
  const float value = heap[at];
  for (int64_t child = 2 * at + 1; child < count; child = 2 * at + 1) {
    if (child + 1 < count && heap[child + 1] < heap[child]) ++child;
    if (heap[child] >= value) break;
    heap[at] = heap[child];
    at = child;
  }
  heap[at] = value;
}

static void make_heap(float* values, int64_t count) {
  for (int64_t i = count / 2 - 1; i >= 0; --i) sift_down(values, count, i);
}

static void sort_descending(float* values, int64_t count) {
  make_heap(values, count);
  for (int64_t end = count - 1; end > 0; --end) {
    const float least = values[0];
    values[0] = values[end];
    values[end] = least;
    sift_down(values, end, 0);
  }
}

// The logit of rank `top_k` among those from `floor` on; `floor` if there are no more of them.
static float find_top_k_floor(const float* scaled, int64_t vocab, float floor, int64_t top_k,
                              float* heap) {
  int64_t kept = 0;
  for (int64_t i = 0; i < vocab; ++i) {
    if (scaled[i] < floor) continue;
    if (kept < top_k) {
      heap[kept++] = scaled[i];
      if (kept == top_k) make_heap(heap, top_k);
    } else if (scaled[i] > heap[0]) {
      heap[0] = scaled[i];
      sift_down(heap, top_k, 0);
    }
  }
  return kept < top_k ? floor : heap[0];
}

// The sum of weights exp(logit) of the logits from `floor` on.
static double sum_weights(const float* logits, int64_t count, float floor, float* weights) {
  double totals[16] = {};
  for_lanes(count, [&](int64_t i, int lanes) {
    store_floats(weights + i, exp_nonpositive(load_floats(logits + i, lanes)), lanes);
    for (int lane = 0; lane < lanes; ++lane)
      totals[lane] += static_cast<double>(logits[i + lane] >= floor ? weights[i + lane] : 0.0f);
  });
  double total = 0.0;
  for (const double part : totals) total += part;
  return total;
}

// The lowest logit that top_p keeps of those from `floor` on: the logits above it have less than
// top_p of the sum of weights. `values` and `weights` are of vocab floats each.
static float find_top_p_floor(const float* scaled, int64_t vocab, float floor, double top_p,
                              float* values, float* weights) {
  const double total = sum_weights(scaled, vocab, floor, weights), limit = top_p * total;
  // Logits with smaller weights than `least` add up to less than 1 - top_p: none of them counts.
  const double least = (1.0 - top_p) * total / static_cast<double>(vocab);
  float lowest = (least > 1e-37 ? __builtin_logf(static_cast<float>(least)) : -86.0f) - 1e-3f;
  const float per_unit = static_cast<float>(kBuckets - 1) / lowest;
  lowest = lowest > floor ? lowest : floor;
  const auto find_bucket = [&](float value) { return static_cast<int>(value * per_unit); };
  double sums[kBuckets] = {};
  int64_t count = 0;
  for (int64_t i = 0; i < vocab; ++i) {
    if (scaled[i] < lowest) continue;
    sums[find_bucket(scaled[i])] += static_cast<double>(weights[i]);
    values[count++] = scaled[i];
  }
  // The lowest logit is in the bucket in which the sum, from the greatest on, reaches the limit.
  int bucket = 0;
  double before = 0.0;
  while (bucket < kBuckets - 1 && before + sums[bucket] < limit) before += sums[bucket++];
  int64_t ranked = 0;
  for (int64_t i = 0; i < count; ++i)
    if (find_bucket(values[i]) == bucket) values[ranked++] = values[i];
  sort_descending(values, ranked);
  sum_weights(values, ranked, floor, weights);
  int64_t kept = 0;
  while (kept < ranked && before < limit) before += static_cast<double>(weights[kept++]);
  return kept > 0 ? values[kept - 1] : lowest;
}

// The first of the greatest logits; -1 if that is not finite, or any is NaN.
static int64_t find_greatest(const float* logits, int64_t vocab) {
  F16 lanes_max = set1(-__builtin_inff());
  for_lanes(vocab & ~int64_t{15}, [&](int64_t i, int) { lanes_max = max(lanes_max, load(logits + i)); });
  float greatest = reduce_max(lanes_max);
  for (int64_t i = vocab & ~int64_t{15}; i < vocab; ++i)
    greatest = logits[i] > greatest ? logits[i] : greatest;
  int is_nan = 0;
  for (int64_t i = 0; i < vocab; ++i) is_nan |= logits[i] != logits[i];
  if (is_nan || !(__builtin_fabsf(greatest) < __builtin_inff())) return -1;
  for (int64_t group = 0; group < vocab; group += 64) {
    const int64_t end = group + 64 < vocab ? group + 64 : vocab;
    int is_here = 0;
    for (int64_t i = group; i < end; ++i) is_here |= logits[i] == greatest;
    for (int64_t i = group; is_here && i < end; ++i)
      if (logits[i] == greatest) return i;
  }
  return -1;
}

// Overwrites the logits with scaled ones.
static int64_t pick_token(float* logits, int64_t vocab, const KvnDraw& draw, float* values,
                          float* weights) {
  const int64_t greatest = find_greatest(logits, vocab);
  if (greatest < 0 || draw.temperature <= 0.0f) return greatest;
  const F16 most = set1(logits[greatest]), temperature = set1(draw.temperature);
  for_lanes(vocab, [&](int64_t i, int lanes) {
    store_floats(logits + i, div(sub(load_floats(logits + i, lanes), most), temperature), lanes);
  });
  float floor = draw.min_logit;
  if (draw.top_k > 0 && draw.top_k < vocab)
    floor = find_top_k_floor(logits, vocab, floor, draw.top_k, values);
  if (draw.top_p < 1.0)
    floor = find_top_p_floor(logits, vocab, floor, draw.top_p, values, weights);
  return find_best_sum(logits, vocab, floor, draw);
}

struct PickJob {
  KvnContext* context;
  float* logits;
  int64_t rows;
  const KvnDraw* draws;
  int64_t* tokens;
};

static void pick_tokens_member(void* argument, int member) {
  const PickJob& job = *static_cast<PickJob*>(argument);
  const int64_t vocab = job.context->model.vocab;
  float* values = job.context->work.candidates.as<float>() + member * 2 * kvn::round_up(vocab, 16);
  job.context->team->share_tasks(member, job.rows, [&](int64_t row) {
    job.tokens[row] = pick_token(job.logits + row * vocab, vocab, job.draws[row], values,
                                 values + kvn::round_up(vocab, 16));
  });
}

static void pick_tokens(KvnContext& context, float* logits, int64_t rows, const KvnDraw* draws,
                        int64_t* tokens) {
  PickJob job{&context, logits, rows, draws, tokens};
  if (rows == 1) {  // not worth a wait for others
    float* values = context.work.candidates.as<float>();
    const int64_t vocab = context.model.vocab;
    tokens[0] = pick_token(logits, vocab, draws[0], values, values + kvn::round_up(vocab, 16));
    return;
  }
  context.team->run(pick_tokens_member, &job);
}
