#include "core_sharing.h"

#include <time.h>

namespace kvn {
namespace {

// Microseconds for which an activity counts after it was said, in case the node has died: a decode
// step and half a layer of a prompt take less.
constexpr uint64_t kLongestActivity = 2'000'000;
// A node that decodes begins its next step after less than this.
constexpr uint64_t kBetweenSteps = 20'000;

uint64_t read_microseconds() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<uint64_t>(now.tv_sec) * 1'000'000 + static_cast<uint64_t>(now.tv_nsec) / 1000;
}

int divide_cores(int cores, int nodes) { return nodes < cores ? cores / nodes : 1; }

}  // namespace

CoreSharing::CoreSharing(SharingPage* page, int slot, int cores)
    : page_(*page), slot_(slot), cores_(cores) {
  set_activity(kNone);
}

CoreSharing::~CoreSharing() { set_activity(kNone); }

void CoreSharing::begin_step(bool is_prompt) {
  set_activity(is_prompt ? kComputesPrompt : kDecodes);
}

void CoreSharing::end_step() {
  if (activity_ == kDecodes) set_activity(kDecoded);
  if (activity_ == kComputesPrompt) set_activity(kNone);
}

int CoreSharing::choose_num_threads() {
  set_activity(activity_);
  const uint64_t now = read_microseconds();
  int decoding = 0, prompts = 0;
  for (int i = 0; i < kSharingSlots; ++i) {
    const uint64_t word = page_.slots[i].activity.load(std::memory_order_relaxed);
    const auto activity = static_cast<Activity>(word & 3);
    const uint64_t longest = activity == kDecoded ? kBetweenSteps : kLongestActivity;
    if (i == slot_ || activity == kNone || now - (word >> 2) >= longest) continue;
    activity == kComputesPrompt ? ++prompts : ++decoding;
  }
  if (activity_ != kComputesPrompt) return divide_cores(cores_, decoding + 1);
  return divide_cores(cores_, decoding + prompts + 1);
}

void CoreSharing::set_activity(Activity activity) {
  activity_ = activity;
  page_.slots[slot_].activity.store(read_microseconds() << 2 | activity, std::memory_order_relaxed);
}

}  // namespace kvn
