#include "core_sharing.h"

#include <time.h>

namespace kvn {
namespace {

// In microseconds. A node that dies in a step counts for so long. One that computes says so again
// after each few layers.
constexpr uint64_t kLongestSilence = 2'000'000;
// A node that has more to compute begins its next step within this time.
constexpr uint64_t kBetweenSteps = 20'000;

uint64_t read_microseconds() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<uint64_t>(now.tv_sec) * 1'000'000 + static_cast<uint64_t>(now.tv_nsec) / 1000;
}

}  // namespace

CoreSharing::CoreSharing(SharingPage* page, int slot, int cores)
    : page_(*page), slot_(slot), cores_(cores) {
  set_busy(0);
}

CoreSharing::~CoreSharing() { set_busy(0); }

int CoreSharing::choose_num_threads() {
  set_busy(kLongestSilence);
  const uint64_t now = read_microseconds();
  int num_busy = 1;
  for (int i = 0; i < kSharingSlots; ++i)
    num_busy += i != slot_ && page_.slots[i].busy_until.load(std::memory_order_relaxed) > now;
  return num_busy < cores_ ? cores_ / num_busy : 1;
}

void CoreSharing::end_step() { set_busy(kBetweenSteps); }

// From now on for so long.
void CoreSharing::set_busy(uint64_t microseconds) {
  const uint64_t until = microseconds ? read_microseconds() + microseconds : 0;
  page_.slots[slot_].busy_until.store(until, std::memory_order_relaxed);
}

}  // namespace kvn
