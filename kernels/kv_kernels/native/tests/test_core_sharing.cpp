// Nodes that share cores, each with a slot on one page.
#include "core_sharing.h"

#include <time.h>
#include <unistd.h>

#include <memory>
#include <thread>
#include <vector>

#include "check.h"

namespace {

struct Host {
  explicit Host(int num_nodes, int cores) : page(new kvn::SharingPage()) {
    for (int slot = 0; slot < num_nodes; ++slot)
      nodes.emplace_back(new kvn::CoreSharing(page.get(), slot, cores));
  }
  std::unique_ptr<kvn::SharingPage> page;
  std::vector<std::unique_ptr<kvn::CoreSharing>> nodes;
};

void decode(kvn::CoreSharing& node) { node.begin_step(false); }
void compute_prompt(kvn::CoreSharing& node) { node.begin_step(true); }

// Let the slot look as if its node had last said something so many seconds ago.
void grow_old(kvn::SharingPage& page, int slot, uint64_t seconds) {
  page.slots[slot].activity -= seconds * 1'000'000 << 2;
}

}  // namespace

TEST(a_node_that_computes_alone_uses_all_cores) {
  Host host(3, 8);
  decode(*host.nodes[0]);
  CHECK(host.nodes[0]->choose_num_threads() == 8);
  host.nodes[0]->end_step();
  usleep(30'000);  // longer than between two steps
  compute_prompt(*host.nodes[1]);
  CHECK(host.nodes[1]->choose_num_threads() == 8);
}

TEST(prompts_leave_decode_steps_all_cores_and_use_their_part) {
  Host host(3, 8);
  compute_prompt(*host.nodes[0]);
  CHECK(host.nodes[0]->choose_num_threads() == 8);
  decode(*host.nodes[1]);
  CHECK(host.nodes[1]->choose_num_threads() == 8);
  CHECK(host.nodes[0]->choose_num_threads() == 4);
  compute_prompt(*host.nodes[2]);
  CHECK(host.nodes[0]->choose_num_threads() == 2);  // 8 / 3
  CHECK(host.nodes[1]->choose_num_threads() == 8);
  host.nodes[0]->end_step();
  CHECK(host.nodes[2]->choose_num_threads() == 4);
}

TEST(a_node_between_two_decode_steps_counts_for_a_moment) {
  Host host(2, 2);
  compute_prompt(*host.nodes[0]);
  decode(*host.nodes[1]);
  host.nodes[1]->end_step();
  CHECK(host.nodes[0]->choose_num_threads() == 1);
  grow_old(*host.page, 1, 1);
  CHECK(host.nodes[0]->choose_num_threads() == 2);
}

TEST(decode_steps_divide_the_cores_and_each_has_one) {
  Host host(3, 2);
  for (auto& node : host.nodes) decode(*node);
  for (auto& node : host.nodes) CHECK(node->choose_num_threads() == 1);
}

TEST(a_node_that_died_in_a_step_is_forgotten) {
  Host host(2, 4);
  decode(*host.nodes[0]);
  decode(*host.nodes[1]);
  CHECK(host.nodes[0]->choose_num_threads() == 2);
  grow_old(*host.page, 1, 3);
  CHECK(host.nodes[0]->choose_num_threads() == 4);
}

TEST(a_long_prompt_counts_as_long_as_it_is_computed) {
  Host host(2, 4);
  compute_prompt(*host.nodes[0]);
  grow_old(*host.page, 0, 3);
  CHECK(host.nodes[0]->choose_num_threads() == 4);  // says that it computes
  compute_prompt(*host.nodes[1]);
  CHECK(host.nodes[1]->choose_num_threads() == 2);
}

TEST(a_slot_that_is_taken_again_says_nothing_of_its_last_node) {
  Host host(2, 2);
  decode(*host.nodes[0]);
  decode(*host.nodes[1]);
  kvn::CoreSharing successor(host.page.get(), 1, 2);
  CHECK(host.nodes[0]->choose_num_threads() == 2);
}

TEST(nodes_on_threads_read_and_write_the_page_at_once) {
  Host host(3, 4);
  std::vector<std::thread> threads;
  for (auto& node : host.nodes)
    threads.emplace_back([&node] {
      for (int step = 0; step < 2000; ++step) {
        node->begin_step(step % 3 == 0);
        const int count = node->choose_num_threads();
        CHECK(count >= 1 && count <= 4);
        node->end_step();
      }
    });
  for (std::thread& thread : threads) thread.join();
}
