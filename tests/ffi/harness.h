// A minimal test harness: TEST registers, EXPECT* report and go on, main runs the suites named on the command line.
#pragma once

#include <functional>
#include <iostream>
#include <sstream>
#include <string>
#include <vector>

#include "error.h"

namespace harness {

struct Test {
  std::string suite, name;
  std::function<void()> body;
};

std::vector<Test>& Tests();
void Fail(const char* file, int line, const std::string& what);

struct Registration {
  Registration(std::string suite, std::string name, std::function<void()> body) {
    Tests().push_back({std::move(suite), std::move(name), std::move(body)});
  }
};

template <typename A, typename B>
void ExpectEqual(const char* file, int line, const char* what, const A& have, const B& want) {
  if (have == want) return;
  std::ostringstream out;
  out << what << ": have " << have << ", want " << want;
  Fail(file, line, out.str());
}

// Runs `body`, which must throw jfa::Error with `code` and every text of `texts` in its message.
void ExpectError(const char* file, int line, jfa::ErrorCode code, const std::vector<std::string>& texts,
                 const std::function<void()>& body);

}  // namespace harness

template <typename... Strings>
std::vector<std::string> Texts(const Strings&... strings) {
  return {std::string(strings)...};
}

#define TEST(suite, name)                                                                   \
  static void suite##_##name();                                                             \
  static const harness::Registration suite##_##name##_registration(#suite, #name, suite##_##name); \
  static void suite##_##name()

#define EXPECT(condition) \
  if (!(condition)) harness::Fail(__FILE__, __LINE__, #condition)
#define EXPECT_EQ(have, want) harness::ExpectEqual(__FILE__, __LINE__, #have, have, want)
#define EXPECT_ERROR(code, texts, ...) \
  harness::ExpectError(__FILE__, __LINE__, jfa::ErrorCode::code, texts, [&] { __VA_ARGS__; })
