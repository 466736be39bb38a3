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
constexpr uint32_t kClosed = 1u << 31;
// Between two calls of one step the caller is away for a few microseconds.
constexpr int kJobSpins = 2000;

inline void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

void sleep_while(const uint32_t* word, uint32_t value) {
  syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, value, nullptr, nullptr, 0);
}

void wake_all(const uint32_t* word) {
  syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
}

const uint32_t* word_of(const std::atomic<uint32_t>& number) {
  return reinterpret_cast<const uint32_t*>(&number);
}

// Wait until load() differs from `value`. It reads `word`, on which the thread sleeps in the end.
template <class Load>
void wait_for_change(Load&& load, const uint32_t* word, uint32_t value, int spins,
                     std::atomic<int>& sleeping) {
  for (int i = 0; i < spins; ++i) {
    if (load() != value) return;
    relax();
  }
  sleeping.fetch_add(1);
  while (load() == value) sleep_while(word, value);
  sleeping.fetch_sub(1);
}

void wake_sleeping(const uint32_t* word, const std::atomic<int>& sleeping) {
  if (sleeping.load() > 0) wake_all(word);
}

}  // namespace

ThreadTeam* ThreadTeam::create(int size) {
  ThreadTeam* team = new (std::nothrow) ThreadTeam();
  if (team == nullptr) return nullptr;
  team->size_ = size;
  team->use_members(size);
  team->gate_ = kClosed;
  void* memory = nullptr;
  const size_t bytes = static_cast<size_t>(size) * sizeof(Member);
  bool is_complete = posix_memalign(&memory, alignof(Member), bytes) == 0;
  team->members_ = static_cast<Member*>(memory);
  for (int number = 0; is_complete && number < size; ++number) {
    Member& member = team->members_[number];
    new (&member) Member{team, 0, number, 0};
    if (number == 0) continue;
    is_complete = pthread_create(&member.thread, nullptr, run_member, &member) == 0;
    team->started_ += is_complete;
  }
  if (is_complete) return team;
  delete team;
  return nullptr;
}

ThreadTeam::~ThreadTeam() {
  stopping_ = true;
  use_members(size_);
  job_number_.fetch_add(1);
  wake_sleeping(word_of(job_number_), sleeping_on_job_);
  for (int number = 1; number <= started_; ++number)
    pthread_join(members_[number].thread, nullptr);
  free(members_);
}

void* ThreadTeam::run_member(void* argument) {
  Member& member = *static_cast<Member*>(argument);
  member.team->run_jobs(member);
  return nullptr;
}

void ThreadTeam::run_jobs(Member& member) {
  for (uint32_t seen = 0;;) {
    const uint32_t awake = num_awake_.load();
    if (static_cast<uint32_t>(member.number) >= awake) {
      sleep_while(word_of(num_awake_), awake);
      continue;
    }
    wait_for_change([this] { return job_number_.load(); }, word_of(job_number_), seen, kJobSpins,
                    sleeping_on_job_);
    seen = job_number_.load();
    if (stopping_) return;  // read after the number that the destructor has counted up
    if (!enter_job()) continue;
    if (member.number < num_used_) {
      member.stage = first_stage_;
      job_(argument_, member.number);
    }
    leave_job();
  }
}

void ThreadTeam::use_members(int count) {
  num_used_ = count < 1 ? 1 : count < size_ ? count : size_;
  const auto awake = static_cast<uint32_t>(num_used_);
  if (num_awake_.exchange(awake) < awake) wake_all(word_of(num_awake_));
}

void ThreadTeam::run(Job job, void* argument) {
  const bool is_alone = num_used_ == 1;
  if (!is_alone) {
    job_ = job;
    argument_ = argument;
    first_stage_ = members_[0].stage;
    gate_.store(0);
    job_number_.fetch_add(1);
    wake_sleeping(word_of(job_number_), sleeping_on_job_);
  }
  job(argument, 0);
  if (!is_alone) close_job();
}

// False if the job is over. A member that is in keeps the job and its argument alive.
bool ThreadTeam::enter_job() {
  uint32_t gate = gate_.load();
  do {
    if (gate & kClosed) return false;
  } while (!gate_.compare_exchange_weak(gate, gate + 1));
  return true;
}

void ThreadTeam::leave_job() {
  if (gate_.fetch_sub(1) - 1 == kClosed) wake_sleeping(word_of(gate_), sleeping_on_gate_);
}

// Let no member in any more, and wait until those that are in have left.
void ThreadTeam::close_job() {
  uint32_t gate = gate_.fetch_or(kClosed) | kClosed;
  while (gate != kClosed) {
    wait_for_change([this] { return gate_.load(); }, word_of(gate_), gate, kStageSpins,
                    sleeping_on_gate_);
    gate = gate_.load();
  }
}

void ThreadTeam::end_stage(int member, int64_t finished, int64_t count) {
  const uint32_t stage = members_[member].stage++;
  if (finished > 0 && num_finished_.fetch_add(finished) + finished == count) {
    num_finished_.store(0, std::memory_order_relaxed);
    for (int part = 0; part < size_; ++part)
      members_[part].next_task.store(static_cast<uint64_t>(stage + 1) << 32,
                                     std::memory_order_release);
    stage_.store(stage + 1);
    wake_sleeping(word_of(stage_), sleeping_on_stage_);
    return;
  }
  wait_for_change([this] { return stage_.load(); }, word_of(stage_), stage, kStageSpins,
                  sleeping_on_stage_);
}

}  // namespace kvn
