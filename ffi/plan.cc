#include "plan.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <type_traits>

#include "error.h"

namespace jfa {
namespace {

constexpr std::string_view kMagic = "JFAP";
constexpr uint32_t kMaxSharedBytes = 227 * 1024;
constexpr uint32_t kMaxThreads = 1024;
constexpr uint32_t kMaxClusterBlocks = 16;

template <typename... Parts>
void Require(bool condition, const Parts&... parts) {
  if (!condition) throw Error(ErrorCode::kInvalidArgument, Concat("launch plan: ", parts...));
}

bool IsName(std::string_view text) {
  return !text.empty() && std::all_of(text.begin(), text.end(), [](char c) { return c >= ' ' && c <= '~'; });
}

// Reads the byte format. Every read checks what is left, and a count is believed only if so many items can follow.
class Reader {
 public:
  explicit Reader(std::string_view bytes) : bytes_(bytes) {}

  size_t at() const { return at_; }
  size_t left() const { return bytes_.size() - at_; }

  std::string_view Raw(size_t size) {
    Require(size <= left(), "ends early: ", size, " bytes wanted at byte ", at_, " of ", bytes_.size());
    std::string_view out = bytes_.substr(at_, size);
    at_ += size;
    return out;
  }

  template <typename T>
  T Scalar() {
    static_assert(std::is_trivially_copyable_v<T>);
    T value;
    std::memcpy(&value, Raw(sizeof(T)).data(), sizeof(T));
    return value;
  }

  uint32_t U32() { return Scalar<uint32_t>(); }
  int64_t I64() { return Scalar<int64_t>(); }

  std::string Name(const char* what) {
    std::string name(Raw(U32()));
    Require(IsName(name), what, " must be printable ASCII and not empty, at byte ", at_ - name.size());
    return name;
  }

  // One of the enumerators below `count`.
  uint32_t Choice(uint32_t count, const char* what) {
    uint32_t index = U32();
    Require(index < count, what, " must be below ", count, "; got ", index, " at byte ", at_ - 4);
    return index;
  }

  template <typename Enum>
  Enum Choice(const char* what) {
    return static_cast<Enum>(Choice(static_cast<uint32_t>(Enum::kCount), what));
  }

  // A list whose items have at least `min_bytes` each and number at most `max_items`.
  template <typename Read>
  auto List(size_t min_bytes, size_t max_items, const char* what, Read read) {
    uint32_t count = U32();
    Require(count <= left() / min_bytes, "ends early: ", count, " ", what, " wanted at byte ", at_);
    Require(count <= max_items, count, " ", what, "; at most ", max_items);
    std::vector<decltype(read())> items;
    for (uint32_t i = 0; i < count; ++i) items.push_back(read());
    return items;
  }

