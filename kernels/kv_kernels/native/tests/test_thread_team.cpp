// A team whose members come late, as when other processes hold their cores.
#include "thread_team.h"

#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <vector>

#include "check.h"

namespace {

constexpr int kStages = 12;
constexpr int kTasks = 5;

struct Work {
  kvn::ThreadTeam* team;
  uint32_t seed;
  int late_member;  // -1: all are late now and then
  int64_t sums[kStages + 1][kTasks];
  int counts[kStages][kTasks];
};

uint32_t mix(uint32_t value) {
  value = (value ^ (value >> 16)) * 0x45d9f3bu;
  return value ^ (value >> 13);
}

void come_late(const Work& work, int member, int stage) {
  const uint32_t drawn = mix(work.seed * 977 + static_cast<uint32_t>(member * 31 + stage));
  if (work.late_member == member || (work.late_member < 0 && drawn % 8 == 0)) usleep(drawn % 300);
}

// What member 0 does while the others are held up.
template <kvn::TaskOrder kOrder>
struct HeldUp {
  kvn::ThreadTeam* team;
  int64_t count;
  std::atomic<bool> is_done{false};
  std::vector<int64_t> tasks;

  static void run(void* argument, int member) {
    HeldUp& work = *static_cast<HeldUp*>(argument);
    while (member != 0 && !work.is_done) usleep(10);
    work.team->share_tasks<kOrder>(member, work.count, [&](int64_t task) {
      CHECK(member == 0);
      work.tasks.push_back(task);
    });
    if (member == 0) work.is_done = true;
  }
};

template <kvn::TaskOrder kOrder>
std::vector<int64_t> list_tasks_of_first(int size, int64_t count) {
  std::unique_ptr<kvn::ThreadTeam> team(kvn::ThreadTeam::create(size));
  HeldUp<kOrder> work{team.get(), count, {}, {}};
  team->run(HeldUp<kOrder>::run, &work);
  return work.tasks;
}

// Each task of a stage adds up what all tasks of the stage before have written.
void add_up(void* argument, int member) {
  Work& work = *static_cast<Work*>(argument);
  for (int stage = 0; stage < kStages; ++stage) {
    come_late(work, member, stage);
    const auto add_up_task = [&](int64_t task) {
      come_late(work, member, stage + 100);
      int64_t sum = 0;
      for (int64_t before : work.sums[stage]) sum += before;
      ++work.counts[stage][task];
      if (stage % 3) {
        work.sums[stage + 1][task] = sum % 10007 + task;
      } else {
        for (int place = 0; place < kTasks; ++place)
          work.sums[stage + 1][place] = sum % 10007 + place;
      }
    };
    const int64_t count = stage % 3 ? kTasks : 1;
    if (stage % 2) {
      work.team->share_tasks<kvn::TaskOrder::kInterleaved>(member, count, add_up_task);
    } else {
      work.team->share_tasks(member, count, add_up_task);
    }
  }
}

Work do_work(kvn::ThreadTeam* team, uint32_t seed, int late_member) {
  Work work = {team, seed, late_member, {}, {}};
  for (int place = 0; place < kTasks; ++place) work.sums[0][place] = place + seed % 7;
  team->run(add_up, &work);
  return work;
}

void check_same(const Work& found, const Work& expected) {
  for (int stage = 0; stage < kStages; ++stage)
    for (int task = 0; task < kTasks; ++task) {
      CHECK(found.counts[stage][task] == (stage % 3 || task == 0));
      CHECK(found.sums[stage + 1][task] == expected.sums[stage + 1][task]);
    }
}

}  // namespace

TEST(every_task_is_done_once_and_in_its_stage) {
  std::unique_ptr<kvn::ThreadTeam> alone(kvn::ThreadTeam::create(1));
  for (int size : {2, 3, 6}) {
    std::unique_ptr<kvn::ThreadTeam> team(kvn::ThreadTeam::create(size));
    CHECK(team != nullptr);
    for (uint32_t seed = 0; seed < 60; ++seed)
      for (int late_member = -1; late_member < 2; ++late_member)
        check_same(do_work(team.get(), seed, late_member), do_work(alone.get(), seed, -2));
  }
}

TEST(a_member_does_its_own_part_and_then_those_of_the_others) {
  using List = std::vector<int64_t>;
  constexpr auto kConsecutive = kvn::TaskOrder::kConsecutive;
  constexpr auto kInterleaved = kvn::TaskOrder::kInterleaved;
  CHECK((list_tasks_of_first<kConsecutive>(2, 5) == List{0, 1, 2, 3, 4}));
  CHECK((list_tasks_of_first<kInterleaved>(2, 5) == List{0, 2, 4, 1, 3}));
  CHECK((list_tasks_of_first<kConsecutive>(3, 8) == List{0, 1, 2, 3, 4, 5, 6, 7}));
  CHECK((list_tasks_of_first<kInterleaved>(3, 8) == List{0, 3, 6, 1, 4, 7, 2, 5}));
  CHECK((list_tasks_of_first<kInterleaved>(3, 2) == List{0, 1}));
}

TEST(jobs_without_tasks_and_without_pauses) {
  std::unique_ptr<kvn::ThreadTeam> team(kvn::ThreadTeam::create(3));
  int64_t total = 0;
  struct Counted {
    kvn::ThreadTeam* team;
    int64_t* total;
  } counted{team.get(), &total};
  for (int number = 0; number < 20000; ++number)
    team->run(
        [](void* argument, int member) {
          auto& job = *static_cast<Counted*>(argument);
          job.team->share_tasks(member, 0, [](int64_t) { CHECK(false); });
          job.team->share_tasks(member, 1, [&](int64_t) { ++*job.total; });
        },
        &counted);
  CHECK(total == 20000);
}

// A member may come to its first job when the team is told to end.
TEST(a_team_ends_right_after_its_job) {
  for (int number = 0; number < 3000; ++number) {
    std::unique_ptr<kvn::ThreadTeam> team(kvn::ThreadTeam::create(2));
    for (int job = 0; job <= number % 3; ++job) team->run([](void*, int) {}, nullptr);
  }
}

TEST(a_team_ends_while_its_members_sleep) {
  for (int number = 0; number < 50; ++number) {
    std::unique_ptr<kvn::ThreadTeam> team(kvn::ThreadTeam::create(4));
    if (number % 2) do_work(team.get(), 1, -1);
  }
}

TEST(jobs_run_on_the_members_that_are_used) {
  constexpr int kSize = 4;
  std::unique_ptr<kvn::ThreadTeam> team(kvn::ThreadTeam::create(kSize));
  std::unique_ptr<kvn::ThreadTeam> alone(kvn::ThreadTeam::create(1));
  struct Ran {
    int most;
    std::atomic<int> members{0};
  };
  for (uint32_t number = 0; number < 3000; ++number) {
    const int count = static_cast<int>(mix(number) % (kSize + 2));  // 0 is 1, and 5 is 4
    team->use_members(count);
    Ran ran{count < 1 ? 1 : count};
    team->run(
        [](void* argument, int member) {
          Ran& found = *static_cast<Ran*>(argument);
          CHECK(member < found.most);
          ++found.members;
        },
        &ran);
    CHECK(ran.members >= 1);
    if (number % 100 == 0)
      check_same(do_work(team.get(), number, -1), do_work(alone.get(), number, -2));
  }
}
