#include "support.h"

#include <dlfcn.h>
#include <elf.h>

#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <iterator>

#include "driver.h"

fake::State& Driver() {
  static fake::State* const state = [] {
    void* library = dlopen("libcuda.so.1", RTLD_NOW);
    void* function = library != nullptr ? dlsym(library, "fake_driver_state") : nullptr;
    if (function == nullptr) {
      std::cerr << "libcuda.so.1 is not the fake driver; set LD_LIBRARY_PATH to its folder" << std::endl;
      std::exit(2);
    }
    return reinterpret_cast<fake::State* (*)()>(function)();
  }();
  return *state;
}

void ResetDriver() {
  std::lock_guard<std::mutex> lock(Driver().mutex);
  Driver().fail.clear();
  Driver().calls.clear();
  Driver().tensor_maps.clear();
  Driver().launches.clear();
  Driver().memsets.clear();
}

Failing::Failing(const std::string& function, fake::Result result) : function_(function) {
  std::lock_guard<std::mutex> lock(Driver().mutex);
  Driver().fail[function] = result;
}

Failing::~Failing() {
  std::lock_guard<std::mutex> lock(Driver().mutex);
  Driver().fail.erase(function_);
}

Folder::Folder() {
  std::string pattern = (std::filesystem::temp_directory_path() / "jfa_test_XXXXXX").string();
  if (mkdtemp(pattern.data()) == nullptr) std::abort();
  path_ = pattern;
}

Folder::~Folder() { std::filesystem::remove_all(path_); }

jfa::Sha256Digest Folder::AddCubin(const std::string& lines) const {
  const std::string bytes = CubinBytes(lines);
  const jfa::Sha256Digest digest = jfa::Sha256(bytes);
  Write(jfa::Hex(digest) + ".cubin", bytes);
  return digest;
}

void Folder::Write(const std::string& name, const std::string& bytes) const {
  std::ofstream(path_ + "/" + name, std::ios::binary | std::ios::trunc) << bytes;
}

std::string Folder::Read(const std::string& name) const {
  std::ifstream in(path_ + "/" + name, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), std::istreambuf_iterator<char>()};
}

std::string CubinBytes(const std::string& lines) {
  Elf64_Ehdr header = {};
  std::memcpy(header.e_ident, ELFMAG, SELFMAG);
  header.e_ident[EI_CLASS] = ELFCLASS64;
  return std::string(reinterpret_cast<const char*>(&header), sizeof(header)) + lines + std::string(1, '\0');
}

jfa::LaunchPlan GoodPlan(const jfa::Sha256Digest& cubin) {
  jfa::TensorMap map;
  map.operand = 1, map.offset_bytes = 1024;
  map.element_type = jfa::ElementType::kFloat16, map.rank = 3;
  map.dims = {64, 4, 2}, map.strides_bytes = {256, 1024}, map.box = {32, 2, 1}, map.element_strides = {1, 2, 1};
  map.swizzle = jfa::Swizzle::k64B, map.fill = jfa::OutOfBoundsFill::kNan, map.l2_promotion = jfa::L2Promotion::k256B;

  jfa::Launch main;
  main.kernel = "main kernel", main.sha256 = cubin, main.symbol = "main";
  main.grid = {6, 2, 3}, main.block = {64, 2, 1}, main.cluster = {2, 1, 3};
  main.shared_bytes = 100 * 1024, main.programmatic = true;
  main.params = {map, jfa::Pointer{2, 48}, jfa::Int32{-7}, jfa::Float32{0.5f}, jfa::Bytes{"twelve bytes"}};

  jfa::Launch plain;
  plain.kernel = "plain kernel", plain.sha256 = cubin, plain.symbol = "plain";
  plain.grid = {1, 1, 1}, plain.block = {256, 1, 1}, plain.cluster = {1, 1, 1};

  jfa::LaunchPlan plan;
  plan.name = "good plan";
  plan.argument_bytes = {4096, 4096}, plan.result_bytes = {4096, 64};
  plan.programs = {{"sm_100a", {}}, {"sm_90a", {jfa::Fill{3, 16, 12, 0xffffffff}, main, plain}}};
  return plan;
}

jfa::Launch& MainLaunch(jfa::LaunchPlan& plan) { return std::get<jfa::Launch>(plan.programs[1].steps[1]); }

std::vector<jfa::Buffer> Operands(int call) {
  auto at = [&](int operand) { return reinterpret_cast<void*>(0x7000000000 + 0x100000 * call + 0x10000 * operand); };
  return {{at(0), 4096}, {at(1), 4096}, {at(2), 4096}, {at(3), 64}};
}

void Execute(jfa::Executor& executor, void* stream, const std::vector<jfa::Buffer>& operands) {
  executor.Execute(static_cast<jfa::cu::Stream>(stream), operands.data(), 2, operands.size() - 2);
}

void RunOnce(jfa::CubinStore& store, const jfa::LaunchPlan& plan, void* stream) {
  jfa::Executor executor(plan, store);
  executor.Initialize(static_cast<jfa::cu::Stream>(stream));
  Execute(executor, stream, Operands());
}
