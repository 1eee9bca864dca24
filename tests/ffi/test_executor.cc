// The executor on the fake driver: what it asks for, every way to fail, several devices, many threads.
#include <cstring>
#include <set>
#include <thread>

#include "driver.h"
#include "harness.h"
#include "kernel.h"
#include "support.h"

namespace {

struct Fixture {
  Fixture() {
    ResetDriver();
    store.AddDirectory(folder.path());
    cubin = folder.AddCubin(kGoodCubin + ("kernel unique" + std::to_string(serial++) + " 0 32\n"));
    plan = GoodPlan(cubin);
  }

  void Run(void* stream = fake::Stream(0)) { RunOnce(store, plan, stream); }

  // The good call that must work after every error.
  void ExpectGoodCall() {
    const size_t before = Driver().launches.size();
    RunOnce(store, GoodPlan(cubin));
    EXPECT_EQ(Driver().launches.size(), before + 2);
  }

  std::string CubinFile() const { return jfa::Hex(cubin) + ".cubin"; }

  Folder folder;
  jfa::CubinStore store;
  jfa::Sha256Digest cubin;
  jfa::LaunchPlan plan;
  static int serial;  // makes every fixture's cubin another one
};

int Fixture::serial = 0;

constexpr char kWhere[] = "good plan: kernel 'main kernel' (sm_90a)";

template <typename T>
T As(const std::string& bytes) {
  T value;
  EXPECT_EQ(bytes.size(), sizeof(T));
  std::memcpy(&value, bytes.data(), sizeof(T));
  return value;
}

}  // namespace

TEST(executor, AsksForWhatThePlanSays) {
  Fixture f;
  f.Run(fake::Stream(1, 3));
  fake::State& driver = Driver();
  const auto operands = Operands();

  EXPECT_EQ(driver.memsets.size(), 1u);
  const fake::MemsetRecord& memset = driver.memsets[0];
  EXPECT_EQ(memset.address, reinterpret_cast<uint64_t>(operands[3].data) + 16);
  EXPECT_EQ(memset.words, 12u);
  EXPECT_EQ(memset.word, 0xffffffffu);
  EXPECT_EQ(memset.stream, fake::Stream(1, 3));

  EXPECT_EQ(driver.tensor_maps.size(), 1u);
  const fake::TensorMapRecord& map = driver.tensor_maps[0];
  EXPECT_EQ(map.type, 6);  // CU_TENSOR_MAP_DATA_TYPE_FLOAT16
  EXPECT_EQ(map.address, reinterpret_cast<uint64_t>(operands[1].data) + 1024);
  EXPECT(map.dims == (std::vector<uint64_t>{64, 4, 2}));
  EXPECT(map.strides == (std::vector<uint64_t>{256, 1024}));
  EXPECT(map.box == (std::vector<uint32_t>{32, 2, 1}));
  EXPECT(map.element_strides == (std::vector<uint32_t>{1, 2, 1}));
  EXPECT_EQ(map.interleave, 0);
  EXPECT_EQ(map.swizzle, 2);       // 64 bytes
  EXPECT_EQ(map.l2_promotion, 3);  // 256 bytes
  EXPECT_EQ(map.fill, 1);          // NaN

  EXPECT_EQ(driver.launches.size(), 2u);
  const fake::LaunchRecord& main = driver.launches[0];
  EXPECT_EQ(main.symbol, std::string("main"));
  EXPECT_EQ(main.device, 1);
  EXPECT_EQ(main.stream, fake::Stream(1, 3));
  EXPECT((main.grid == std::array<unsigned, 3>{6, 2, 3}));
  EXPECT((main.block == std::array<unsigned, 3>{64, 2, 1}));
  EXPECT((main.cluster == std::array<unsigned, 3>{2, 1, 3}));
  EXPECT_EQ(main.shared_bytes, 100u * 1024);
  EXPECT(main.programmatic);
  EXPECT_EQ(main.params.size(), 5u);
  EXPECT_EQ(main.params[0].substr(120), std::string("ronset\0\0", 8));  // the fake driver's mark
  EXPECT_EQ(As<uint64_t>(main.params[1]), reinterpret_cast<uint64_t>(operands[2].data) + 48);
  EXPECT_EQ(As<int32_t>(main.params[2]), -7);
  EXPECT_EQ(As<float>(main.params[3]), 0.5f);
  EXPECT_EQ(main.params[4], std::string("twelve bytes"));

  const fake::LaunchRecord& plain = driver.launches[1];
  EXPECT_EQ(plain.symbol, std::string("plain"));
  EXPECT((plain.cluster == std::array<unsigned, 3>{0, 0, 0}));  // no attribute
  EXPECT(!plain.programmatic);
  EXPECT_EQ(plain.params.size(), 0u);
}

