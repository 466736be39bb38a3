// A team of threads that runs one function on all its members, with barriers in between.
#pragma once

#include <stdint.h>

#include <atomic>

namespace kvn {

// One member's view of the team, passed to the function that the team runs.
class ThreadTeam {
 public:
  using Job = void (*)(void* argument, int member);

  // Starts size - 1 threads; the caller of `run` is member 0. Null if they cannot be started.
  static ThreadTeam* create(int size);
  ~ThreadTeam();

  __attribute__((always_inline)) int size() const { return size_; }

  // Run job(argument, member) on every member; returns when all have returned.
  void run(Job job, void* argument);

  // The next task of this stage, counted from 0. Tasks are handed out to whoever asks first.
  __attribute__((always_inline)) int64_t take_task() {
    return next_task_.fetch_add(1, std::memory_order_relaxed);
  }

  // Wait until all members have come here. Then a new stage begins, and tasks count from 0 again.
  void end_stage();

 private:
  ThreadTeam() = default;
  static void* run_member(void* argument);
  void run_jobs(int member);

  struct Member {
    ThreadTeam* team;
    int number;
    unsigned long thread;
  };

  int size_ = 1;
  int started_ = 0;
  Member* members_ = nullptr;
  Job job_ = nullptr;
  void* argument_ = nullptr;
  bool stopping_ = false;
  alignas(64) std::atomic<uint32_t> job_number_{0};
  alignas(64) std::atomic<int64_t> next_task_{0};
  alignas(64) std::atomic<int> arrived_{0};
  alignas(64) std::atomic<uint32_t> stage_{0};
  alignas(64) std::atomic<int> sleeping_on_stage_{0};
  std::atomic<int> sleeping_on_job_{0};
};

}  // namespace kvn
