// A test program of its own, without a framework: TEST(name) { CHECK(condition); }.
#pragma once

#include <cstdio>
#include <cstdlib>

namespace kvn_test {

struct Test {
  const char* name;
  void (*run)();
  Test* next;
};

Test*& first_test();

struct Registration {
  Registration(Test* test) {
    test->next = first_test();
    first_test() = test;
  }
};

}  // namespace kvn_test

#define TEST(name)                                                         \
  static void test_##name();                                               \
  static kvn_test::Test entry_##name{#name, test_##name, nullptr};         \
  static const kvn_test::Registration registration_##name(&entry_##name);  \
  static void test_##name()

#define CHECK(condition)                                                              \
  do {                                                                                \
    if (!(condition)) {                                                               \
      std::fprintf(stderr, "%s:%d: not true: %s\n", __FILE__, __LINE__, #condition);  \
      std::exit(1);                                                                   \
    }                                                                                 \
  } while (false)