 private:
  std::string_view bytes_;
  size_t at_ = 0;
};

template <typename T>
void CopyList(const std::vector<T>& from, std::array<T, kMaxRank>& to) {
  std::copy(from.begin(), from.end(), to.begin());
}

bool IsFloating(ElementType type) {
  return type == ElementType::kBFloat16 || type == ElementType::kFloat16 || type == ElementType::kFloat32 ||
         type == ElementType::kFloat64;
}

uint32_t SwizzleSpan(Swizzle swizzle) { return 16u << static_cast<uint32_t>(swizzle); }

// The legality rule of cuTensorMapEncodeTiled, as launch.py states it.
void CheckTensorMap(const TensorMap& map) {
  for (uint32_t i = 0; i < map.rank; ++i) {
    Require(map.dims[i] >= 1 && map.dims[i] <= (uint64_t{1} << 32), "tensor map dim ", i, " must be 1 to 2**32; got ",
            map.dims[i]);
    Require(map.box[i] >= 1 && map.box[i] <= 256, "tensor map box extent ", i, " must be 1 to 256; got ", map.box[i]);
    Require(map.element_strides[i] >= 1 && map.element_strides[i] <= 8, "tensor map element stride ", i,
            " must be 1 to 8; got ", map.element_strides[i]);
  }
  for (uint32_t i = 0; i + 1 < map.rank; ++i) {
    uint64_t stride = map.strides_bytes[i];
    Require(stride % 16 == 0 && stride > 0 && stride < (uint64_t{1} << 40), "tensor map stride ", i,
            " must be a positive multiple of 16 bytes below 2**40; got ", stride);
  }
  Require(map.element_strides[0] == 1, "tensor map element strides must begin with 1; got ", map.element_strides[0]);
  uint32_t row_bytes = map.box[0] * ElementBytes(map.element_type);
  Require(row_bytes % 16 == 0, "tensor map box rows must be multiples of 16 bytes; got ", row_bytes);
  Require(map.swizzle == Swizzle::kNone || row_bytes <= SwizzleSpan(map.swizzle), "tensor map box rows of ", row_bytes,
          " bytes exceed the swizzle of ", SwizzleSpan(map.swizzle));
  Require(map.offset_bytes % 16 == 0, "tensor map offset must be a multiple of 16; got ", map.offset_bytes);
  Require(map.fill == OutOfBoundsFill::kZero || IsFloating(map.element_type),
          "tensor map fill 'nan' needs a floating element type");
}

TensorMap ReadTensorMap(Reader& in) {
  TensorMap map;
  map.operand = in.U32();
  map.offset_bytes = in.I64();
  map.element_type = in.Choice<ElementType>("tensor map element type");
  // Read as signed, so that a negative extent is far above every limit.
  auto dims = in.List(8, kMaxRank, "tensor map dims", [&] { return static_cast<uint64_t>(in.I64()); });
  auto strides = in.List(8, kMaxRank, "tensor map strides", [&] { return static_cast<uint64_t>(in.I64()); });
  auto box = in.List(4, kMaxRank, "tensor map box extents", [&] { return in.U32(); });
  auto element_strides = in.List(4, kMaxRank, "tensor map element strides", [&] { return in.U32(); });
  map.swizzle = in.Choice<Swizzle>("tensor map swizzle");
  map.fill = in.Choice<OutOfBoundsFill>("tensor map fill");
  map.l2_promotion = in.Choice<L2Promotion>("tensor map L2 promotion");

  map.rank = static_cast<uint32_t>(dims.size());
  if (element_strides.empty()) element_strides.assign(dims.size(), 1);
  Require(map.rank >= 1, "tensor map rank must be 1 to ", kMaxRank, "; got 0");
  Require(strides.size() + 1 == map.rank && box.size() == map.rank && element_strides.size() == map.rank,
          "tensor map of rank ", map.rank, " has ", strides.size(), " strides, ", box.size(), " box extents and ",
          element_strides.size(), " element strides");
  CopyList(dims, map.dims);
  CopyList(strides, map.strides_bytes);
  CopyList(box, map.box);
  CopyList(element_strides, map.element_strides);
  CheckTensorMap(map);
  return map;
}

Param ReadParam(Reader& in) {
  switch (in.Choice(5, "parameter kind")) {
    case 0:
      return ReadTensorMap(in);
    case 1: {
      Pointer pointer;
      pointer.operand = in.U32();
      pointer.offset_bytes = in.I64();
      return pointer;
    }
    case 2: {
      int64_t value = in.I64();
      Require(value >= std::numeric_limits<int32_t>::min() && value <= std::numeric_limits<int32_t>::max(),
              "int32 parameter out of range: ", value);
      return Int32{static_cast<int32_t>(value)};
    }
    case 3:
      return Float32{in.Scalar<float>()};
    default: {
      std::string data(in.Raw(in.U32()));
      Require(!data.empty() && data.size() <= kMaxParamBytes, "a bytes parameter has 1 to ", kMaxParamBytes,
              " bytes; got ", data.size());
      return Bytes{std::move(data)};
    }
  }
}

Fill ReadFill(Reader& in) {
  Fill fill;
  fill.operand = in.U32();
  fill.offset_bytes = in.I64();
  fill.words = in.I64();
  fill.word = in.U32();
  Require(fill.words > 0, "a fill needs at least one word; got ", fill.words);
  Require(fill.offset_bytes % 4 == 0, "a fill's offset must be a multiple of 4; got ", fill.offset_bytes);
  return fill;
}

void CheckExtents(const Launch& launch, const char* what, const Extents& extents, const Extents& limits) {
  for (size_t i = 0; i < extents.size(); ++i) {
    Require(extents[i] >= 1 && extents[i] <= limits[i], "launch of '", launch.kernel, "': ", what, " extent ", i,
            " must be 1 to ", limits[i], "; got ", extents[i]);
  }
}

void CheckLaunch(const Launch& launch) {
  auto require = [&](bool condition, const auto&... parts) {
    Require(condition, "launch of '", launch.kernel, "': ", parts...);
  };
  CheckExtents(launch, "grid", launch.grid, {2147483647u, 65535, 65535});
  CheckExtents(launch, "block", launch.block, {1024, 1024, 64});
  CheckExtents(launch, "cluster", launch.cluster, {kMaxClusterBlocks, kMaxClusterBlocks, kMaxClusterBlocks});
  uint32_t threads = launch.block[0] * launch.block[1] * launch.block[2];  // below 2**26
  require(threads <= kMaxThreads, threads, " threads in a block; at most ", kMaxThreads);
  require(launch.ClusterBlocks() <= kMaxClusterBlocks, launch.ClusterBlocks(), " blocks in a cluster; at most ",
          kMaxClusterBlocks);
  for (size_t i = 0; i < launch.grid.size(); ++i) {
    require(launch.grid[i] % launch.cluster[i] == 0, "cluster extent ", launch.cluster[i], " does not divide grid extent ",
            launch.grid[i]);
  }
  require(launch.shared_bytes <= kMaxSharedBytes, "shared_bytes must be 0 to ", kMaxSharedBytes, "; got ",
          launch.shared_bytes);
  size_t end = 0;
  for (const Param& param : launch.params) end = AlignUp(end, ParamAlignment(param)) + ParamSize(param);
  require(end <= kMaxParamBytes, "parameters of ", end, " bytes; at most ", kMaxParamBytes);
}

Launch ReadLaunch(Reader& in) {
  Launch launch;
  launch.kernel = in.Name("kernel name");
  std::string_view digest = in.Raw(launch.sha256.size());
  std::copy(digest.begin(), digest.end(), launch.sha256.begin());
  launch.symbol = in.Name("symbol");
  for (Extents* extents : {&launch.grid, &launch.block, &launch.cluster}) {
    for (uint32_t& extent : *extents) extent = in.U32();
  }
  launch.shared_bytes = in.U32();
  launch.programmatic = in.Choice(2, "programmatic") == 1;
  launch.params = in.List(8, kMaxParams, "parameters", [&] { return ReadParam(in); });
  CheckLaunch(launch);
  return launch;
}

Step ReadStep(Reader& in) {
  if (in.Choice(2, "step kind") == 0) return ReadFill(in);
  return ReadLaunch(in);
}

bool IsArch(std::string_view arch) {
  if (arch.size() < 6 || arch.size() > 8 || arch.substr(0, 3) != "sm_" || arch.back() != 'a' || arch[3] == '0') {
    return false;
  }
  return std::all_of(arch.begin() + 3, arch.end() - 1, [](char c) { return c >= '0' && c <= '9'; });
}

Program ReadProgram(Reader& in) {
  Program program;
  program.arch = in.Name("arch");
  Require(IsArch(program.arch), "arch must name one compute capability, such as 'sm_90a'; got '", program.arch, "'");
  program.steps = in.List(28, std::numeric_limits<uint32_t>::max(), "steps", [&] { return ReadStep(in); });
  return program;
}

// Bytes [offset, offset + size) lie in the operand; `size` may be absurd, so nothing is added that could wrap.
void CheckRange(const LaunchPlan& plan, const Program& program, const char* what, uint32_t operand, int64_t offset,
                unsigned __int128 size) {
  size_t operands = plan.argument_bytes.size() + plan.result_bytes.size();
  Require(operand < operands, program.arch, ": ", what, " names operand ", operand, " of ", operands);
  int64_t have = plan.OperandBytes(operand);
  Require(offset >= 0 && offset <= have && size <= static_cast<unsigned __int128>(have - offset), program.arch, ": ",
          what, " at byte ", offset, " ends outside operand ", operand, ", which has ", have, " bytes");
}

unsigned __int128 SpanBytes(const TensorMap& map) {
  unsigned __int128 span = static_cast<unsigned __int128>(map.dims[0]) * ElementBytes(map.element_type);
  for (uint32_t i = 1; i < map.rank; ++i) {
    span += static_cast<unsigned __int128>(map.dims[i] - 1) * map.strides_bytes[i - 1];
  }
  return span;
}

void CheckOperands(const LaunchPlan& plan, const Program& program) {
  for (const Step& step : program.steps) {
    if (const Fill* fill = std::get_if<Fill>(&step)) {
      auto size = static_cast<unsigned __int128>(fill->words) * 4;
      CheckRange(plan, program, "fill", fill->operand, fill->offset_bytes, size);
      continue;
    }
    for (const Param& param : std::get<Launch>(step).params) {
      if (const auto* map = std::get_if<TensorMap>(&param)) {
        CheckRange(plan, program, "tensor map", map->operand, map->offset_bytes, SpanBytes(*map));
      } else if (const auto* pointer = std::get_if<Pointer>(&param)) {
        // A pointer names at least one byte, save that an empty operand has a beginning too.
        CheckRange(plan, program, "pointer", pointer->operand, pointer->offset_bytes, 0);
        int64_t have = plan.OperandBytes(pointer->operand);
        Require(have == 0 || pointer->offset_bytes < have, program.arch, ": pointer at byte ", pointer->offset_bytes,
                " is past operand ", pointer->operand, ", which has ", have, " bytes");
      }
    }
  }
}

}  // namespace

uint32_t ElementBytes(ElementType type) {
  constexpr uint32_t kBytes[] = {2, 2, 4, 4, 1, 8, 8, 4, 2, 8};
  static_assert(std::size(kBytes) == static_cast<size_t>(ElementType::kCount));
  return kBytes[static_cast<size_t>(type)];
}

size_t ParamSize(const Param& param) {
  return std::visit(
      [](const auto& p) -> size_t {
        if constexpr (std::is_same_v<std::decay_t<decltype(p)>, Bytes>) {
          return p.data.size();
        } else {
          return p.kSize;
        }
      },
      param);
}

size_t ParamAlignment(const Param& param) {
  return std::visit([](const auto& p) { return p.kAlignment; }, param);
}

LaunchPlan DecodePlan(std::string_view bytes) {
  Reader in(bytes);
  Require(bytes.substr(0, kMagic.size()) == kMagic, "not one: wrong first four bytes");
  in.Raw(kMagic.size());
  uint32_t version = in.U32();
  Require(version == kPlanVersion, "it has version ", version, "; this library reads version ", kPlanVersion);

  LaunchPlan plan;
  plan.name = in.Name("plan name");
  auto size = [&] {
    int64_t value = in.I64();
    Require(value >= 0, "'", plan.name, "' has a buffer of ", value, " bytes");
    return value;
  };
  plan.argument_bytes = in.List(8, kMaxOperands, "arguments", size);
  plan.result_bytes = in.List(8, kMaxOperands, "results", size);
  size_t operands = plan.argument_bytes.size() + plan.result_bytes.size();
  Require(operands <= kMaxOperands, "'", plan.name, "' has ", operands, " operands; at most ", kMaxOperands);
  plan.programs = in.List(8, kMaxPrograms, "programs", [&] { return ReadProgram(in); });
  Require(in.left() == 0, "'", plan.name, "' has ", in.left(), " bytes too many");

  for (size_t i = 0; i < plan.programs.size(); ++i) {
    for (size_t j = 0; j < i; ++j) {
      Require(plan.programs[i].arch != plan.programs[j].arch, "'", plan.name, "' has ", plan.programs[i].arch, " twice");
    }
    CheckOperands(plan, plan.programs[i]);
  }
  return plan;
}

}  // namespace jfa