TEST(executor, ExecuteOnlyEnqueues) {
  Fixture f;
  jfa::Executor executor(f.plan, f.store);
  executor.Initialize(static_cast<jfa::cu::Stream>(fake::Stream(0)));
  ResetDriver();
  const uint64_t before = jfa::Executor::ExecutionCount();
  for (int call = 0; call < 3; ++call) Execute(executor, fake::Stream(0, call), Operands(call));
  EXPECT_EQ(jfa::Executor::ExecutionCount(), before + 3);
  const std::set<std::string> allowed = {"cuStreamGetCtx",  "cuCtxGetCurrent",        "cuCtxPushCurrent",
                                         "cuCtxPopCurrent", "cuTensorMapEncodeTiled", "cuMemsetD32Async",
                                         "cuLaunchKernelEx"};
  for (const auto& [function, count] : Driver().calls) {
    if (allowed.count(function) == 0) harness::Fail(__FILE__, __LINE__, function + " called while executing");
  }
  // Buffers that moved between the calls: every map and pointer is of its own call.
  EXPECT_EQ(Driver().launches.size(), 6u);
  for (int call = 0; call < 3; ++call) {
    const auto operands = Operands(call);
    EXPECT_EQ(Driver().tensor_maps[call].address, reinterpret_cast<uint64_t>(operands[1].data) + 1024);
    EXPECT_EQ(As<uint64_t>(Driver().launches[2 * call].params[0].substr(0, 8)), static_cast<uint64_t>(call));
    EXPECT_EQ(As<uint64_t>(Driver().launches[2 * call].params[1]), reinterpret_cast<uint64_t>(operands[2].data) + 48);
  }
}

TEST(executor, LoadsOncePerDevice) {
  Fixture f;
  for (int round = 0; round < 2; ++round) {
    for (int device = 0; device < 2; ++device) f.Run(fake::Stream(device));
  }
  EXPECT_EQ(Driver().calls["cuModuleLoadData"], 2);
  EXPECT_EQ(Driver().launches.size(), 8u);
  EXPECT_EQ(Driver().launches[0].device, 0);
  EXPECT_EQ(Driver().launches[2].device, 1);

  jfa::Executor executor(f.plan, f.store);
  for (int i = 0; i < 3; ++i) executor.Initialize(static_cast<jfa::cu::Stream>(fake::Stream(0)));
  const int before = Driver().calls["cuModuleGetFunction"];
  executor.Initialize(static_cast<jfa::cu::Stream>(fake::Stream(0)));
  EXPECT_EQ(Driver().calls["cuModuleGetFunction"], before);
}

TEST(executor, WorksWithoutInitialize) {
  Fixture f;
  jfa::Executor executor(f.plan, f.store);
  Execute(executor, fake::Stream(0), Operands());
  EXPECT_EQ(Driver().launches.size(), 2u);
}

TEST(executor, LeavesTheCurrentContextAsItWas) {
  Fixture f;
  f.Run(fake::Stream(0));
  jfa::cu::Context context = nullptr;
  jfa::cu::Driver::Get().CtxGetCurrent(&context);
  EXPECT(context == nullptr);
  {
    Failing failing("cuLaunchKernelEx", fake::kInvalidValue);
    EXPECT_ERROR(kInternal, Texts("cuLaunchKernelEx"), f.Run());
  }
  jfa::cu::Driver::Get().CtxGetCurrent(&context);
  EXPECT(context == nullptr);
}

