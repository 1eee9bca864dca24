// The FFI handlers, called as XLA calls them: through call frames, with a small XLA of our own behind them.
#include <cstring>
#include <memory>
#include <optional>
#include <utility>

#include "harness.h"
#include "plan_encoder.h"
#include "support.h"
#include "xla/ffi/api/c_api.h"

extern "C" {
XLA_FFI_Error* jfa_instantiate(XLA_FFI_CallFrame*);
XLA_FFI_Error* jfa_initialize(XLA_FFI_CallFrame*);
XLA_FFI_Error* jfa_execute(XLA_FFI_CallFrame*);
XLA_FFI_TypeId* jfa_call_site_type_id();
const XLA_FFI_TypeInfo* jfa_call_site_type_info();
void jfa_add_cubin_directory(const char*);
uint32_t jfa_plan_version();
}

// XLA's side of the opaque types.
struct XLA_FFI_Error {
  XLA_FFI_Error_Code code;
  std::string message;
};

namespace {

struct Context {
  void* stream = nullptr;
  void* state = nullptr;
};

Context* From(XLA_FFI_ExecutionContext* ctx) { return reinterpret_cast<Context*>(ctx); }

const XLA_FFI_Api* Api() {
  static const XLA_FFI_Api api = [] {
    XLA_FFI_Api out = {};
    out.struct_size = XLA_FFI_Api_STRUCT_SIZE;
    out.api_version.struct_size = XLA_FFI_Api_Version_STRUCT_SIZE;
    out.api_version.major_version = XLA_FFI_API_MAJOR;
    out.api_version.minor_version = XLA_FFI_API_MINOR;
    out.XLA_FFI_Error_Create = [](XLA_FFI_Error_Create_Args* args) {
      return new XLA_FFI_Error{args->errc, args->message};
    };
    out.XLA_FFI_State_Set = [](XLA_FFI_State_Set_Args* args) -> XLA_FFI_Error* {
      From(args->ctx)->state = args->state;
      return nullptr;
    };
    out.XLA_FFI_State_Get = [](XLA_FFI_State_Get_Args* args) -> XLA_FFI_Error* {
      args->state = From(args->ctx)->state;
      return nullptr;
    };
    out.XLA_FFI_Stream_Get = [](XLA_FFI_Stream_Get_Args* args) -> XLA_FFI_Error* {
      args->stream = From(args->ctx)->stream;
      return nullptr;
    };
    return out;
  }();
  return &api;
}

XLA_FFI_CallFrame Frame(XLA_FFI_ExecutionStage stage, Context& context) {
  XLA_FFI_CallFrame frame = {};
  frame.struct_size = XLA_FFI_CallFrame_STRUCT_SIZE;
  frame.api = Api();
  frame.ctx = reinterpret_cast<XLA_FFI_ExecutionContext*>(&context);
  frame.stage = stage;
  frame.args.struct_size = XLA_FFI_Args_STRUCT_SIZE;
  frame.rets.struct_size = XLA_FFI_Rets_STRUCT_SIZE;
  frame.attrs.struct_size = XLA_FFI_Attrs_STRUCT_SIZE;
  return frame;
}

using Outcome = std::optional<std::pair<XLA_FFI_Error_Code, std::string>>;

Outcome Call(XLA_FFI_Error* (*handler)(XLA_FFI_CallFrame*), XLA_FFI_CallFrame frame) {
  std::unique_ptr<XLA_FFI_Error> error(handler(&frame));
  if (error == nullptr) return std::nullopt;
  return std::make_pair(error->code, error->message);
}

// An executable with one call site; XLA deletes the state with it.
class CallSite {
 public:
  CallSite() { context_.stream = fake::Stream(0); }
  ~CallSite() {
    if (context_.state != nullptr) jfa_call_site_type_info()->deleter(context_.state);
  }

