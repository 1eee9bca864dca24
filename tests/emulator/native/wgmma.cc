// wgmma.mma_async, .fence, .commit_group and .wait_group (PTX ISA 9.7.15). The arithmetic is that of tcgen05.mma, at
// the precision that an H200 shows.
//
// Each warp of a warpgroup computes its own 16 rows, as on the hardware, perhaps before the other warps have issued the
// instruction: what only they have waited for may be missing. But it completes for all four at once: kernels count on
// that where one thread signals for the warpgroup. Fragments are those of mma.sync: register j of A holds bytes 16 (j /
// 2) + 4 (lane % 4) of row lane / 4 + 8 (j % 2); of every 8 columns of D a lane holds two neighbours in row lane / 4,
// then in row lane / 4 + 8, in four registers or (f16) two.
#include "wgmma.h"

#include <algorithm>
#include <cstring>
#include <optional>

#include "bulk.h"
#include "operand_access.h"

namespace emu {
namespace {

using mma::Accumulator;
using mma::Element;
using mma::Multiplicand;
using mma::SharedOperand;
using Last = WgmmaRegister::Last;

constexpr int kM = 64, kWarpRows = 16, kMaxN = 256;

/// The instruction as written.
struct MmaData : Payload {
  Element a = Element::f16, b = Element::f16;
  Accumulator d = Accumulator::f32;
  int n = 0, k = 0;
  bool negate_a = false, negate_b = false, mn_major_a = false, mn_major_b = false;
  Slot desc_a = kNoSlot, desc_b = kNoSlot, accumulate = kNoSlot;
  bool accumulate_negated = false;
  std::vector<Slot> regs_a, regs_d;                    // regs_a is empty for A in shared memory
  std::vector<uint32_t> numbers_a, numbers_d;          // of WgmmaRegister
  std::string name;                                    // "bf16 64x128x16 wgmma SS"

  bool a_in_registers() const { return !regs_a.empty(); }
  /// Wgmma of one shape may follow each other on one accumulator without a fence.
  uint64_t shape() const { return static_cast<uint64_t>(n) << 16 | static_cast<uint64_t>(k) << 8 | static_cast<uint64_t>(d); }
};

}  // namespace

/// One wgmma.mma_async of a warpgroup: what its four warps share.
struct WgmmaWork {
  uint64_t desc_a = 0, desc_b = 0;
  bool accumulate = false;
  std::array<SharedOperand, 4> a;             // rows of each warp; empty for A in registers
  SharedOperand b;
  std::vector<uint8_t> snapshot_b;            // as the first warp's operation found it, ...
  std::optional<Multiplicand> decoded_b;      // ... decoded
  int landed = 0;                             // warps whose operation has landed
};

namespace {

class WgmmaOp final : public AsyncOp {
 public:
  const MmaData* data = nullptr;
  Warp* warp = nullptr;
  std::shared_ptr<WgmmaWork> work;

  bool advance(Cluster& cluster) override;
  std::string describe() const override { return format("wgmma.mma_async %s of warp %d", data->name.c_str(), warp->index); }

 private:
  using Matrix = uint32_t[kWarpRows][kMaxN];

