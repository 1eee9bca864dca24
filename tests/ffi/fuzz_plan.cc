// Feeds the plan's reader random and mutated bytes: `fuzz_plan COUNT SEED`. An error is right, a crash is not; what is
// accepted must satisfy the rules that the executor relies on, and must survive being written and read again.
#include <sys/resource.h>

#include <cstdlib>
#include <cstring>
#include <iostream>
#include <memory>
#include <random>

#include "error.h"
#include "plan.h"
#include "plan_encoder.h"

namespace {

using Random = std::mt19937_64;

uint64_t Below(Random& random, uint64_t n) { return random() % n; }

void Require(bool condition, const char* what) {
  if (condition) return;
  std::cerr << "accepted a plan that breaks a rule: " << what << std::endl;
  std::abort();
}

jfa::LaunchPlan RandomPlan(Random& random) {
  jfa::LaunchPlan plan;
  plan.name = std::string(1 + Below(random, 6), 'p');
  for (auto* sizes : {&plan.argument_bytes, &plan.result_bytes}) {
    for (uint64_t i = 1 + Below(random, 3); i > 0; --i) sizes->push_back(static_cast<int64_t>(1 << (12 + Below(random, 4))));
  }
  const uint32_t operands = static_cast<uint32_t>(plan.argument_bytes.size() + plan.result_bytes.size());
  auto operand = [&] { return static_cast<uint32_t>(Below(random, operands)); };
  const char* const arches[] = {"sm_90a", "sm_100a", "sm_103a"};
  for (uint64_t p = Below(random, 4); p > 0; --p) {
    jfa::Program program{arches[p - 1], {}};
    for (uint64_t s = Below(random, 3); s > 0; --s) {
      if (Below(random, 3) == 0) {
        program.steps.push_back(jfa::Fill{operand(), 16, 8, static_cast<uint32_t>(random())});
        continue;
      }
      jfa::Launch launch;
      launch.kernel = "kernel", launch.symbol = "symbol";
      launch.grid = {4, 2, 1}, launch.block = {128, 1, 1}, launch.cluster = {1u << Below(random, 3), 1, 1};
      launch.shared_bytes = static_cast<uint32_t>(Below(random, 232449));
      launch.programmatic = Below(random, 2) == 1;
      for (uint64_t i = Below(random, 5); i > 0; --i) {
        jfa::TensorMap map;
        map.operand = operand(), map.rank = static_cast<uint32_t>(1 + Below(random, 5));
        for (uint32_t d = 0; d < map.rank; ++d) {
          map.dims[d] = d == 0 ? 32 : 1 + Below(random, 2);
          map.strides_bytes[d] = 64u << d;
          map.box[d] = d == 0 ? 16 : 1, map.element_strides[d] = 1;
        }
        map.swizzle = static_cast<jfa::Swizzle>(Below(random, 4));
        if (map.swizzle == jfa::Swizzle::k32B || map.swizzle == jfa::Swizzle::k64B) map.box[0] = 16;
        switch (Below(random, 5)) {
          case 0: launch.params.push_back(map); break;
          case 1: launch.params.push_back(jfa::Pointer{operand(), 16}); break;
          case 2: launch.params.push_back(jfa::Int32{static_cast<int32_t>(random())}); break;
          case 3: launch.params.push_back(jfa::Float32{1.5f}); break;
          default: launch.params.push_back(jfa::Bytes{std::string(1 + Below(random, 9), 'b')});
        }
      }
      program.steps.push_back(std::move(launch));
    }
    plan.programs.push_back(std::move(program));
  }
  return plan;
}

// A few of: flipped bits, a word that is an edge value, bytes taken out, repeated or put in, the end cut off.
void Mutate(Random& random, std::string& bytes) {
  constexpr uint64_t kEdges[] = {0, 1, 2, 4, 0x7f, 0xff, 0xffff, 0x7fffffff, 0x80000000, 0xffffffff,
                                 0x7fffffffffffffff, 0x8000000000000000, 0xffffffffffffffff, 1ull << 32, 1ull << 40};
  for (uint64_t n = 1 + Below(random, 4); n > 0 && !bytes.empty(); --n) {
    const size_t at = Below(random, bytes.size());
    const size_t run = std::min<size_t>(1 + Below(random, 16), bytes.size() - at);
    switch (Below(random, 6)) {
      case 0: bytes[at] = static_cast<char>(bytes[at] ^ (1 << Below(random, 8))); break;
      case 1: bytes[at] = static_cast<char>(random()); break;
      case 2: {
        const uint64_t edge = kEdges[Below(random, std::size(kEdges))];
        std::memcpy(&bytes[at], &edge, std::min<size_t>(bytes.size() - at, Below(random, 2) ? 4 : 8));
        break;
      }
      case 3: bytes.erase(at, run); break;
      case 4: bytes.insert(at, bytes.substr(Below(random, bytes.size()), run)); break;
      default: bytes.resize(at);
    }
  }
}

std::string RandomBytes(Random& random) {
  std::string bytes(Below(random, 200), '\0');
  for (char& byte : bytes) byte = static_cast<char>(random());
  // Most begin as a plan does, or all would end at the first check.
  if (Below(random, 4) != 0) bytes = std::string("JFAP\1\0\0\0\1\0\0\0p", 13) + bytes;
  return bytes;
}

void CheckAccepted(const jfa::LaunchPlan& plan) {
  const size_t operands = plan.argument_bytes.size() + plan.result_bytes.size();
  Require(operands <= jfa::kMaxOperands, "operands");
  auto inside = [&](uint32_t operand, int64_t offset, int64_t size) {
    Require(operand < operands, "operand index");
    const int64_t have = plan.OperandBytes(operand);
    Require(offset >= 0 && offset <= have && size <= have - offset, "operand range");
  };
  for (const jfa::Program& program : plan.programs) {
    for (const jfa::Step& step : program.steps) {
      if (const auto* fill = std::get_if<jfa::Fill>(&step)) {
        Require(fill->words > 0 && fill->words <= INT64_MAX / 4, "fill words");
        inside(fill->operand, fill->offset_bytes, fill->words * 4);
        continue;
      }
      const auto& launch = std::get<jfa::Launch>(step);
      Require(launch.params.size() <= jfa::kMaxParams, "parameters");
      size_t end = 0;
      for (const jfa::Param& param : launch.params) {
        end = jfa::AlignUp(end, jfa::ParamAlignment(param)) + jfa::ParamSize(param);
        if (const auto* map = std::get_if<jfa::TensorMap>(&param)) inside(map->operand, map->offset_bytes, 1);
        if (const auto* pointer = std::get_if<jfa::Pointer>(&param)) inside(pointer->operand, pointer->offset_bytes, 0);
      }
      Require(end <= jfa::kMaxParamBytes, "parameter bytes");
    }
  }
  const std::string bytes = EncodePlan(plan);
  Require(EncodePlan(jfa::DecodePlan(bytes)) == bytes, "round trip");
}

}  // namespace

