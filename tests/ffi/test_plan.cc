// The plan's reader: each rule, by a plan that breaks it. Python's tests compare accepted plans field by field.
#include "harness.h"
#include "plan.h"
#include "plan_encoder.h"
#include "support.h"

namespace {

using Change = std::function<void(jfa::LaunchPlan&, jfa::Launch&, jfa::TensorMap&, jfa::Fill&)>;

std::string Encoded(const Change& change) {
  jfa::LaunchPlan plan = GoodPlan({});
  jfa::Launch& launch = MainLaunch(plan);
  change(plan, launch, std::get<jfa::TensorMap>(launch.params[0]), std::get<jfa::Fill>(plan.programs[1].steps[0]));
  return EncodePlan(plan);
}

void ExpectRejected(int line, const std::string& text, const Change& change) {
  harness::ExpectError(__FILE__, line, jfa::ErrorCode::kInvalidArgument, {"launch plan: ", text},
                       [&] { jfa::DecodePlan(Encoded(change)); });
}

#define REJECTS(text, ...)                                                                                            \
  ExpectRejected(__LINE__, text,                                                                                      \
                 [&]([[maybe_unused]] jfa::LaunchPlan& plan, [[maybe_unused]] jfa::Launch& launch,                    \
                     [[maybe_unused]] jfa::TensorMap& map, [[maybe_unused]] jfa::Fill& fill) { __VA_ARGS__; })

}  // namespace

TEST(plan, RoundTrip) {
  const std::string bytes = EncodePlan(GoodPlan({}));
  EXPECT(EncodePlan(jfa::DecodePlan(bytes)) == bytes);
}

TEST(plan, EveryTruncationIsAnError) {
  const std::string bytes = EncodePlan(GoodPlan({}));
  for (size_t size = 0; size < bytes.size(); ++size) {
    EXPECT_ERROR(kInvalidArgument, Texts("launch plan: "), jfa::DecodePlan(std::string_view(bytes).substr(0, size)));
  }
  EXPECT_ERROR(kInvalidArgument, Texts("1 bytes too many"), jfa::DecodePlan(bytes + "x"));
}

TEST(plan, Header) {
  EXPECT_ERROR(kInvalidArgument, Texts("wrong first four bytes"), jfa::DecodePlan("PLAN"));
  EXPECT_ERROR(kInvalidArgument, Texts("it has version 7", "reads version 1"),
               jfa::DecodePlan(EncodePlan(GoodPlan({}), 7)));
}

TEST(plan, NamesAndCounts) {
  REJECTS("plan name must be printable", plan.name = "");
  REJECTS("plan name must be printable", plan.name = "caf\xc3\xa9");
  REJECTS("symbol must be printable", launch.symbol = std::string("a\0b", 3));
  REJECTS("kernel name must be printable", launch.kernel = "two\nlines");
  REJECTS("arch must name", plan.programs[1].arch = "sm_90");
  REJECTS("arch must name", plan.programs[1].arch = "sm_90000a");
  REJECTS("has sm_90a twice", plan.programs[0].arch = "sm_90a");
  REJECTS("17 programs", plan.programs.resize(17, {"sm_100a", {}}));
  REJECTS("65 arguments", plan.argument_bytes.resize(65));
  REJECTS("66 operands", plan.argument_bytes.resize(64));
  REJECTS("a buffer of -1 bytes", plan.argument_bytes[0] = -1);
}

TEST(plan, Launches) {
  REJECTS("grid extent 1 must be 1 to 65535; got 65536", launch.grid[1] = 65536);
  REJECTS("grid extent 0 must be 1 to", launch.grid[0] = 0);
  REJECTS("block extent 2 must be 1 to 64", launch.block[2] = 65);
  REJECTS("1088 threads", launch.block = (jfa::Extents{544, 2, 1}));
  REJECTS("cluster extent 0 must be 1 to 16", launch.cluster[0] = 17);
  REJECTS("18 blocks in a cluster", launch.cluster = (jfa::Extents{6, 1, 3}));
  REJECTS("does not divide grid extent 3", launch.cluster[2] = 2);
  REJECTS("shared_bytes must be 0 to 232448", launch.shared_bytes = 232449);
  REJECTS("257 parameters", launch.params.resize(257, jfa::Int32{1}));
  REJECTS("at most 4096", launch.params.resize(100, launch.params[0]));
  REJECTS("a bytes parameter has 1 to 4096", launch.params[4] = jfa::Bytes{});
}

TEST(plan, TensorMaps) {
  REJECTS("tensor map dim 1 must be 1 to 2**32; got 0", map.dims[1] = 0);
  REJECTS("tensor map dim 0 must be", map.dims[0] = (uint64_t{1} << 32) + 1);
  REJECTS("stride 0 must be a positive multiple of 16", map.strides_bytes[0] = 8);
  REJECTS("stride 1 must be", map.strides_bytes[1] = 0);
  REJECTS("stride 1 must be", map.strides_bytes[1] = uint64_t{1} << 40);
  REJECTS("box extent 0 must be 1 to 256", map.box[0] = 257);
  REJECTS("box rows must be multiples of 16", map.box[0] = 4);
  REJECTS("box rows of 128 bytes exceed the swizzle of 64", map.box[0] = 64);
  REJECTS("element stride 1 must be 1 to 8", map.element_strides[1] = 9);
  REJECTS("element strides must begin with 1", map.element_strides[0] = 2);
  REJECTS("offset must be a multiple of 16", map.offset_bytes = 8);
  REJECTS("fill 'nan' needs a floating", map.element_type = jfa::ElementType::kInt32, map.box[0] = 16);
  REJECTS("element type must be below 10", map.element_type = jfa::ElementType::kCount);
  REJECTS("swizzle must be below 4", map.swizzle = jfa::Swizzle::kCount);
}

TEST(plan, Ranges) {
  REJECTS("tensor map names operand 4 of 4", map.operand = 4);
  REJECTS("pointer names operand 9", launch.params[1] = (jfa::Pointer{9, 0}));
  REJECTS("fill names operand", fill.operand = 0xffffffff);
  REJECTS("tensor map at byte 3072 ends outside operand 1", map.offset_bytes = 3072);
  REJECTS("ends outside operand", map.dims[2] = uint64_t{1} << 32, map.strides_bytes[1] = (uint64_t{1} << 40) - 16);
  REJECTS("pointer at byte 4096 is past operand 2", launch.params[1] = (jfa::Pointer{2, 4096}));
  REJECTS("ends outside operand", launch.params[1] = (jfa::Pointer{2, -1}));
  REJECTS("fill at byte 16 ends outside operand 3", fill.words = 13);
  REJECTS("ends outside operand", fill.words = INT64_MAX);
  REJECTS("ends outside operand", fill.offset_bytes = -4);
  REJECTS("a fill needs at least one word", fill.words = 0);
  REJECTS("a fill's offset must be a multiple of 4", fill.offset_bytes = 2);
}

TEST(plan, LegalEdges) {
  auto accepts = [](const Change& change) { jfa::DecodePlan(Encoded(change)); };
  accepts([](auto& plan, auto& launch, auto&, auto&) {  // an empty operand has a beginning
    plan.argument_bytes[0] = 0;
    launch.params[1] = jfa::Pointer{0, 0};
  });
  accepts([](auto& plan, auto&, auto&, auto&) { plan.programs.clear(); });
  accepts([](auto&, auto& launch, auto&, auto&) { launch.cluster = launch.grid = {16, 1, 1}; });
  accepts([](auto&, auto&, auto& map, auto&) { map.offset_bytes = 4096 - 1024 - 768 - 128; });  // ends with the operand
}
