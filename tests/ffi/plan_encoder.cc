#include "plan_encoder.h"

#include <cstring>

namespace {

class Writer {
 public:
  template <typename T>
  void Scalar(T value) {
    char bytes[sizeof(T)];
    std::memcpy(bytes, &value, sizeof(T));
    out.append(bytes, sizeof(T));
  }
  void U32(uint32_t value) { Scalar(value); }
  void I64(int64_t value) { Scalar(value); }
  void Text(const std::string& text) {
    U32(static_cast<uint32_t>(text.size()));
    out += text;
  }

  void Write(const jfa::TensorMap& map) {
    U32(0), U32(map.operand), I64(map.offset_bytes), U32(static_cast<uint32_t>(map.element_type));
    U32(map.rank);
    for (uint32_t i = 0; i < map.rank; ++i) Scalar(map.dims[i]);
    U32(map.rank - 1);
    for (uint32_t i = 0; i + 1 < map.rank; ++i) Scalar(map.strides_bytes[i]);
    U32(map.rank);
    for (uint32_t i = 0; i < map.rank; ++i) U32(map.box[i]);
    U32(map.rank);
    for (uint32_t i = 0; i < map.rank; ++i) U32(map.element_strides[i]);
    U32(static_cast<uint32_t>(map.swizzle)), U32(static_cast<uint32_t>(map.fill));
    U32(static_cast<uint32_t>(map.l2_promotion));
  }
  void Write(const jfa::Pointer& pointer) { U32(1), U32(pointer.operand), I64(pointer.offset_bytes); }
  void Write(const jfa::Int32& int32) { U32(2), I64(int32.value); }
  void Write(const jfa::Float32& float32) { U32(3), Scalar(float32.value); }
  void Write(const jfa::Bytes& bytes) { U32(4), Text(bytes.data); }

  void Write(const jfa::Fill& fill) {
    U32(0), U32(fill.operand), I64(fill.offset_bytes), I64(fill.words), U32(fill.word);
  }
  void Write(const jfa::Launch& launch) {
    U32(1), Text(launch.kernel);
    out.append(launch.sha256.begin(), launch.sha256.end());
    Text(launch.symbol);
    for (const jfa::Extents* extents : {&launch.grid, &launch.block, &launch.cluster}) {
      for (uint32_t extent : *extents) U32(extent);
    }
    U32(launch.shared_bytes), U32(launch.programmatic);
    U32(static_cast<uint32_t>(launch.params.size()));
    for (const jfa::Param& param : launch.params) {
      std::visit([&](const auto& p) { Write(p); }, param);
    }
  }

  std::string out;
};

}  // namespace

std::string EncodePlan(const jfa::LaunchPlan& plan, uint32_t version) {
  Writer writer;
  writer.out = "JFAP";
  writer.U32(version), writer.Text(plan.name);
  for (const auto* sizes : {&plan.argument_bytes, &plan.result_bytes}) {
    writer.U32(static_cast<uint32_t>(sizes->size()));
    for (int64_t size : *sizes) writer.I64(size);
  }
  writer.U32(static_cast<uint32_t>(plan.programs.size()));
  for (const jfa::Program& program : plan.programs) {
    writer.Text(program.arch), writer.U32(static_cast<uint32_t>(program.steps.size()));
    for (const jfa::Step& step : program.steps) {
      std::visit([&](const auto& s) { writer.Write(s); }, step);
    }
  }
  return writer.out;
}