TEST(executor, UnknownCubin) {
  Fixture f;
  MainLaunch(f.plan).sha256[0] ^= 1;
  EXPECT_ERROR(kNotFound, Texts(kWhere, "no cubin " + jfa::Hex(MainLaunch(f.plan).sha256) + ".cubin in " + f.folder.path()),
               f.Run());
  jfa::CubinStore empty;
  EXPECT_ERROR(kNotFound, Texts(kWhere, "any directory: none was added"), RunOnce(empty, f.plan));
  f.ExpectGoodCall();
}

TEST(executor, DamagedCubin) {
  Fixture f;
  const std::string good = f.folder.Read(f.CubinFile());
  std::string corrupt = good;
  corrupt[good.size() / 2] ^= 0x10;
  for (const std::string& bytes : {corrupt, good.substr(0, good.size() - 1), std::string()}) {
    f.folder.Write(f.CubinFile(), bytes);
    EXPECT_ERROR(kDataLoss, Texts(kWhere, "is damaged: its " + std::to_string(bytes.size()) + " bytes have sha256"), f.Run());
  }
  EXPECT_EQ(Driver().calls["cuModuleLoadData"], 0);
  f.folder.Write(f.CubinFile(), good);
  f.ExpectGoodCall();
}

TEST(executor, WholeCopyInAnotherDirectoryIsFound) {
  Fixture f;
  Folder second;
  second.Write(f.CubinFile(), f.folder.Read(f.CubinFile()));
  f.folder.Write(f.CubinFile(), "damaged");
  EXPECT_ERROR(kDataLoss, Texts(kWhere), f.Run());
  f.store.AddDirectory(second.path());
  f.ExpectGoodCall();
}

TEST(executor, NotACubin) {
  Fixture f;
  auto expect = [&](std::string bytes, jfa::ErrorCode code, const std::string& text) {
    jfa::LaunchPlan plan = f.plan;
    MainLaunch(plan).sha256 = jfa::Sha256(bytes);
    f.folder.Write(jfa::Hex(MainLaunch(plan).sha256) + ".cubin", bytes);
    harness::ExpectError(__FILE__, __LINE__, code, {kWhere, text}, [&] { RunOnce(f.store, plan); });
  };
  expect("not an ELF file", jfa::ErrorCode::kDataLoss, "is not a whole cubin");
  expect(std::string(100, 'x'), jfa::ErrorCode::kDataLoss, "is not a whole cubin");
  std::string headless = CubinBytes("");
  headless[0x28] = 1, headless[0x2f] = 0x70;  // section headers far outside the file
  headless[0x3a] = 64, headless[0x3c] = 4;
  expect(headless, jfa::ErrorCode::kDataLoss, "is not a whole cubin");
  expect(CubinBytes("nonsense"), jfa::ErrorCode::kInternal,
         "cuModuleLoadData failed: CUDA_ERROR_INVALID_IMAGE (200): text of the fake driver");
  expect(CubinBytes("arch sm_100a\n"), jfa::ErrorCode::kInternal, "CUDA_ERROR_NO_BINARY_FOR_GPU");
  f.ExpectGoodCall();
}

TEST(executor, NoProgramForTheDevice) {
  Fixture f;
  EXPECT_ERROR(kFailedPrecondition, Texts("good plan: no program for sm_86a (Fake GPU 2)", "has sm_100a, sm_90a"),
               f.Run(fake::Stream(2)));
  f.plan.programs.clear();
  EXPECT_ERROR(kFailedPrecondition, Texts("the plan has none"), f.Run());
  f.ExpectGoodCall();
}

