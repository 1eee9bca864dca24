// The XLA FFI target: one handler for each stage, and the C functions that the Python binding calls.
#include <array>
#include <exception>
#include <memory>
#include <string>
#include <string_view>
#include <utility>

#include "cubin_store.h"
#include "driver.h"
#include "error.h"
#include "executor.h"
#include "plan.h"
#include "xla/ffi/api/ffi.h"

#define JFA_EXPORT extern "C" __attribute__((visibility("default")))

namespace ffi = xla::ffi;

namespace {

// The state of a call site; XLA makes it at instantiation and deletes it with the executable.
struct CallSite {
  static ffi::TypeId id;
  static const ffi::TypeInfo info;
  explicit CallSite(jfa::LaunchPlan plan) : executor(std::move(plan)) {}
  jfa::Executor executor;
};

ffi::TypeId CallSite::id = {};  // XLA writes it when the type is registered
const ffi::TypeInfo CallSite::info = ffi::MakeTypeInfo<CallSite>();

ffi::ErrorCode ToFfi(jfa::ErrorCode code) {
  switch (code) {
    case jfa::ErrorCode::kInvalidArgument: return ffi::ErrorCode::kInvalidArgument;
    case jfa::ErrorCode::kNotFound: return ffi::ErrorCode::kNotFound;
    case jfa::ErrorCode::kFailedPrecondition: return ffi::ErrorCode::kFailedPrecondition;
    case jfa::ErrorCode::kResourceExhausted: return ffi::ErrorCode::kResourceExhausted;
    case jfa::ErrorCode::kDataLoss: return ffi::ErrorCode::kDataLoss;
    case jfa::ErrorCode::kUnavailable: return ffi::ErrorCode::kUnavailable;
    case jfa::ErrorCode::kInternal: return ffi::ErrorCode::kInternal;
  }
  return ffi::ErrorCode::kUnknown;
}

// No exception may leave the library.
template <typename Body>
ffi::Error Guard(const Body& body) {
  try {
    body();
    return ffi::Error::Success();
  } catch (const jfa::Error& error) {
    return ffi::Error(ToFfi(error.code()), std::string("jax_fa_blackwell: ") + error.what());
  } catch (const std::exception& error) {
    return ffi::Error::Internal(std::string("jax_fa_blackwell: ") + error.what());
  }
}

ffi::ErrorOr<std::unique_ptr<CallSite>> Instantiate(std::string_view plan) {
  std::unique_ptr<CallSite> site;
  ffi::Error error = Guard([&] { site = std::make_unique<CallSite>(jfa::DecodePlan(plan)); });
  if (error.failure()) return ffi::Unexpected<ffi::Error>(std::move(error));
  return site;
}

ffi::Error Initialize(CallSite* site, jfa::cu::Stream stream) {
  return Guard([&] { site->executor.Initialize(stream); });
}

ffi::Error Execute(CallSite* site, jfa::cu::Stream stream, ffi::RemainingArgs arguments, ffi::RemainingRets results) {
  return Guard([&] {
    const size_t argument_count = arguments.size(), result_count = results.size();
    if (argument_count + result_count > jfa::kMaxOperands) {
      throw jfa::Error(jfa::ErrorCode::kInvalidArgument,
                       jfa::Concat("a call has at most ", jfa::kMaxOperands, " operands; got ",
                                   argument_count + result_count));
    }
    std::array<jfa::Buffer, jfa::kMaxOperands> operands;
    auto set = [&](size_t index, const auto& buffer) {
      operands[index] = {buffer.untyped_data(), static_cast<int64_t>(buffer.size_bytes())};
    };
    for (size_t i = 0; i < argument_count; ++i) {
      auto argument = arguments.get<ffi::AnyBuffer>(i);
      if (argument.has_error()) throw jfa::Error(jfa::ErrorCode::kInvalidArgument, argument.error().message());
      set(i, *argument);
    }
    for (size_t i = 0; i < result_count; ++i) {
      auto result = results.get<ffi::AnyBuffer>(i);
      if (result.has_error()) throw jfa::Error(jfa::ErrorCode::kInvalidArgument, result.error().message());
      set(argument_count + i, **result);
    }
    site->executor.Execute(stream, operands.data(), argument_count, result_count);
  });
}

}  // namespace

JFA_EXPORT XLA_FFI_Error* jfa_instantiate(XLA_FFI_CallFrame* frame);
JFA_EXPORT XLA_FFI_Error* jfa_initialize(XLA_FFI_CallFrame* frame);
JFA_EXPORT XLA_FFI_Error* jfa_execute(XLA_FFI_CallFrame* frame);

XLA_FFI_DEFINE_HANDLER_SYMBOL(jfa_instantiate, Instantiate,
                              ffi::Ffi::BindInstantiate().Attr<std::string_view>("plan"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    jfa_initialize, Initialize,
    ffi::Ffi::BindInitialize().Ctx<ffi::State<CallSite>>().Ctx<ffi::PlatformStream<jfa::cu::Stream>>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(jfa_execute, Execute,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::State<CallSite>>()
                                  .Ctx<ffi::PlatformStream<jfa::cu::Stream>>()
                                  .RemainingArgs()
                                  .RemainingRets(),
                              {ffi::Traits::kCmdBufferCompatible});

// What jax.ffi.register_ffi_type takes.
JFA_EXPORT ffi::TypeId* jfa_call_site_type_id() { return &CallSite::id; }
JFA_EXPORT const ffi::TypeInfo* jfa_call_site_type_info() { return &CallSite::info; }

// The version of the plans that this library reads; the Python package must write the same.
JFA_EXPORT uint32_t jfa_plan_version() { return jfa::kPlanVersion; }

// Adds a directory in which cubins lie as `<sha256>.cubin`.
JFA_EXPORT void jfa_add_cubin_directory(const char* directory) { jfa::CubinStore::Global().AddDirectory(directory); }

// See Executor::ExecutionCount.
JFA_EXPORT uint64_t jfa_execution_count() { return jfa::Executor::ExecutionCount(); }
