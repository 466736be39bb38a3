// Runs all tests, or those whose names contain one of the arguments.
#include <cstring>

#include "check.h"

kvn_test::Test*& kvn_test::first_test() {
  static Test* first = nullptr;
  return first;
}

static bool is_chosen(const char* name, int count, char** words) {
  for (int i = 1; i < count; ++i) {
    if (std::strstr(name, words[i])) return true;
  }
  return count == 1;
}

int main(int count, char** words) {
  int num_run = 0;
  for (kvn_test::Test* test = kvn_test::first_test(); test; test = test->next) {
    if (!is_chosen(test->name, count, words)) continue;
    std::printf("%s\n", test->name);
    std::fflush(stdout);
    test->run();
    ++num_run;
  }
  std::printf("%d passed\n", num_run);
  return num_run ? 0 : 1;
}
