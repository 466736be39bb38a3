// How many threads a step uses on a host whose cores several nodes share.
//
// Each node has a thread for every core, and says what it computes on a page that all of them map.
// A decode step uses the cores divided by the nodes that decode; a prompt, divided by all nodes that
// compute. So prompts leave cores to decode steps, and have all of them while nobody decodes. With
// two threads on one core, each stage of a step would last as long as the kernel's time slices.
//
// The page decides about time alone. What a node says counts for a bounded time.
#pragma once

#include <stdint.h>

#include <atomic>

namespace kvn {

constexpr int kSharingSlots = 62;

// What the nodes of a host compute; zeros at first. Each writes to its slot alone.
struct SharingPage {
  struct alignas(64) Slot {
    std::atomic<uint64_t> activity;  // microseconds of CLOCK_MONOTONIC << 2 | Activity
  } slots[kSharingSlots];
};
static_assert(sizeof(SharingPage) <= 4096);

class CoreSharing {
 public:
  // Uses a slot that no other living node has.
  CoreSharing(SharingPage* page, int slot, int cores);
  ~CoreSharing();

  // `is_prompt`: the step has no sequence that decodes.
  void begin_step(bool is_prompt);
  void end_step();
  // The threads that the step may use from now on. Says again that it is computed.
  int choose_num_threads();

 private:
  // kDecoded: between two steps, or after the last one.
  enum Activity : uint64_t { kNone, kDecodes, kDecoded, kComputesPrompt };

  void set_activity(Activity activity);

  SharingPage& page_;
  const int slot_, cores_;
  Activity activity_ = kNone;
};

}  // namespace kvn
