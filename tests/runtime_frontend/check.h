// A test program in C++: TEST(name) { CHECK(...); } and one main() that runs them all or those
// named.
#ifndef BLINK_TESTS_CHECK_H
#define BLINK_TESTS_CHECK_H

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <sstream>
#include <vector>

namespace blink::testing {

struct Test {
  const char* name;
  void (*run)();
};

inline std::vector<Test>& tests() {
  static std::vector<Test> all;
  return all;
}

struct Registration {
  Registration(const char* name, void (*run)()) { tests().push_back({name, run}); }
};

[[noreturn]] inline void fail(const char* file, int line, const std::string& what) {
  std::fprintf(stderr, "%s:%d: %s\n", file, line, what.c_str());
  std::exit(1);
}

template <typename A, typename B>
void check_equal(const char* file, int line, const char* text, const A& a, const B& b) {
  if (a == b) return;
  std::ostringstream out;
  out << text << "\n  left:  " << a << "\n  right: " << b;
  fail(file, line, out.str());
}

inline int run_all(int argc, char** argv) {
  int count = 0;
  for (const Test& test : tests()) {
    if (argc > 1 && std::strcmp(argv[1], test.name) != 0) continue;
    std::printf("%s\n", test.name);
    std::fflush(stdout);
    test.run();
    ++count;
  }
  std::printf("%d tests passed\n", count);
  return count > 0 ? 0 : 2;
}

}  // namespace blink::testing

#define TEST(name)                                                               \
  static void test_##name();                                                     \
  static const blink::testing::Registration register_##name(#name, test_##name); \
  static void test_##name()
#define CHECK(condition) \
  if (!(condition)) blink::testing::fail(__FILE__, __LINE__, "failed: " #condition)
#define CHECK_EQUAL(a, b) blink::testing::check_equal(__FILE__, __LINE__, #a " == " #b, a, b)
#define CHECK_THROWS(expression, type)                                                 \
  try {                                                                                \
    expression;                                                                        \
    blink::testing::fail(__FILE__, __LINE__, "did not throw " #type ": " #expression); \
  } catch (const type&) {                                                              \
  }

#define BLINK_TEST_MAIN \
  int main(int argc, char** argv) { return blink::testing::run_all(argc, argv); }

#endif  // BLINK_TESTS_CHECK_H