int main(int argc, char** argv) {
  const uint64_t count = argc > 1 ? std::strtoull(argv[1], nullptr, 10) : 1000000;
  Random random(argc > 2 ? std::strtoull(argv[2], nullptr, 10) : 1);
  uint64_t accepted = 0;
  std::string base;
  for (uint64_t i = 0; i < count; ++i) {
    std::string bytes;
    if (i % 4 == 0) {
      bytes = RandomBytes(random);
    } else {
      if (i % 64 == 1) base = EncodePlan(RandomPlan(random));  // a new plan now and then; making one costs more than reading
      bytes = base;
      if (i % 64 != 1) Mutate(random, bytes);
    }
    // Bytes of exactly this size on the heap, so that the sanitizer sees a read past their end.
    auto exact = std::make_unique<char[]>(bytes.size());
    std::memcpy(exact.get(), bytes.data(), bytes.size());
    try {
      CheckAccepted(jfa::DecodePlan(std::string_view(exact.get(), bytes.size())));
      ++accepted;
    } catch (const jfa::Error&) {
      Require(i % 64 != 1, "refused a plan that is right");
    }
  }
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  std::cout << count << " inputs, " << accepted << " accepted, " << usage.ru_maxrss / 1024 << " MiB" << std::endl;
  return 0;
}