  std::vector<uint8_t> rows_of_a(Cluster& cluster);
  const Multiplicand& columns_of_b(Cluster& cluster, std::optional<Multiplicand>* own);
  void load_accumulator(Matrix& c) const;
  void store_accumulator(const Matrix& c) const;
};

std::vector<uint8_t> WgmmaOp::rows_of_a(Cluster& cluster) {
  if (!data->a_in_registers()) {
    const SharedOperand& a = work->a[static_cast<size_t>(warp->index % 4)];
    notify_units(cluster, *this, *warp->cta, a.units);
    return a.gather(warp->cta->shared);
  }
  std::vector<uint8_t> packed(kWarpRows * mma::kRowBytes);
  for (size_t j = 0; j < data->regs_a.size(); ++j) {
    const uint32_t* reg = warp->r32(data->regs_a[j]);
    for (int lane = 0; lane < kLanes; ++lane) {
      const size_t row = static_cast<size_t>(lane) / 4 + 8 * (j % 2);
      std::memcpy(packed.data() + row * mma::kRowBytes + 16 * (j / 2) + 4 * (static_cast<size_t>(lane) % 4), reg + lane, 4);
    }
  }
  return packed;
}

const Multiplicand& WgmmaOp::columns_of_b(Cluster& cluster, std::optional<Multiplicand>* own) {
  notify_units(cluster, *this, *warp->cta, work->b.units);
  const uint8_t* shared = warp->cta->shared;
  auto decode = [&](std::optional<Multiplicand>* out) -> const Multiplicand& {
    const std::vector<uint8_t> packed = work->b.gather(shared);
    return out->emplace(Multiplicand::Side::inner, data->b, data->negate_b, packed.data(), data->n, data->k, mma::kRowBytes);
  };
  if (!work->decoded_b) {
    work->snapshot_b = work->b.snapshot(shared);
    return decode(&work->decoded_b);
  }
  // Memory may have changed between the operations of two warps.
  return work->b.unchanged(shared, work->snapshot_b) ? *work->decoded_b : decode(own);
}

void WgmmaOp::load_accumulator(Matrix& c) const {
  for (int j = 0; j < data->n / 8; ++j) {
    for (int half = 0; half < 2; ++half) {
      if (data->d == Accumulator::f16) {
        const uint32_t* pair = warp->r32(data->regs_d[static_cast<size_t>(2 * j + half)]);
        for (int row = 0; row < 8; ++row) {
          uint32_t* out = &c[row + 8 * half][8 * j];
          for (int t = 0; t < 4; ++t) {
            out[2 * t] = pair[4 * row + t] & 0xffff;
            out[2 * t + 1] = pair[4 * row + t] >> 16;
          }
        }
        continue;
      }
      const uint32_t* even = warp->r32(data->regs_d[static_cast<size_t>(4 * j + 2 * half)]);
      const uint32_t* odd = warp->r32(data->regs_d[static_cast<size_t>(4 * j + 2 * half + 1)]);
      for (int row = 0; row < 8; ++row) {
        uint32_t* out = &c[row + 8 * half][8 * j];
        for (int t = 0; t < 4; ++t) {
          out[2 * t] = even[4 * row + t];
          out[2 * t + 1] = odd[4 * row + t];
        }
      }
    }
  }
}

void WgmmaOp::store_accumulator(const Matrix& c) const {
  for (int j = 0; j < data->n / 8; ++j) {
    for (int half = 0; half < 2; ++half) {
      if (data->d == Accumulator::f16) {
        uint32_t* pair = warp->r32(data->regs_d[static_cast<size_t>(2 * j + half)]);
        for (int row = 0; row < 8; ++row) {
          const uint32_t* in = &c[row + 8 * half][8 * j];
          for (int t = 0; t < 4; ++t) pair[4 * row + t] = (in[2 * t] & 0xffff) | in[2 * t + 1] << 16;
        }
        continue;
      }
      uint32_t* even = warp->r32(data->regs_d[static_cast<size_t>(4 * j + 2 * half)]);
      uint32_t* odd = warp->r32(data->regs_d[static_cast<size_t>(4 * j + 2 * half + 1)]);
      for (int row = 0; row < 8; ++row) {
        const uint32_t* in = &c[row + 8 * half][8 * j];
        for (int t = 0; t < 4; ++t) {
          even[4 * row + t] = in[2 * t];
          odd[4 * row + t] = in[2 * t + 1];
        }
      }
    }
  }
}

bool WgmmaOp::advance(Cluster& cluster) {
  std::optional<Multiplicand> own_b;
  const Multiplicand& columns = columns_of_b(cluster, &own_b);
  const std::vector<uint8_t> packed_a = rows_of_a(cluster);
  const Multiplicand rows(Multiplicand::Side::outer, data->a, data->negate_a, packed_a.data(), kWarpRows, data->k, mma::kRowBytes);
  alignas(64) Matrix c;
  uint32_t* out[kWarpRows];
  for (int row = 0; row < kWarpRows; ++row) out[row] = c[row];
  mma::Options options;
  options.accumulator = data->d;
  options.read_c = work->accumulate;
  if (mma::container_bits(data->a) == 8) options.precision = mma::kHopper8Bit;
  if (work->accumulate) load_accumulator(c);
  mma::multiply_accumulate(rows, columns, 0, data->n, out, options);
  store_accumulator(c);
  if (++work->landed == 4) {
    cluster.count_mma(data->name);
    work->decoded_b.reset();
    work->snapshot_b = {};
  }
  return true;
}

// ---------------------------------------------------------------- the warps of a warpgroup

/// The warp's state; made with the warpgroup's at the first wgmma instruction of any of its warps.
WgmmaWarp& state_of(Warp& warp) {
  if (warp.wgmma) return *warp.wgmma;
  Cta& cta = *warp.cta;
  const size_t first = static_cast<size_t>(warp.index) / 4 * 4;
  if (first + 4 > cta.warps.size() || cta.warps[first + 3]->full != kFull) {
    fail(Fault::warpgroup, "warp %d belongs to no whole warpgroup: the CTA has %u threads, and a warpgroup is four whole warps from a multiple of four on",
         warp.index, cta.threads);
  }
  auto group = std::make_shared<Warpgroup>();
  for (size_t w = first; w < first + 4; ++w) {
    cta.warps[w]->wgmma = std::make_shared<WgmmaWarp>();
    cta.warps[w]->wgmma->group = group;
    cta.warps[w]->wgmma->registers.resize(cta.cluster->grid->program->wgmma_registers);
  }
  return *warp.wgmma;
}

/// The instruction's place in the warpgroup's sequence, new if the warp is the first one there. The other warps must
/// have executed the same one there.
Warpgroup::Step& step_of(Warp& warp, const Instruction& in, uint32_t mask) {
  Warpgroup& group = *state_of(warp).group;
  if (mask != kFull) fail(Fault::divergence, "a wgmma instruction needs all 32 threads of its warp; 0x%08x execute it", mask);
  const size_t member = static_cast<size_t>(warp.index) % 4;
  const size_t at = group.passed[member] - group.first;
  if (at == group.steps.size()) {
    for (size_t w = 0; w < 4; ++w) {
      const Warp& other = *warp.cta->warps[static_cast<size_t>(warp.index) / 4 * 4 + w];
      if (other.live != kFull) {
        fail(Fault::warpgroup, "warp %d of the warpgroup has ended, at least in part; all four warps must execute the instruction", other.index);
      }
    }
    group.steps.push_back({&in, warp.index, in.line, nullptr});
  }
  Warpgroup::Step& step = group.steps[at];
  if (step.instruction != &in) {
    fail(Fault::warpgroup,
         "the warps of the warpgroup are not in step: as wgmma instruction %llu of the warpgroup warp %d executes this one, but warp %d executed "
         "that of line %d",
         static_cast<unsigned long long>(group.passed[member] + 1), warp.index, step.warp, step.line);
  }
  return step;
}

/// The warp has executed its step.
void pass(Warp& warp) {
  Warpgroup& group = *warp.wgmma->group;
  ++group.passed[static_cast<size_t>(warp.index) % 4];
  const uint64_t slowest = *std::min_element(group.passed.begin(), group.passed.end());
  for (; group.first < slowest; ++group.first) group.steps.pop_front();
}

// ---------------------------------------------------------------- registers

void check_fenced(const WgmmaRegister& reg, const char* matrix) {
  switch (reg.last) {
    case Last::fenced: return;
    case Last::unfenced:
      fail(Fault::warpgroup, "no wgmma.fence since the warp started, and registers of %s are used for the first time", matrix);
    case Last::wgmma:
      fail(Fault::warpgroup, "a register of %s was in the accumulator of the wgmma in line %d, of another shape or at another place: no wgmma.fence since",
           matrix, reg.line);
    default:
      fail(Fault::warpgroup, "a register of %s was %s in line %d: no wgmma.fence since", matrix, reg.last == Last::read ? "read" : "written", reg.line);
  }
}

/// Takes the registers for wgmma number `number`.
void take_registers(WgmmaWarp& state, const MmaData& d, uint64_t number, int line) {
  for (const uint32_t i : d.numbers_a) {
    WgmmaRegister& reg = state.registers[i];
    if (reg.user > state.retired && !reg.as_a) {
      fail(Fault::warpgroup, "a register of A is in the accumulator of the wgmma in line %d, which is in flight: wgmma.wait_group first", reg.user_line);
    }
    check_fenced(reg, "A");
    reg.user = number;
    reg.as_a = true;
    reg.user_line = line;
  }
  const uint64_t shape = d.shape();
  for (size_t p = 0; p < d.numbers_d.size(); ++p) {
    WgmmaRegister& reg = state.registers[d.numbers_d[p]];
    const bool same = reg.shape == shape && reg.position == p;
    if (reg.user > state.retired && (reg.as_a || !same)) {
      fail(Fault::warpgroup, "a register of the accumulator is in %s of the wgmma in line %d, which is in flight: wgmma.wait_group first",
           reg.as_a ? "A" : "an accumulator of another shape, or at another place,", reg.user_line);
    }
    if (reg.last != Last::wgmma || !same) check_fenced(reg, "the accumulator");
    reg.user = number;
    reg.as_a = false;
    reg.shape = shape;
    reg.position = static_cast<uint16_t>(p);
    reg.last = Last::wgmma;
    reg.line = reg.user_line = line;
  }
}

// ---------------------------------------------------------------- execution

template <class T>
T uniform(const T* values, const char* what) {
  for (int lane = 1; lane < kLanes; ++lane) {
    if (values[lane] != values[0]) {
      fail_lane(lane, Fault::illegal_operand, "%s differs between the threads of the warp: 0x%llx in lane 0, 0x%llx in lane %d", what,
                static_cast<unsigned long long>(values[0]), static_cast<unsigned long long>(values[lane]), lane);
    }
  }
  return values[0];
}

bool uniform_predicate(uint32_t lanes) {
  if (lanes != 0 && lanes != kFull) fail(Fault::illegal_operand, "scale-d differs between the threads of the warp: it is true in lanes 0x%08x", lanes);
  return lanes != 0;
}

std::shared_ptr<WgmmaWork> make_work(Warp& warp, const MmaData& d, uint64_t desc_a, uint64_t desc_b, bool accumulate) {
  auto work = std::make_shared<WgmmaWork>();
  work->desc_a = desc_a;
  work->desc_b = desc_b;
  work->accumulate = accumulate;
  work->b = SharedOperand(mma::decode_wgmma_descriptor(desc_b), d.b, d.mn_major_b, d.n, "B");
  check_units(*warp.cta, work->b.units, "wgmma.mma_async: B");
  if (d.a_in_registers()) return work;
  const SharedOperand a(mma::decode_wgmma_descriptor(desc_a), d.a, d.mn_major_a, kM, "A");
  check_units(*warp.cta, a.units, "wgmma.mma_async: A");
  for (int w = 0; w < 4; ++w) work->a[static_cast<size_t>(w)] = a.part(w * kWarpRows, kWarpRows);
  return work;
}

Step run_mma(Warp& warp, const Instruction& in, uint32_t mask) {
  const auto& d = in.as<MmaData>();
  Cluster& cluster = *warp.cta->cluster;
  Warpgroup::Step& step = step_of(warp, in, mask);
  const uint64_t desc_a = d.a_in_registers() ? 0 : uniform(warp.r64(d.desc_a), "the descriptor of A");
  const uint64_t desc_b = uniform(warp.r64(d.desc_b), "the descriptor of B");
  const bool accumulate = uniform_predicate(warp.pred(d.accumulate)) != d.accumulate_negated;
  if (!step.work) step.work = make_work(warp, d, desc_a, desc_b, accumulate);
  const WgmmaWork& work = *step.work;
  if (work.desc_a != desc_a || work.desc_b != desc_b || work.accumulate != accumulate) {
    fail(Fault::illegal_operand,
         "descriptors or scale-d differ between the warps of the warpgroup: A 0x%016llx, B 0x%016llx, scale-d %d in warp %d; "
         "A 0x%016llx, B 0x%016llx, scale-d %d in warp %d",
         static_cast<unsigned long long>(work.desc_a), static_cast<unsigned long long>(work.desc_b), work.accumulate, step.warp,
         static_cast<unsigned long long>(desc_a), static_cast<unsigned long long>(desc_b), accumulate, warp.index);
  }
  WgmmaWarp& state = *warp.wgmma;
  take_registers(state, d, state.issued + 1, in.line);
  ++state.issued;
  auto op = std::make_unique<WgmmaOp>();
  op->data = &d;
  op->warp = &warp;
  op->work = step.work;
  op->agent = warp.agent(0);
  op->agent.engine = Engine::tensor;
  op->line = in.line;
  // A warp's wgmma land in order of issue.
  op->pipe = cluster.async.pipe(uint64_t{1} << 51 | static_cast<uint64_t>(warp.cta->rank) << 16 | static_cast<uint64_t>(warp.index));
  state.open = {state.issued, state.group->passed[static_cast<size_t>(warp.index) % 4], in.line, step.work};
  pass(warp);
  cluster.async.submit(cluster, std::move(op));
  return Step::next;
}

Step run_fence(Warp& warp, const Instruction& in, uint32_t mask) {
  step_of(warp, in, mask);
  for (WgmmaRegister& reg : warp.wgmma->registers) reg.last = Last::fenced;
  pass(warp);
  return Step::next;
}

Step run_commit(Warp& warp, const Instruction& in, uint32_t mask) {
  step_of(warp, in, mask);
  WgmmaWarp& state = *warp.wgmma;
  state.committed.push_back(state.open);
  state.grouped = state.issued;
  state.open = {};
  pass(warp);
  return Step::next;
}

Step run_wait(Warp& warp, const Instruction& in, uint32_t mask) {
  step_of(warp, in, mask);
  Cluster& cluster = *warp.cta->cluster;
  WgmmaWarp& state = *warp.wgmma;
  const size_t done = state.committed.size() - std::min<size_t>(state.committed.size(), in.imm);
  for (size_t i = 0; i < done; ++i) {
    const WgmmaWarp::Group& group = state.committed[i];
    if (!group.last) continue;
    if (group.step >= state.group->first) return warp.block(Wait::Kind::group, "the other warps of its warpgroup to execute the wgmma of its groups");
    if (group.work->landed < 4) return warp.block(Wait::Kind::group, "its wgmma groups (wgmma.wait_group)");
  }
  for (size_t i = 0; i < done; ++i) {
    if (state.committed.front().last) state.retired = state.committed.front().last;
    state.committed.pop_front();
  }
  pass(warp);
  if (Observer* observer = cluster.grid->observer) {
    for (int lane = 0; lane < kLanes; ++lane) {
      observer->sync({SyncKind::group_wait, warp.agent(lane), 0, 0, static_cast<int64_t>(in.imm), 0, cluster.order++, in.line});
    }
  }
  return Step::next;
}

// ---------------------------------------------------------------- decoding

void take_sync_aligned(const Statement& s, Modifiers& mods) {
  if (!mods.take("sync") || !mods.take("aligned")) unsupported(s, "'" + s.mnemonic + "' lacks .sync.aligned");
}

void check_target(Decoder& decoder, const Statement& s) {
  const std::string& target = decoder.program().target;
  if (target != "sm_90a") unsupported(s, "wgmma exists on sm_90a only; the module's target is " + target);
}

struct Shape {
  int n, k;
};

/// ".m64nNkK"
Shape take_shape(const Statement& s, Modifiers& mods) {
  const std::string text = mods.peek();
  Shape shape{0, 0};
  int used = 0;
  if (std::sscanf(text.c_str(), "m64n%dk%d%n", &shape.n, &shape.k, &used) != 2 || used != static_cast<int>(text.size())) {
    unsupported(s, "'" + s.mnemonic + "' lacks a shape .m64nNkK");
  }
  mods.take(text.c_str());
  if (shape.n < 8 || shape.n > kMaxN || shape.n % 8 != 0) unsupported(s, format("wgmma: N is %d; it is a multiple of 8 from 8 to 256", shape.n));
  return shape;
}

Element take_element(const Statement& s, Modifiers& mods) {
  constexpr Element elements[] = {Element::f16, Element::bf16, Element::tf32, Element::e4m3, Element::e5m2};
  const std::string text = mods.peek();
  const int i = mods.take_one({"f16", "bf16", "tf32", "e4m3", "e5m2"});
  if (i < 0) unsupported(s, "wgmma of type ." + text + " is not known; .f16, .bf16, .tf32, .e4m3 and .e5m2 are");
  return elements[i];
}

void check_types(const Statement& s, const MmaData& d) {
  const bool both_8 = mma::container_bits(d.a) == 8 && mma::container_bits(d.b) == 8;
  if (d.a != d.b && !both_8) unsupported(s, format("wgmma: A of type .%s and B of type .%s do not go together", mma::name(d.a), mma::name(d.b)));
  if (d.k * mma::container_bits(d.a) != 8 * mma::kRowBytes) {
    unsupported(s, format("wgmma: K is %d; for .%s it is %d", d.k, mma::name(d.a), 8 * mma::kRowBytes / mma::container_bits(d.a)));
  }
  if (d.d == Accumulator::f16 && d.a != Element::f16 && !both_8) unsupported(s, format("wgmma: .%s operands take .f32 accumulators", mma::name(d.a)));
}

/// A constant operand that must be one of two.
bool take_flag(Decoder& decoder, const Statement& s, const Operand& operand, const char* what, int64_t off, int64_t on) {
  const int64_t value = decoder.immediate(operand);
  if (value != off && value != on) {
    unsupported(s, format("wgmma: %s is %lld; it is %lld or %lld", what, static_cast<long long>(value), static_cast<long long>(off), static_cast<long long>(on)));
  }
  return value == on;
}

void decode_mma(Decoder& decoder, const Statement& s, Modifiers& mods, Instruction& in) {
  auto d = std::make_unique<MmaData>();
  check_target(decoder, s);
  if (mods.take("sp")) unsupported(s, "sparse matrices (wgmma.mma_async.sp) are not known");
  take_sync_aligned(s, mods);
  const Shape shape = take_shape(s, mods);
  d->n = shape.n;
  d->k = shape.k;
  const int type_d = mods.take_one({"f32", "f16", "s32"}, -2);
  if (type_d == 2) unsupported(s, "wgmma of integers is not known");
  d->d = type_d ? Accumulator::f16 : Accumulator::f32;
  d->a = take_element(s, mods);
  d->b = take_element(s, mods);
  check_types(s, *d);

  // d, a, b-desc, scale-d, imm-scale-a, imm-scale-b, and for 16 bits imm-trans-a (A in shared memory), imm-trans-b
  const bool in_registers = s.operands.size() > 1 && s.operands[1].kind == Operand::Kind::vector;
  const bool transposes = mma::container_bits(d->a) == 16;
  const size_t count = 6u + (transposes ? in_registers ? 1 : 2 : 0);
  decoder.operand_count(s, count, count);
  d->desc_b = decoder.source(s.operands[2], Type::b64);
  Operand accumulate = s.operands[3];
  d->accumulate_negated = accumulate.negated;
  accumulate.negated = false;
  d->accumulate = decoder.source(accumulate, Type::pred);
  d->negate_a = take_flag(decoder, s, s.operands[4], "imm-scale-a", 1, -1);
  d->negate_b = take_flag(decoder, s, s.operands[5], "imm-scale-b", 1, -1);
  if (transposes) {
    if (!in_registers) d->mn_major_a = take_flag(decoder, s, s.operands[6], "imm-trans-a", 0, 1);
    d->mn_major_b = take_flag(decoder, s, s.operands[count - 1], "imm-trans-b", 0, 1);
  }
  if (in_registers) {
    const std::vector<Operand>& items = s.operands[1].items;
    if (items.size() != 4) unsupported(s, format("'%s' takes 4 registers of A; got %zu", s.mnemonic.c_str(), items.size()));
    for (const Operand& item : items) {
      d->regs_a.push_back(decoder.source(item, Type::b32));
      if (item.kind != Operand::Kind::reg) unsupported(s, "A of wgmma in registers: constants are not known");
      d->numbers_a.push_back(decoder.wgmma_register(item));
      decoder.pin(item);
    }
  } else {
    d->desc_a = decoder.source(s.operands[1], Type::b64);
  }
  if (s.operands[0].kind != Operand::Kind::vector) unsupported(s, "D of wgmma is a vector of registers");
  const std::vector<Operand>& items = s.operands[0].items;
  const size_t registers = static_cast<size_t>(d->n) / (d->d == Accumulator::f16 ? 4 : 2);
  if (items.size() != registers) unsupported(s, format("'%s' takes %zu registers of D; got %zu", s.mnemonic.c_str(), registers, items.size()));
  for (const Operand& item : items) {
    d->regs_d.push_back(decoder.destination(item, Type::b32));
    d->numbers_d.push_back(decoder.wgmma_register(item));
    decoder.pin(item);
  }
  d->name = format("%s 64x%dx%d wgmma %s%s", mma::name(d->a), d->n, d->k, in_registers ? "RS" : "SS", d->d == Accumulator::f16 ? " f16" : "");
  in.aligned = true;
  in.exec = run_mma;
  decoder.keep(in, std::move(d));
}

template <Step (*run)(Warp&, const Instruction&, uint32_t), bool takes_count>
void decode_sync(Decoder& decoder, const Statement& s, Modifiers& mods, Instruction& in) {
  check_target(decoder, s);
  take_sync_aligned(s, mods);
  decoder.operand_count(s, takes_count, takes_count);
  if (takes_count) {
    const int64_t groups = decoder.immediate(s.operands[0]);
    if (groups < 0) unsupported(s, format("wgmma.wait_group: N is %lld; it is not negative", static_cast<long long>(groups)));
    in.imm = static_cast<uint64_t>(groups);
  }
  in.aligned = true;
  in.exec = run;
}

const Family mma_family("wgmma.mma_async", decode_mma);
const Family fence_family("wgmma.fence", decode_sync<run_fence, false>);
const Family commit_family("wgmma.commit_group", decode_sync<run_commit, false>);
const Family wait_family("wgmma.wait_group", decode_sync<run_wait, true>);

}  // namespace

void fail_wgmma_register(const Warp& warp, const WgmmaRegister& reg, bool write) {
  const WgmmaWarp& state = *warp.wgmma;
  fail(Fault::warpgroup, "the instruction %s a register of %s of the wgmma in line %d, which is in flight: %s", write ? "writes" : "reads",
       reg.as_a ? "A" : "the accumulator", reg.user_line,
       reg.user <= state.grouped ? "wgmma.wait_group has not waited for its group" : "it has not been committed to a group");
}

void check_wgmma_end(const Cta& cta) {
  auto raise = [](int line, const std::string& message) {
    Verdict verdict(Fault::warpgroup, message);
    verdict.line = line;
    throw verdict;
  };
  for (const auto& warp : cta.warps) {
    if (!warp->wgmma) continue;
    const WgmmaWarp& state = *warp->wgmma;
    if (state.open.last) raise(state.open.line, format("though warp %d has not committed this wgmma to a group, nor waited for it", warp->index));
    for (const WgmmaWarp::Group& group : state.committed)
      if (group.last) raise(group.line, format("though warp %d has not waited for the group of this wgmma (wgmma.wait_group)", warp->index));
    if (!state.group->steps.empty()) {
      const Warpgroup::Step& step = state.group->steps.front();
      raise(step.line, format("though of the four warps of a warpgroup, warp %d among them, not all have executed this instruction", step.warp));
    }
  }
}

}  // namespace emu
