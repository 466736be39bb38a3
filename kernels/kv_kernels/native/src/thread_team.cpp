#include "thread_team.h"

#include <linux/futex.h>
#include <pthread.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <climits>
#include <new>

namespace kvn {
namespace {

// A stage lasts microseconds, so that a member waits for the others without the kernel at first.
// Another process may hold a member's core: then waiting would take the time that it needs.
constexpr int kStageSpins = 4000;
// Between two calls of one step the caller is away for a few microseconds.
constexpr int kJobSpins = 2000;

inline void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

void sleep_while(std::atomic<uint32_t>& word, uint32_t value) {
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAIT_PRIVATE, value, nullptr,
          nullptr, 0);
}

void wake_all(std::atomic<uint32_t>& word) {
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAKE_PRIVATE, INT_MAX, nullptr,
          nullptr, 0);
}

// Wait until `word` differs from `value`.
void wait_for_change(std::atomic<uint32_t>& word, uint32_t value, int spins,
                     std::atomic<int>& sleeping) {
  for (int i = 0; i < spins; ++i) {
    if (word.load(std::memory_order_acquire) != value) return;
    relax();
  }
  sleeping.fetch_add(1);
  while (word.load() == value) sleep_while(word, value);
  sleeping.fetch_sub(1);
}

void change(std::atomic<uint32_t>& word, const std::atomic<int>& sleeping) {
  word.fetch_add(1);
  if (sleeping.load() > 0) wake_all(word);
}

}  // namespace

ThreadTeam* ThreadTeam::create(int size) {
  ThreadTeam* team = new (std::nothrow) ThreadTeam();
  if (team == nullptr) return nullptr;
  team->size_ = size;
  team->members_ = static_cast<Member*>(calloc(static_cast<size_t>(size), sizeof(Member)));
  bool is_complete = team->members_ != nullptr;
  for (int number = 1; is_complete && number < size; ++number) {
    Member& member = team->members_[number];
    member = {team, number, 0};
    is_complete = pthread_create(&member.thread, nullptr, run_member, &member) == 0;
    team->started_ += is_complete;
  }
  if (is_complete) return team;
  delete team;
  return nullptr;
}

ThreadTeam::~ThreadTeam() {
  stopping_ = true;
  change(job_number_, sleeping_on_job_);
  for (int number = 1; number <= started_; ++number)
    pthread_join(members_[number].thread, nullptr);
  free(members_);
}

void* ThreadTeam::run_member(void* argument) {
  const Member& member = *static_cast<Member*>(argument);
  member.team->run_jobs(member.number);
  return nullptr;
}

void ThreadTeam::run_jobs(int member) {
  for (uint32_t done = 0;; ++done) {
    wait_for_change(job_number_, done, kJobSpins, sleeping_on_job_);
    if (stopping_) return;
    job_(argument_, member);
    end_stage();
  }
}

void ThreadTeam::run(Job job, void* argument) {
  job_ = job;
  argument_ = argument;
  if (size_ > 1) change(job_number_, sleeping_on_job_);
  job(argument, 0);
  end_stage();
}

void ThreadTeam::end_stage() {
  const uint32_t stage = stage_.load(std::memory_order_relaxed);
  if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == size_) {
    arrived_.store(0, std::memory_order_relaxed);
    next_task_.store(0, std::memory_order_relaxed);
    change(stage_, sleeping_on_stage_);
  } else {
    wait_for_change(stage_, stage, kStageSpins, sleeping_on_stage_);
  }
}

}  // namespace kvn