TEST(executor, MissingSymbol) {
  Fixture f;
  MainLaunch(f.plan).symbol = "absent";
  EXPECT_ERROR(kNotFound, Texts(kWhere, "entry point 'absent' of cubin " + jfa::Hex(f.cubin), "CUDA_ERROR_NOT_FOUND"),
               f.Run());
  f.ExpectGoodCall();
}

TEST(executor, TooMuchSharedMemory) {
  Fixture f;
  MainLaunch(f.plan).shared_bytes = fake::kSharedLimit - 1023;  // with the kernel's own 1024, one too many
  EXPECT_ERROR(kResourceExhausted,
               Texts(kWhere, "a block needs 231425 bytes of dynamic and 1024 of static shared memory", "allows 232448",
                 "CUDA_ERROR_INVALID_VALUE"),
               f.Run());
  f.ExpectGoodCall();
}

TEST(executor, SharedMemoryLimitOnlyGrows) {
  Fixture f;
  jfa::Executor large(f.plan, f.store);
  large.Initialize(static_cast<jfa::cu::Stream>(fake::Stream(0)));
  MainLaunch(f.plan).shared_bytes = 60 * 1024;
  f.Run();
  Execute(large, fake::Stream(0), Operands());
  EXPECT_EQ(Driver().launches.size(), 4u);
  EXPECT_EQ((Driver().max_dynamic_shared[{"main", 0}]), 100 * 1024);
}

TEST(executor, ParameterMismatch) {
  Fixture f;
  MainLaunch(f.plan).params[4] = jfa::Bytes{"thirteen byte"};
  EXPECT_ERROR(kInvalidArgument, Texts(kWhere, "the plan gives parameter 4 13 bytes; entry point 'main' takes 12"), f.Run());
  MainLaunch(f.plan).params.pop_back();
  EXPECT_ERROR(kInvalidArgument, Texts(kWhere, "the plan gives 4 parameters; entry point 'main' takes 5"), f.Run());
  f.plan = GoodPlan(f.cubin);
  MainLaunch(f.plan).params.push_back(jfa::Int32{0});
  EXPECT_ERROR(kInvalidArgument, Texts(kWhere, "the plan gives 6 parameters; entry point 'main' takes 5"), f.Run());
  f.ExpectGoodCall();
}

TEST(executor, LaunchFailure) {
  Fixture f;
  MainLaunch(f.plan).block = {129, 1, 1};
  EXPECT_ERROR(kInternal, Texts(kWhere, "cuLaunchKernelEx failed: CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES (701)"), f.Run());
  f.ExpectGoodCall();
}

TEST(executor, LargeClustersAreAllowed) {
  Fixture f;
  MainLaunch(f.plan).grid = MainLaunch(f.plan).cluster = {16, 1, 1};
  f.Run();
  EXPECT((Driver().launches[0].cluster == std::array<unsigned, 3>{16, 1, 1}));
}

TEST(executor, WrongBuffers) {
  Fixture f;
  jfa::Executor executor(f.plan, f.store);
  auto operands = Operands();
  auto execute = [&](size_t arguments, size_t results) {
    executor.Execute(static_cast<jfa::cu::Stream>(fake::Stream(0)), operands.data(), arguments, results);
  };
  EXPECT_ERROR(kInvalidArgument, Texts("good plan: the call has 1 arguments; the plan was made for 2"), execute(1, 2));
  EXPECT_ERROR(kInvalidArgument, Texts("good plan: the call has 1 results; the plan was made for 2"), execute(2, 1));
  operands[0].bytes = 4095;
  EXPECT_ERROR(kInvalidArgument, Texts("good plan: argument 0 has 4095 bytes; the plan was made for 4096"), execute(2, 2));
  operands = Operands();
  operands[3].bytes = 128;
  EXPECT_ERROR(kInvalidArgument, Texts("good plan: result 1 has 128 bytes; the plan was made for 64"), execute(2, 2));
  operands = Operands();
  operands[1].data = static_cast<char*>(operands[1].data) + 8;
  EXPECT_ERROR(kInvalidArgument, Texts(kWhere, "operand 1 at ", "must be 16-aligned"), execute(2, 2));
  operands = Operands();
  execute(2, 2);
  EXPECT_EQ(Driver().launches.size(), 2u);
}

