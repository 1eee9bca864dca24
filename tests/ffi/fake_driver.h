// A CUDA driver for tests: it runs nothing, records what it is asked, checks what the real one checks, and fails on demand.
//
// Its cubin is an ELF header and a text after it, one line for the architecture and one for each kernel:
//   arch sm_90a
//   kernel NAME STATIC_SHARED_BYTES MAX_THREADS PARAM_SIZE...
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <vector>

namespace fake {

// Values of CUresult in cuda.h.
enum Result {
  kSuccess = 0,
  kInvalidValue = 1,
  kOutOfMemory = 2,
  kInvalidImage = 200,
  kInvalidContext = 201,
  kNoBinaryForGpu = 209,
  kInvalidHandle = 400,
  kNotFound = 500,
  kLaunchOutOfResources = 701,
  kInvalidClusterSize = 912,
};

constexpr int kDevices = 3;           // 0 and 1 are of compute capability 9.0, 2 is of 8.6
constexpr int kSharedLimit = 232448;  // dynamic and static of one block, after opting in
constexpr int kSharedDefault = 49152;

struct TensorMapRecord {
  int type = 0, interleave = 0, swizzle = 0, l2_promotion = 0, fill = 0;
  uint64_t address = 0;
  std::vector<uint64_t> dims, strides;
  std::vector<uint32_t> box, element_strides;
};

struct LaunchRecord {
  std::string symbol;
  int device = -1;
  void* stream = nullptr;
  std::array<unsigned, 3> grid{}, block{}, cluster{};  // cluster 0, 0, 0: no such attribute
  unsigned shared_bytes = 0;
  bool programmatic = false;
  std::vector<std::string> params;
};

struct MemsetRecord {
  int device = -1;
  void* stream = nullptr;
  uint64_t address = 0, words = 0;
  unsigned word = 0;
};

// All access is under the mutex.
struct State {
  std::mutex mutex;
  std::map<std::string, Result> fail;   // function name -> what it returns
  std::map<std::string, int> calls;     // function name -> how often it was called
  std::vector<TensorMapRecord> tensor_maps;
  std::vector<LaunchRecord> launches;
  std::vector<MemsetRecord> memsets;
  std::map<std::pair<std::string, int>, int> max_dynamic_shared;  // (symbol, device)
};

// The stream numbered `index` of a device, as the driver's handle.
inline void* Stream(int device, int index = 0) {
  return reinterpret_cast<void*>(static_cast<uintptr_t>(0x1000 + 0x100 * device + index));
}

}  // namespace fake

// Exported by the fake libcuda.so.1.
extern "C" fake::State* fake_driver_state();
