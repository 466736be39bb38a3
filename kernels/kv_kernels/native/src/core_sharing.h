// How many threads a step uses on a host whose cores several nodes share.
//
// Each node has a thread for every core, and says on a page that all of them map when it computes. A
// step uses the cores divided by the nodes that compute. With two threads on one core, each stage of
// a step would last as long as the kernel's time slices.
//
// The page decides about time alone. What a node says counts for a bounded time.
#pragma once

#include <stdint.h>

#include <atomic>

namespace kvn {

constexpr int kSharingSlots = 62;

// Which nodes of the host compute; zeros at first. Each writes to its slot alone.
struct SharingPage {
  struct alignas(64) Slot {
    // Microseconds of CLOCK_MONOTONIC until which the node counts as one that computes.
    std::atomic<uint64_t> busy_until;
  } slots[kSharingSlots];
};
static_assert(sizeof(SharingPage) <= 4096);

class CoreSharing {
 public:
  // Uses a slot that no other living node has.
  CoreSharing(SharingPage* page, int slot, int cores);
  ~CoreSharing();

  // The threads that a step may use from now on. Says that this node computes.
  int choose_num_threads();
  void end_step();

 private:
  void set_busy(uint64_t microseconds);

  SharingPage& page_;
  const int slot_, cores_;
};

}  // namespace kvn