  Outcome Instantiate(const std::string& plan) {
    XLA_FFI_ByteSpan name = {"plan", 4}, value = {plan.data(), plan.size()};
    XLA_FFI_ByteSpan* names[] = {&name};
    void* attrs[] = {&value};
    XLA_FFI_AttrType types[] = {XLA_FFI_AttrType_STRING};
    XLA_FFI_CallFrame frame = Frame(XLA_FFI_ExecutionStage_INSTANTIATE, context_);
    frame.attrs.size = 1, frame.attrs.names = names, frame.attrs.attrs = attrs, frame.attrs.types = types;
    return Call(jfa_instantiate, frame);
  }

  Outcome Initialize() { return Call(jfa_initialize, Frame(XLA_FFI_ExecutionStage_INITIALIZE, context_)); }

  Outcome Execute(const std::vector<jfa::Buffer>& operands, size_t arguments) {
    std::vector<XLA_FFI_Buffer> buffers(operands.size());
    std::vector<int64_t> dims(operands.size());
    std::vector<void*> pointers;
    for (size_t i = 0; i < operands.size(); ++i) {
      dims[i] = operands[i].bytes;
      buffers[i].struct_size = XLA_FFI_Buffer_STRUCT_SIZE;
      buffers[i].dtype = XLA_FFI_DataType_U8, buffers[i].data = operands[i].data;
      buffers[i].rank = 1, buffers[i].dims = &dims[i];
      pointers.push_back(&buffers[i]);
    }
    std::vector<XLA_FFI_ArgType> argument_types(operands.size(), XLA_FFI_ArgType_BUFFER);
    std::vector<XLA_FFI_RetType> result_types(operands.size(), XLA_FFI_RetType_BUFFER);
    XLA_FFI_CallFrame frame = Frame(XLA_FFI_ExecutionStage_EXECUTE, context_);
    frame.args.size = static_cast<int64_t>(arguments);
    frame.args.args = pointers.data(), frame.args.types = argument_types.data();
    frame.rets.size = static_cast<int64_t>(operands.size() - arguments);
    frame.rets.rets = pointers.data() + arguments, frame.rets.types = result_types.data();
    return Call(jfa_execute, frame);
  }

 private:
  Context context_;
};

void Expect(int line, const Outcome& outcome, XLA_FFI_Error_Code code, const std::string& text) {
  if (!outcome.has_value()) return harness::Fail(__FILE__, line, "no error, but one was wanted: " + text);
  harness::ExpectEqual(__FILE__, line, outcome->second.c_str(), static_cast<int>(outcome->first), static_cast<int>(code));
  if (outcome->second.find("jax_fa_blackwell: " + text) == std::string::npos) {
    harness::Fail(__FILE__, line, "no '" + text + "' in: " + outcome->second);
  }
}

#define EXPECT_OUTCOME(outcome, code, text) Expect(__LINE__, outcome, XLA_FFI_Error_Code_##code, text)
#define EXPECT_SUCCESS(outcome)                              \
  if (Outcome o = outcome; o.has_value()) harness::Fail(__FILE__, __LINE__, o->second)

}  // namespace

