// What the tests share: a folder of fake cubins, a plan that works, and the fake driver's state.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "executor.h"
#include "fake_driver.h"
#include "plan.h"
#include "sha256.h"

// The state of the fake driver that libcuda.so.1 names; ends the process if another driver was found.
fake::State& Driver();

// Forgets records and failures.
void ResetDriver();

// Makes a driver function fail for a scope.
class Failing {
 public:
  Failing(const std::string& function, fake::Result result);
  ~Failing();

 private:
  std::string function_;
};

// A new folder under the working directory, removed in the end.
class Folder {
 public:
  Folder();
  ~Folder();
  const std::string& path() const { return path_; }

  // Writes a fake cubin with these lines and returns its digest.
  jfa::Sha256Digest AddCubin(const std::string& lines) const;
  void Write(const std::string& name, const std::string& bytes) const;
  std::string Read(const std::string& name) const;

 private:
  std::string path_;
};

// The bytes of a fake cubin.
std::string CubinBytes(const std::string& lines);

inline constexpr char kGoodCubin[] =
    "arch sm_90a\n"
    "kernel main 1024 128 128 8 4 4 12\n"
    "kernel plain 0 256\n";

// Arguments 0 and 1 of 4096 bytes, results 2 of 4096 and 3 of 64; fills result 3, then launches `main`, then `plain`.
jfa::LaunchPlan GoodPlan(const jfa::Sha256Digest& cubin);

// The launch of `main` in GoodPlan.
jfa::Launch& MainLaunch(jfa::LaunchPlan& plan);

// Operands of GoodPlan, at made-up aligned addresses that depend on `call`.
std::vector<jfa::Buffer> Operands(int call = 0);

void Execute(jfa::Executor& executor, void* stream, const std::vector<jfa::Buffer>& operands);

// Initializes a new executor of `plan` on the stream and runs it once.
void RunOnce(jfa::CubinStore& store, const jfa::LaunchPlan& plan, void* stream = fake::Stream(0));
