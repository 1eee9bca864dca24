// Reads a file of length-prefixed byte strings, each perhaps a plan; writes for each one line: the fields, or "error ...".
// tests/unit/test_ffi_native.py writes the same lines from the Python classes.
#include <cstring>
#include <fstream>
#include <iostream>
#include <iterator>

#include "error.h"
#include "plan.h"
#include "sha256.h"

namespace {

std::string HexOf(const std::string& bytes) {
  constexpr char kDigits[] = "0123456789abcdef";
  std::string out;
  for (unsigned char byte : bytes) out += kDigits[byte >> 4], out += kDigits[byte & 15];
  return out;
}

template <typename Items>
std::string Join(const Items& items, size_t count) {
  std::string out = "[";
  for (size_t i = 0; i < count; ++i) out += (i ? "," : "") + std::to_string(items[i]);
  return out + "]";
}

std::string Text(const jfa::TensorMap& m) {
  return jfa::Concat("map(operand=", m.operand, " offset=", m.offset_bytes, " type=",
                     static_cast<uint32_t>(m.element_type), " dims=", Join(m.dims, m.rank), " strides=",
                     Join(m.strides_bytes, m.rank - 1), " box=", Join(m.box, m.rank), " steps=",
                     Join(m.element_strides, m.rank), " swizzle=", static_cast<uint32_t>(m.swizzle), " fill=",
                     static_cast<uint32_t>(m.fill), " l2=", static_cast<uint32_t>(m.l2_promotion), ")");
}
std::string Text(const jfa::Pointer& p) { return jfa::Concat("pointer(", p.operand, " ", p.offset_bytes, ")"); }
std::string Text(const jfa::Int32& p) { return jfa::Concat("int32(", p.value, ")"); }
std::string Text(const jfa::Float32& p) {
  uint32_t bits;
  std::memcpy(&bits, &p.value, sizeof(bits));
  return jfa::Concat("float32(", bits, ")");
}
std::string Text(const jfa::Bytes& p) { return jfa::Concat("bytes(", HexOf(p.data), ")"); }

std::string Text(const jfa::Fill& f) {
  return jfa::Concat("fill(", f.operand, " ", f.offset_bytes, " ", f.words, " ", f.word, ")");
}

std::string Text(const jfa::Launch& launch) {
  std::string params;
  for (const jfa::Param& param : launch.params) {
    params += " " + std::visit([](const auto& p) { return Text(p); }, param);
  }
  return jfa::Concat("launch(", launch.kernel, "|", jfa::Hex(launch.sha256), "|", launch.symbol, "|",
                     Join(launch.grid, 3), Join(launch.block, 3), Join(launch.cluster, 3), " ", launch.shared_bytes, " ",
                     launch.programmatic, params, ")");
}

std::string Text(const jfa::LaunchPlan& plan) {
  std::string out = jfa::Concat(plan.name, "|", Join(plan.argument_bytes, plan.argument_bytes.size()),
                                Join(plan.result_bytes, plan.result_bytes.size()));
  for (const jfa::Program& program : plan.programs) {
    out += " program(" + program.arch;
    for (const jfa::Step& step : program.steps) {
      out += " " + std::visit([](const auto& s) { return Text(s); }, step);
    }
    out += ")";
  }
  return out;
}

}  // namespace

// dump_plan FILE: plans. dump_plan --sha256 FILE: the digest of each byte string.
int main(int argc, char** argv) {
  if (argc < 2) return 2;
  const bool digests = std::string(argv[1]) == "--sha256";
  std::ifstream in(argv[argc - 1], std::ios::binary);
  const std::string data((std::istreambuf_iterator<char>(in)), std::istreambuf_iterator<char>());
  for (size_t at = 0; at + 4 <= data.size();) {
    uint32_t size;
    std::memcpy(&size, data.data() + at, 4);
    // A copy of exactly this size, so that a sanitizer sees a read past its end.
    const std::string bytes = data.substr(at + 4, size);
    at += 4 + size;
    if (digests) {
      std::cout << jfa::Hex(jfa::Sha256(bytes)) << "\n";
      continue;
    }
    try {
      std::cout << Text(jfa::DecodePlan(bytes)) << "\n";
    } catch (const jfa::Error& error) {
      std::cout << "error " << error.what() << "\n";
    }
  }
  return 0;
}