TEST(handler, RunsAPlan) {
  ResetDriver();
  Folder folder;
  jfa_add_cubin_directory(folder.path().c_str());
  CallSite site;
  EXPECT_SUCCESS(site.Instantiate(EncodePlan(GoodPlan(folder.AddCubin(kGoodCubin)))));
  EXPECT_EQ(Driver().calls.size(), 0u);  // instantiation touches no device
  EXPECT_SUCCESS(site.Initialize());
  EXPECT_EQ(Driver().launches.size(), 0u);
  for (int call = 0; call < 2; ++call) EXPECT_SUCCESS(site.Execute(Operands(call), 2));
  EXPECT_EQ(Driver().launches.size(), 4u);
  EXPECT_EQ(Driver().memsets[1].address, reinterpret_cast<uint64_t>(Operands(1)[3].data) + 16);
  EXPECT_EQ(Driver().launches[0].stream, fake::Stream(0));

  // Errors, each followed by a good call.
  EXPECT_OUTCOME(site.Execute(Operands(), 3), INVALID_ARGUMENT, "good plan: the call has 3 arguments");
  EXPECT_SUCCESS(site.Execute(Operands(), 2));
  EXPECT_OUTCOME(site.Execute(std::vector<jfa::Buffer>(65), 65), INVALID_ARGUMENT, "a call has at most 64 operands");
  EXPECT_SUCCESS(site.Execute(Operands(), 2));
  {
    Failing failing("cuLaunchKernelEx", fake::kOutOfMemory);
    EXPECT_OUTCOME(site.Execute(Operands(), 2), INTERNAL,
                   "good plan: kernel 'main kernel' (sm_90a): cuLaunchKernelEx failed: CUDA_ERROR_OUT_OF_MEMORY");
  }
  EXPECT_SUCCESS(site.Execute(Operands(), 2));
}

TEST(handler, RefusesABadPlanAtInstantiation) {
  CallSite site;
  EXPECT_OUTCOME(site.Instantiate(EncodePlan(GoodPlan({}), 9)), INVALID_ARGUMENT,
                 "launch plan: it has version 9; this library reads version 1");
  EXPECT_OUTCOME(site.Instantiate("JFAP"), INVALID_ARGUMENT, "launch plan: ends early");
}

TEST(handler, ErrorCodes) {
  ResetDriver();
  CallSite site;
  jfa::LaunchPlan plan = GoodPlan({});
  EXPECT_SUCCESS(site.Instantiate(EncodePlan(plan)));
  EXPECT_OUTCOME(site.Initialize(), NOT_FOUND, "good plan: kernel 'main kernel' (sm_90a): no cubin 0000");
  plan.programs.clear();
  CallSite none;
  EXPECT_SUCCESS(none.Instantiate(EncodePlan(plan)));
  EXPECT_OUTCOME(none.Initialize(), FAILED_PRECONDITION, "good plan: no program for sm_90a (Fake GPU 0)");
}

TEST(handler, Metadata) {
  auto metadata = [](XLA_FFI_Error* (*handler)(XLA_FFI_CallFrame*), XLA_FFI_ExecutionStage stage) {
    Context context;
    XLA_FFI_Metadata out = {};
    out.struct_size = XLA_FFI_Metadata_STRUCT_SIZE;
    out.api_version.struct_size = XLA_FFI_Api_Version_STRUCT_SIZE;
    XLA_FFI_Metadata_Extension extension = {};
    extension.extension_base.struct_size = sizeof(extension);
    extension.extension_base.type = XLA_FFI_Extension_Metadata;
    extension.metadata = &out;
    XLA_FFI_CallFrame frame = Frame(stage, context);
    frame.extension_start = &extension.extension_base;
    EXPECT_SUCCESS(Call(handler, frame));
    return out;
  };
  jfa_call_site_type_id()->type_id = 77;
  EXPECT_EQ(metadata(jfa_execute, XLA_FFI_ExecutionStage_EXECUTE).traits,
            static_cast<uint32_t>(XLA_FFI_HANDLER_TRAITS_COMMAND_BUFFER_COMPATIBLE));
  EXPECT_EQ(metadata(jfa_instantiate, XLA_FFI_ExecutionStage_INSTANTIATE).state_type_id.type_id, 77);
  EXPECT_EQ(jfa_plan_version(), 1u);
}

TEST(handler_without_driver, InstantiatesAndSaysSo) {
  CallSite site;
  EXPECT_SUCCESS(site.Instantiate(EncodePlan(GoodPlan({}))));
  EXPECT_OUTCOME(site.Initialize(), UNAVAILABLE, "no CUDA driver: cannot open libcuda.so.1");
  EXPECT_OUTCOME(site.Execute(Operands(), 2), UNAVAILABLE, "no CUDA driver");
}