TEST(executor, EveryDriverCallMayFail) {
  for (const char* function :
       {"cuStreamGetCtx", "cuCtxGetCurrent", "cuCtxPushCurrent", "cuCtxGetDevice", "cuDeviceGetAttribute",
        "cuModuleLoadData", "cuModuleGetFunction", "cuFuncGetParamInfo", "cuFuncGetAttribute", "cuFuncSetAttribute",
        "cuTensorMapEncodeTiled", "cuMemsetD32Async", "cuLaunchKernelEx"}) {
    Fixture f;
    MainLaunch(f.plan).shared_bytes = 90 * 1024;
    {
      Failing failing(function, fake::kOutOfMemory);
      bool failed = false;
      try {
        f.Run();
      } catch (const jfa::Error& error) {
        failed = true;
        const std::string message = error.what();
        const std::string text = std::string(function) + " failed: CUDA_ERROR_OUT_OF_MEMORY (2): text of the fake driver";
        if (message.find(text) == std::string::npos) harness::Fail(__FILE__, __LINE__, message);
      }
      if (!failed) harness::Fail(__FILE__, __LINE__, std::string(function) + " failed and no error came");
    }
    f.ExpectGoodCall();
  }
}

TEST(executor, UnknownDriverErrorHasItsNumber) {
  Fixture f;
  Failing failing("cuLaunchKernelEx", static_cast<fake::Result>(12345));
  EXPECT_ERROR(kInternal, Texts(kWhere, "unknown error (12345)"), f.Run());
}

TEST(executor, ManyThreadsTwoDevices) {
  Fixture f;
  constexpr int kThreads = 16, kRounds = 50;
  jfa::Executor shared(f.plan, f.store);
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, t] {
      try {
        void* stream = fake::Stream(t % 2, t);
        jfa::Executor own(f.plan, f.store);
        for (int round = 0; round < kRounds; ++round) {
          for (jfa::Executor* executor : {&shared, &own}) {
            executor->Initialize(static_cast<jfa::cu::Stream>(stream));
            Execute(*executor, stream, Operands(t));
          }
        }
      } catch (const std::exception& error) {
        harness::Fail(__FILE__, __LINE__, error.what());
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(Driver().calls["cuModuleLoadData"], 2);
  EXPECT_EQ(Driver().launches.size(), static_cast<size_t>(kThreads * kRounds * 2 * 2));
  for (const fake::LaunchRecord& launch : Driver().launches) {
    const int thread = static_cast<int>(reinterpret_cast<uintptr_t>(launch.stream) & 0xff);
    EXPECT_EQ(launch.device, thread % 2);
    if (launch.symbol == "main") {
      EXPECT_EQ(As<uint64_t>(launch.params[1]), reinterpret_cast<uint64_t>(Operands(thread)[2].data) + 48);
    }
  }
}

TEST(no_driver, IsAnErrorThatSaysSo) {
  jfa::CubinStore store;
  jfa::Executor executor(GoodPlan({}), store);
  for (int i = 0; i < 2; ++i) {
    EXPECT_ERROR(kUnavailable, Texts("no CUDA driver: cannot open libcuda.so.1: "),
                 executor.Initialize(static_cast<jfa::cu::Stream>(fake::Stream(0))));
  }
}

TEST(old_driver, MissingFunctionIsAnErrorThatSaysWhich) {
  jfa::CubinStore store;
  jfa::Executor executor(GoodPlan({}), store);
  EXPECT_ERROR(kUnavailable, Texts("(libcuda.so.1) has no cuTensorMapEncodeTiled", "CUDA 12 or later"),
               executor.Initialize(static_cast<jfa::cu::Stream>(fake::Stream(0))));
}

TEST(no_param_info, RunsWithoutTheCheck) {
  Fixture f;
  f.Run();
  EXPECT_EQ(Driver().launches.size(), 2u);
}
