// The launch plan as the executor sees it. Mirror of jax_fa_blackwell/plan/launch.py, which defines the byte format and
// says what each field means.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "sha256.h"

namespace jfa {

inline constexpr uint32_t kPlanVersion = 1;
inline constexpr size_t kMaxOperands = 64;
inline constexpr size_t kMaxParams = 256;
inline constexpr size_t kMaxParamBytes = 4096;
inline constexpr size_t kMaxPrograms = 16;
inline constexpr size_t kMaxRank = 5;

// The order of the enumerators is that of the tables in launch.py.
enum class ElementType : uint32_t {
  kBFloat16, kFloat16, kFloat32, kInt32, kUint8, kFloat64, kInt64, kUint32, kUint16, kUint64, kCount
};
enum class Swizzle : uint32_t { kNone, k32B, k64B, k128B, kCount };
enum class OutOfBoundsFill : uint32_t { kZero, kNan, kCount };
enum class L2Promotion : uint32_t { kNone, k64B, k128B, k256B, kCount };

uint32_t ElementBytes(ElementType type);

struct TensorMap {
  static constexpr size_t kSize = 128, kAlignment = 64;
  uint32_t operand = 0;
  int64_t offset_bytes = 0;
  ElementType element_type = ElementType::kBFloat16;
  uint32_t rank = 0;
  std::array<uint64_t, kMaxRank> dims{};
  std::array<uint64_t, kMaxRank> strides_bytes{};  // rank - 1 of them, of dimensions 1, 2, ...
  std::array<uint32_t, kMaxRank> box{};
  std::array<uint32_t, kMaxRank> element_strides{};
  Swizzle swizzle = Swizzle::kNone;
  OutOfBoundsFill fill = OutOfBoundsFill::kZero;
  L2Promotion l2_promotion = L2Promotion::kNone;
};

struct Pointer {
  static constexpr size_t kSize = 8, kAlignment = 8;
  uint32_t operand = 0;
  int64_t offset_bytes = 0;
};

struct Int32 {
  static constexpr size_t kSize = 4, kAlignment = 8;
  int32_t value = 0;
};

struct Float32 {
  static constexpr size_t kSize = 4, kAlignment = 8;
  float value = 0;
};

struct Bytes {
  static constexpr size_t kAlignment = 8;
  std::string data;
};

using Param = std::variant<TensorMap, Pointer, Int32, Float32, Bytes>;

size_t ParamSize(const Param& param);
// Alignment in the executor's parameter block, at least 8.
size_t ParamAlignment(const Param& param);
inline size_t AlignUp(size_t offset, size_t alignment) { return (offset + alignment - 1) / alignment * alignment; }

struct Fill {
  uint32_t operand = 0;
  int64_t offset_bytes = 0;
  int64_t words = 0;
  uint32_t word = 0;
};

using Extents = std::array<uint32_t, 3>;

struct Launch {
  std::string kernel;
  Sha256Digest sha256{};
  std::string symbol;
  Extents grid{}, block{}, cluster{};
  uint32_t shared_bytes = 0;
  bool programmatic = false;
  std::vector<Param> params;

  uint32_t ClusterBlocks() const { return cluster[0] * cluster[1] * cluster[2]; }
};

using Step = std::variant<Fill, Launch>;

struct Program {
  std::string arch;
  std::vector<Step> steps;
};

struct LaunchPlan {
  std::string name;
  std::vector<int64_t> argument_bytes;
  std::vector<int64_t> result_bytes;
  std::vector<Program> programs;

  // Size of an operand by its index in arguments followed by results.
  int64_t OperandBytes(size_t operand) const {
    return operand < argument_bytes.size() ? argument_bytes[operand] : result_bytes[operand - argument_bytes.size()];
  }
};

// Reads a plan and checks every rule that the Python classes check. Throws Error (kInvalidArgument) that says what is
// wrong and where; allocates no more than a small multiple of the size of `bytes`.
LaunchPlan DecodePlan(std::string_view bytes);

}  // namespace jfa
