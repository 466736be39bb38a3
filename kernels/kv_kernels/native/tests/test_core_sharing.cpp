// Nodes that share cores, each with a slot on one page.
#include "core_sharing.h"

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

int step(kvn::CoreSharing& node) { return node.choose_num_threads(); }

// Let time pass for what the node has said.
void pass(kvn::SharingPage& page, int slot, uint64_t microseconds) {
  page.slots[slot].busy_until -= microseconds;
}

}  // namespace

TEST(a_node_that_computes_alone_uses_all_cores) {
  Host host(3, 8);
  CHECK(step(*host.nodes[1]) == 8);
  CHECK(step(*host.nodes[1]) == 8);
}

TEST(nodes_that_compute_divide_the_cores) {
  Host host(3, 8);
  CHECK(step(*host.nodes[0]) == 8);
  CHECK(step(*host.nodes[1]) == 4);
  CHECK(step(*host.nodes[0]) == 4);
  CHECK(step(*host.nodes[2]) == 2);  // 8 / 3
  CHECK(step(*host.nodes[0]) == 2);
}

TEST(each_node_has_a_core) {
  Host host(3, 2);
  for (auto& node : host.nodes) step(*node);
  for (auto& node : host.nodes) CHECK(step(*node) == 1);
}

TEST(a_node_between_two_steps_counts_for_a_moment) {
  Host host(2, 2);
  step(*host.nodes[0]);
  step(*host.nodes[1]);
  const uint64_t during = host.page->slots[1].busy_until;
  host.nodes[1]->end_step();
  CHECK(host.page->slots[1].busy_until > during - 2'000'000);
  CHECK(host.page->slots[1].busy_until < during);
  pass(*host.page, 1, 20'000);
  CHECK(step(*host.nodes[0]) == 2);
}

TEST(a_node_that_died_in_a_step_is_forgotten) {
  Host host(2, 4);
  step(*host.nodes[0]);
  step(*host.nodes[1]);
  pass(*host.page, 1, 1'000'000);
  CHECK(step(*host.nodes[0]) == 2);
  pass(*host.page, 1, 1'000'000);
  CHECK(step(*host.nodes[0]) == 4);
}

TEST(a_long_step_counts_as_long_as_it_is_computed) {
  Host host(2, 4);
  step(*host.nodes[0]);
  pass(*host.page, 0, 3'000'000);
  step(*host.nodes[0]);  // the next half of a layer
  CHECK(step(*host.nodes[1]) == 2);
}

TEST(a_node_whose_slot_another_one_has_cleared_has_cores) {
  Host host(1, 2);
  kvn::CoreSharing same(host.page.get(), 0, 2);
  host.page->slots[0].busy_until = 0;
  CHECK(step(same) == 2);
}

TEST(a_slot_that_is_taken_again_says_nothing_of_its_last_node) {
  Host host(2, 2);
  step(*host.nodes[0]);
  step(*host.nodes[1]);
  kvn::CoreSharing successor(host.page.get(), 1, 2);
  CHECK(step(*host.nodes[0]) == 2);
}

TEST(nodes_on_threads_read_and_write_the_page_at_once) {
  Host host(3, 4);
  std::vector<std::thread> threads;
  for (auto& node : host.nodes)
    threads.emplace_back([&node] {
      for (int number = 0; number < 2000; ++number) {
        const int count = node->choose_num_threads();
        CHECK(count >= 1 && count <= 4);
        node->end_step();
      }
    });
  for (std::thread& thread : threads) thread.join();
}
