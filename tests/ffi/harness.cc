#include "harness.h"

#include <algorithm>
#include <atomic>
#include <mutex>

namespace harness {
namespace {
std::atomic<int> failures{0};
std::mutex mutex;
}  // namespace

std::vector<Test>& Tests() {
  static std::vector<Test> tests;
  return tests;
}

void Fail(const char* file, int line, const std::string& what) {
  std::lock_guard<std::mutex> lock(mutex);
  ++failures;
  std::cout << file << ":" << line << ": " << what << std::endl;
}

void ExpectError(const char* file, int line, jfa::ErrorCode code, const std::vector<std::string>& texts,
                 const std::function<void()>& body) {
  try {
    body();
  } catch (const jfa::Error& error) {
    ExpectEqual(file, line, error.what(), static_cast<int>(error.code()), static_cast<int>(code));
    const std::string message = error.what();
    for (const std::string& text : texts) {
      if (message.find(text) == std::string::npos) Fail(file, line, "no '" + text + "' in: " + message);
    }
    return;
  }
  Fail(file, line, "no error was thrown");
}

}  // namespace harness

int main(int argc, char** argv) {
  const std::vector<std::string> suites(argv + 1, argv + argc);
  int ran = 0;
  for (const harness::Test& test : harness::Tests()) {
    if (std::find(suites.begin(), suites.end(), test.suite) == suites.end()) continue;
    ++ran;
    const int before = harness::failures;
    try {
      test.body();
    } catch (const std::exception& error) {
      harness::Fail(test.suite.c_str(), 0, std::string("unexpected: ") + error.what());
    }
    std::cout << (harness::failures == before ? "ok " : "FAILED ") << test.suite << "." << test.name << std::endl;
  }
  std::cout << ran << " tests, " << harness::failures << " failures" << std::endl;
  return ran > 0 && harness::failures == 0 ? 0 : 1;
}
