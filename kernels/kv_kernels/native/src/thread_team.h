// A team of threads that share the tasks of one function, stage by stage.
//
// The function runs on all members at once, and all of them go through the same stages. A stage
// ends when its tasks are done. Nobody waits for a member that has none of them: another process may
// hold its core. A member that comes late finds no task in stages that have ended, and catches up.
#pragma once

#include <stdint.h>

#include <atomic>

namespace kvn {

class ThreadTeam {
 public:
  using Job = void (*)(void* argument, int member);

  // Starts size - 1 threads; the caller of `run` is member 0. Null if they cannot be started.
  static ThreadTeam* create(int size);
  ~ThreadTeam();

  __attribute__((always_inline)) int size() const { return size_; }

  // Run job(argument, member) on every member that comes in time; returns when all tasks are done
  // and no member uses the argument.
  void run(Job job, void* argument);

  // One stage: body(task) for each task from 0 to count - 1, by whoever asks first. Returns when
  // all have returned. All members must call it with the same count, and between two stages read
  // only what does not change during the job.
  template <class Body>
  __attribute__((always_inline)) void share_tasks(int member, int64_t count, Body&& body) {
    if (count <= 0) return;
    int64_t finished = 0;
    for (int64_t task = take_task(member, count); task >= 0; task = take_task(member, count)) {
      body(task);
      ++finished;
    }
    end_stage(member, finished, count);
  }

 private:
  struct alignas(64) Member {
    ThreadTeam* team;
    unsigned long thread;
    int number;
    uint32_t stage;  // that the member has come to
  };

  ThreadTeam() = default;
  static void* run_member(void* argument);
  void run_jobs(Member& member);
  bool enter_job();
  void leave_job();
  void close_job();
  void end_stage(int member, int64_t finished, int64_t count);

  // The next task of the member's stage; -1 if there is none.
  __attribute__((always_inline)) int64_t take_task(int member, int64_t count) {
    const uint64_t stage = members_[member].stage;
    uint64_t next = next_task_.load(std::memory_order_acquire);
    do {
      if (next >> 32 != stage || static_cast<int64_t>(next & UINT32_MAX) >= count) return -1;
    } while (!next_task_.compare_exchange_weak(next, next + 1, std::memory_order_acq_rel));
    return static_cast<int64_t>(next & UINT32_MAX);
  }

  int size_ = 1;
  int started_ = 0;
  Member* members_ = nullptr;
  Job job_ = nullptr;
  void* argument_ = nullptr;
  uint32_t first_stage_ = 0;  // of the job
  std::atomic<bool> stopping_{false};
  alignas(64) std::atomic<uint32_t> job_number_{0};
  alignas(64) std::atomic<uint32_t> gate_{0};  // members in the job; kClosed if none may enter
  alignas(64) std::atomic<uint64_t> next_task_{0};     // stage << 32 | task
  alignas(64) std::atomic<int64_t> num_finished_{0};  // tasks of the stage
  alignas(64) std::atomic<int> sleeping_on_stage_{0};
  std::atomic<int> sleeping_on_job_{0};
  std::atomic<int> sleeping_on_gate_{0};
};

}  // namespace kvn
