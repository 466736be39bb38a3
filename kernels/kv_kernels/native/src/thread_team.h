// A team of threads that share the tasks of one function, stage by stage.
//
// The function runs on all members at once, and all of them go through the same stages. A stage
// ends when its tasks are done. Nobody waits for a member that has none of them: another process may
// hold its core. A member that comes late finds no task in stages that have ended, and catches up.
//
// Each member has a part of a stage's tasks, and takes those of the others when it has done its own.
#pragma once

#include <stdint.h>

#include <atomic>

namespace kvn {

// Which tasks are a member's part.
enum class TaskOrder {
  // Consecutive tasks: what a task prefetches past its end is read by the member's next task.
  kConsecutive,
  // Every num_used()-th task: where long tasks come first, each member gets some of them.
  kInterleaved,
};

class ThreadTeam {
 public:
  using Job = void (*)(void* argument, int member);

  // Starts size - 1 threads; the caller of `run` is member 0. Null if they cannot be started.
  static ThreadTeam* create(int size);
  ~ThreadTeam();

  __attribute__((always_inline)) int size() const { return size_; }

  // Run jobs on the first `count` members from now on: at least the caller, at most all. Not
  // during a job.
  void use_members(int count);
  __attribute__((always_inline)) int num_used() const { return num_used_; }

  // Run job(argument, member) on every used member that comes in time; returns when all tasks are
  // done and no member uses the argument.
  void run(Job job, void* argument);

  // One stage: body(task) for each task from 0 to count - 1, on the member that takes it. Returns
  // when all have returned. All members must call it with the same count, and between two stages
  // read only what does not change during the job.
  template <TaskOrder kOrder = TaskOrder::kConsecutive, class Body>
  __attribute__((always_inline)) void share_tasks(int member, int64_t count, Body&& body) {
    if (count <= 0) return;
    const uint64_t stage = members_[member].stage;
    const int64_t each = count / num_used_, more = count % num_used_;
    int64_t finished = 0;
    for (int turn = 0; turn < num_used_; ++turn) {
      const int part = member + turn < num_used_ ? member + turn : member + turn - num_used_;
      const int64_t size = each + (part < more), begin = each * part + (part < more ? part : more);
      if (size == 0) continue;
      std::atomic<uint64_t>& next = members_[part].next_task;
      for (int64_t i = take_task(next, stage, size); i >= 0; i = take_task(next, stage, size)) {
        body(kOrder == TaskOrder::kInterleaved ? i * num_used_ + part : begin + i);
        ++finished;
      }
    }
    end_stage(member, finished, count);
  }

 private:
  struct alignas(64) Member {
    ThreadTeam* team;
    unsigned long thread;
    int number;
    uint32_t stage;                      // that the member has come to
    std::atomic<uint64_t> next_task{0};  // of its part: stage << 32 | number in the part
  };

  ThreadTeam() = default;
  static void* run_member(void* argument);
  void run_jobs(Member& member);
  bool enter_job();
  void leave_job();
  void close_job();
  void end_stage(int member, int64_t finished, int64_t count);

  // The next task of a part of `size`, as its number in the part; -1 if there is none.
  static __attribute__((always_inline)) int64_t take_task(std::atomic<uint64_t>& next_task,
                                                          uint64_t stage, int64_t size) {
    uint64_t next = next_task.load(std::memory_order_acquire);
    do {
      if (next >> 32 != stage || static_cast<int64_t>(next & UINT32_MAX) >= size) return -1;
    } while (!next_task.compare_exchange_weak(next, next + 1, std::memory_order_acq_rel));
    return static_cast<int64_t>(next & UINT32_MAX);
  }

  int size_ = 1;
  int num_used_ = 1;  // members that do tasks; changes while no member is in a job
  // The same number, on which the other members sleep: their cores may be those of other processes.
  std::atomic<uint32_t> num_awake_{1};
  int started_ = 0;
  Member* members_ = nullptr;
  Job job_ = nullptr;
  void* argument_ = nullptr;
  uint32_t first_stage_ = 0;  // of the job
  std::atomic<bool> stopping_{false};
  alignas(64) std::atomic<uint32_t> job_number_{0};
  alignas(64) std::atomic<uint32_t> gate_{0};  // members in the job; kClosed if none may enter
  alignas(64) std::atomic<uint32_t> stage_{0};  // whose tasks may be taken
  alignas(64) std::atomic<int64_t> num_finished_{0};  // tasks of the stage
  alignas(64) std::atomic<int> sleeping_on_stage_{0};
  std::atomic<int> sleeping_on_job_{0};
  std::atomic<int> sleeping_on_gate_{0};
};

}  // namespace kvn
