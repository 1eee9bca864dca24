#include "executor.h"

#include <array>
#include <atomic>
#include <cstring>
#include <string>
#include <utility>

#include "error.h"
#include "kernel.h"
#include "tensor_map.h"

namespace jfa {
namespace {

std::atomic<uint64_t> execution_count{0};

// "flash_forward: kernel 'flash_forward_d128' (sm_100a)"
std::string Where(const LaunchPlan& plan, const Program& program, const Launch& launch) {
  return Concat(plan.name, ": kernel '", launch.kernel, "' (", program.arch, ")");
}

cu::Context ContextOf(const cu::Driver& driver, const LaunchPlan& plan, cu::Stream stream) {
  cu::Context context = nullptr;
  driver.Check(driver.StreamGetCtx(stream, &context), "cuStreamGetCtx", [&] { return plan.name; });
  return context;
}

// The parameters of one launch, on the stack: values and the pointers to them.
class ParamBlock {
 public:
  void* Add(size_t size, size_t alignment) {
    end_ = AlignUp(end_, alignment);
    void* place = bytes_.data() + end_;
    end_ += size;  // within the array, as the plan's reader has checked
    pointers_[count_++] = place;
    return place;
  }

  void** pointers() { return pointers_.data(); }

 private:
  alignas(TensorMap::kAlignment) std::array<unsigned char, kMaxParamBytes> bytes_;
  std::array<void*, kMaxParams> pointers_;
  size_t end_ = 0, count_ = 0;
};

void* Address(const Buffer* operands, uint32_t operand, int64_t offset_bytes) {
  return reinterpret_cast<void*>(reinterpret_cast<uintptr_t>(operands[operand].data) +
                                 static_cast<uintptr_t>(offset_bytes));
}

template <typename WhereFn>
void AddParam(const cu::Driver& driver, const Param& param, const Buffer* operands, const WhereFn& where,
              ParamBlock& block) {
  void* place = block.Add(ParamSize(param), ParamAlignment(param));
  if (const auto* map = std::get_if<TensorMap>(&param)) {
    void* address = Address(operands, map->operand, map->offset_bytes);
    if (reinterpret_cast<uintptr_t>(address) % 16 != 0) {
      throw Error(ErrorCode::kInvalidArgument,
                  Concat(where(), ": operand ", map->operand, " at ", address, " must be 16-aligned for TMA"));
    }
    driver.Check(EncodeTensorMap(driver, *map, address, static_cast<cu::TensorMap*>(place)), "cuTensorMapEncodeTiled",
                 [&] { return Concat(where(), ": tensor map of operand ", map->operand); });
  } else if (const auto* pointer = std::get_if<Pointer>(&param)) {
    void* address = Address(operands, pointer->operand, pointer->offset_bytes);
    std::memcpy(place, &address, sizeof(address));
  } else if (const auto* int32 = std::get_if<Int32>(&param)) {
    std::memcpy(place, &int32->value, sizeof(int32->value));
  } else if (const auto* float32 = std::get_if<Float32>(&param)) {
    std::memcpy(place, &float32->value, sizeof(float32->value));
  } else {
    const std::string& data = std::get<Bytes>(param).data;
    std::memcpy(place, data.data(), data.size());
  }
}

template <typename WhereFn>
void EnqueueLaunch(const cu::Driver& driver, cu::Stream stream, cu::Function function, const Launch& launch,
                   const Buffer* operands, const WhereFn& where) {
  ParamBlock block;
  for (const Param& param : launch.params) AddParam(driver, param, operands, where, block);

  cu::LaunchAttribute attributes[2] = {};
  unsigned count = 0;
  if (launch.ClusterBlocks() > 1) {
    cu::LaunchAttribute& attribute = attributes[count++];
    attribute.id = cu::kLaunchAttributeClusterDimension;
    attribute.value.cluster_dim = {launch.cluster[0], launch.cluster[1], launch.cluster[2]};
  }
  if (launch.programmatic) {
    cu::LaunchAttribute& attribute = attributes[count++];
    attribute.id = cu::kLaunchAttributeProgrammaticStreamSerialization;
    attribute.value.programmatic_stream_serialization_allowed = 1;
  }
  const cu::LaunchConfig config = {launch.grid[0],  launch.grid[1],      launch.grid[2], launch.block[0], launch.block[1],
                                   launch.block[2], launch.shared_bytes, stream,         attributes,      count};
  driver.Check(driver.LaunchKernelEx(&config, function, block.pointers(), nullptr), "cuLaunchKernelEx", where);
}

}  // namespace

Executor::Executor(LaunchPlan plan, CubinStore& store) : plan_(std::move(plan)), store_(store) {}

void Executor::Initialize(cu::Stream stream) {
  const cu::Driver& driver = cu::Driver::Get();
  PrepareFor(driver, ContextOf(driver, plan_, stream));
}

void Executor::Execute(cu::Stream stream, const Buffer* operands, size_t argument_count, size_t result_count) {
  execution_count.fetch_add(1, std::memory_order_relaxed);
  CheckBuffers(operands, argument_count, result_count);
  const cu::Driver& driver = cu::Driver::Get();
  cu::Context context = ContextOf(driver, plan_, stream);
  // Initialize has been here before, so this only looks it up.
  const Prepared& prepared = PrepareFor(driver, context);
  cu::ScopedContext scope(driver, context);
  const Program& program = *prepared.program;
  for (size_t i = 0; i < program.steps.size(); ++i) {
    if (const Fill* fill = std::get_if<Fill>(&program.steps[i])) {
      auto address = reinterpret_cast<uintptr_t>(Address(operands, fill->operand, fill->offset_bytes));
      driver.Check(driver.MemsetD32Async(address, fill->word, static_cast<size_t>(fill->words), stream),
                   "cuMemsetD32Async", [&] {
                     return Concat(plan_.name, ": fill of operand ", fill->operand, " (", program.arch, ")");
                   });
      continue;
    }
    const Launch& launch = std::get<Launch>(program.steps[i]);
    EnqueueLaunch(driver, stream, prepared.functions[i], launch, operands,
                  [&] { return Where(plan_, program, launch); });
  }
}

uint64_t Executor::ExecutionCount() { return execution_count.load(std::memory_order_relaxed); }

void Executor::CheckBuffers(const Buffer* operands, size_t argument_count, size_t result_count) const {
  auto require = [&](bool condition, const auto&... parts) {
    if (!condition) throw Error(ErrorCode::kInvalidArgument, Concat(plan_.name, ": ", parts...));
  };
  require(argument_count == plan_.argument_bytes.size(), "the call has ", argument_count,
          " arguments; the plan was made for ", plan_.argument_bytes.size());
  require(result_count == plan_.result_bytes.size(), "the call has ", result_count, " results; the plan was made for ",
          plan_.result_bytes.size());
  for (size_t i = 0; i < argument_count + result_count; ++i) {
    require(operands[i].bytes == plan_.OperandBytes(i), i < argument_count ? "argument " : "result ",
            i < argument_count ? i : i - argument_count, " has ", operands[i].bytes, " bytes; the plan was made for ",
            plan_.OperandBytes(i));
  }
}

const Program& Executor::ProgramFor(const cu::Driver& driver) const {
  auto where = [&] { return plan_.name; };
  cu::Device device = 0;
  int major = 0, minor = 0;
  driver.Check(driver.CtxGetDevice(&device), "cuCtxGetDevice", where);
  driver.Check(driver.DeviceGetAttribute(&major, cu::kComputeCapabilityMajor, device), "cuDeviceGetAttribute", where);
  driver.Check(driver.DeviceGetAttribute(&minor, cu::kComputeCapabilityMinor, device), "cuDeviceGetAttribute", where);
  const std::string arch = Concat("sm_", major, minor, "a");
  std::string have;
  for (const Program& program : plan_.programs) {
    if (program.arch == arch) return program;
    have += (have.empty() ? "" : ", ") + program.arch;
  }
  char name[256] = "";
  driver.Check(driver.DeviceGetName(name, sizeof(name), device), "cuDeviceGetName", where);
  throw Error(ErrorCode::kFailedPrecondition,
              Concat(plan_.name, ": no program for ", arch, " (", name, "); the plan has ", have.empty() ? "none" : have));
}

const Executor::Prepared& Executor::PrepareFor(const cu::Driver& driver, cu::Context context) {
  std::lock_guard<std::mutex> lock(mutex_);
  for (const auto& prepared : prepared_) {
    if (prepared->context == context) return *prepared;
  }
  cu::ScopedContext scope(driver, context);
  auto prepared = std::make_unique<Prepared>();
  prepared->context = context;
  prepared->program = &ProgramFor(driver);
  for (const Step& step : prepared->program->steps) {
    const Launch* launch = std::get_if<Launch>(&step);
    prepared->functions.push_back(
        launch == nullptr ? nullptr
                          : PrepareKernel(driver, store_, context, *launch, Where(plan_, *prepared->program, *launch)));
  }
  prepared_.push_back(std::move(prepared));
  return *prepared_.back();
}

}  // namespace jfa
