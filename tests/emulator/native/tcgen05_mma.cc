// tcgen05.mma, .cp, .shift and .commit (PTX ISA 9.7.16.9, .10 and .12).
#include <algorithm>
#include <optional>

#include "bulk.h"
#include "operand_access.h"
#include "tensor.h"

namespace emu {
namespace {

using mma::InstructionDescriptor;
using mma::Kind;
using mma::Multiplicand;
using mma::SharedDescriptor;
using mma::SharedOperand;

enum class Collect : uint8_t { discard, fill, use, lastuse };

const char* collect_name(Collect c) {
  constexpr const char* names[] = {"discard", "fill", "use", "lastuse"};
  return names[static_cast<int>(c)];
}

/// The instruction as written.
struct MmaData : Payload {
  Kind kind = Kind::f16;
  int group = 1;
  bool ws = false;
  int buffer = 0;                    // .ws: collector buffer of B
  Collect collect = Collect::discard;
  Slot d = kNoSlot, a = kNoSlot, b = kNoSlot, idesc = kNoSlot, accumulate = kNoSlot;
  bool accumulate_negated = false;
  int64_t d_offset = 0, a_offset = 0;
  bool a_in_tensor = false;
  std::vector<Slot> disable;         // 4 or 8 words, or none
  Slot zero_mask = kNoSlot;          // .ws
  int scale = 0;
};

class MmaOp final : public TensorOp {
 public:
  InstructionDescriptor descriptor;
  Kind kind = Kind::f16;
  bool ws = false, accumulate = true, a_in_tensor = false;
  int scale = 0, buffer = 0;
  Collect collect = Collect::discard;
  uint32_t d_lane = 0, d_column = 0, a_lane = 0, a_column = 0;
  std::optional<SharedOperand> a, b;       // of one CTA: both of a pair use the same offsets
  std::string a_source, b_source;
  std::vector<uint32_t> disable;

  int rows() const { return group == 2 ? descriptor.m / 2 : descriptor.m; }
  std::string describe() const override {
    return format("tcgen05.mma%s kind::%s %dx%dx%d cta_group::%d %s to column %u", ws ? ".ws" : "", mma::name(kind), descriptor.m,
                  descriptor.n, descriptor.k(), group, a_in_tensor ? "TS" : "SS", d_column);
  }

 protected:
  void execute(Cluster& cluster) override;

 private:
  std::vector<uint8_t> gather_b(Cluster& cluster);
  std::vector<uint8_t> gather_a(Cluster& cluster, Cta& member, const mma::PlacedBlock& block);
  void collect_operand(Collector& collector, const char* matrix, const std::string& source, const std::vector<uint8_t>& bytes) const;
  void multiply(Cta& member, int half, const mma::PlacedBlock& block, const Multiplicand& rows_of_a, const Multiplicand& columns_of_b);
  TensorPipe& pipe_of() const { return tensor_pipe(*cta); }
};

std::vector<uint8_t> MmaOp::gather_b(Cluster& cluster) {
  // Each CTA of a pair holds half of the columns.
  std::vector<uint8_t> packed;
  for (Cta* member : members()) {
    check_units(*member, b->units, "tcgen05.mma: B");
    const std::vector<uint8_t> part = b->gather(member->shared);
    packed.insert(packed.end(), part.begin(), part.end());
    notify_units(cluster, *this, *member, b->units);
  }
  return packed;
}

/// Rows of A for one block of the accumulator: from shared memory all rows; from Tensor Memory those of its lanes.
std::vector<uint8_t> MmaOp::gather_a(Cluster& cluster, Cta& member, const mma::PlacedBlock& block) {
  if (!a_in_tensor) {
    check_units(member, a->units, "tcgen05.mma: A");
    notify_units(cluster, *this, member, a->units);
    return a->gather(member.shared);
  }
  std::vector<uint8_t> packed(static_cast<size_t>(block.rows) * mma::kRowBytes);
  for (uint32_t word = 0; word < mma::kRowBytes / 4; ++word) {
    const uint32_t* lanes = member.tensor.column(a_column + word) + block.lane;
    for (int row = 0; row < block.rows; ++row) std::memcpy(packed.data() + row * mma::kRowBytes + word * 4, lanes + row, 4);
  }
  return packed;
}

void MmaOp::collect_operand(Collector& collector, const char* matrix, const std::string& source, const std::vector<uint8_t>& bytes) const {
  if (collect == Collect::use || collect == Collect::lastuse) {
    // Reuse is the tensor core's choice, so that both ways must give the same: the matrix must be the one that was filled.
    if (!collector.valid) {
      fail(Fault::illegal_operand, "collector::%s::%s, but the collector buffer holds no %s: no ::fill since the last ::discard or ::lastuse",
           matrix, collect_name(collect), matrix);
    }
    if (collector.source != source) {
      fail(Fault::illegal_operand, "collector::%s::%s of %s, but ::fill in line %d was of %s", matrix, collect_name(collect), source.c_str(),
           collector.line, collector.source.c_str());
    }
    if (collector.bytes != bytes) {
      fail(Fault::illegal_operand, "collector::%s::%s: the matrix has changed since its ::fill in line %d", matrix, collect_name(collect),
           collector.line);
    }
  }
  if (collect == Collect::fill) {
    collector.valid = true;
    collector.line = line;
    collector.source = source;
    collector.bytes = bytes;
  } else if (collect != Collect::use) {
    collector.valid = false;
  }
}

void MmaOp::multiply(Cta& member, int half, const mma::PlacedBlock& block, const Multiplicand& rows_of_a, const Multiplicand& columns_of_b) {
  mma::Options options;
  options.accumulator = descriptor.d;
  options.read_c = accumulate;
  options.scale_c = scale;
  options.saturate = descriptor.saturate;
  std::vector<uint32_t*> columns(static_cast<size_t>(descriptor.n), nullptr);
  for (int n = 0; n < block.columns; ++n) {
    columns[block.n + n] = member.tensor.column(d_column + static_cast<uint32_t>(n)) + block.lane;
  }
  // Lanes that keep their old value: all words of the mask belong to lanes in order, the even CTA's first.
  std::vector<int> kept;
  for (int row = 0; row < block.rows && !disable.empty(); ++row) {
    const int lane = block.lane + row;
    if (disable[half * 4 + lane / 32] >> (lane % 32) & 1) kept.push_back(row);
  }
  std::vector<uint32_t> old;
  for (int n = 0; n < block.columns; ++n)
    for (const int row : kept) old.push_back(columns[block.n + n][row]);
  const int first = a_in_tensor ? 0 : block.row;
  mma::multiply_accumulate(columns_of_b, rows_of_a, first, block.rows, columns.data(), options, kPoisonHalf);
  size_t next = 0;
  for (int n = 0; n < block.columns; ++n)
    for (const int row : kept) columns[block.n + n][row] = old[next++];
}

void MmaOp::execute(Cluster& cluster) {
  const std::vector<uint8_t> packed_b = gather_b(cluster);
  TensorPipe& pipe = pipe_of();
  if (ws) collect_operand(pipe.collector_b[buffer], "b", b_source, packed_b);
  const Multiplicand columns_of_b(Multiplicand::Side::outer, descriptor.b, descriptor.negate_b, packed_b.data(), descriptor.n, descriptor.k(),
                                  mma::kRowBytes);
  std::vector<uint8_t> all_a;
  int half = 0;
  for (Cta* member : members()) {
    std::optional<Multiplicand> rows_of_a;
    for (const mma::PlacedBlock& block : mma::place_accumulator(descriptor, group, ws, static_cast<int>(d_lane))) {
      if (!rows_of_a || a_in_tensor) {
        const std::vector<uint8_t> packed_a = gather_a(cluster, *member, block);
        rows_of_a.emplace(Multiplicand::Side::inner, descriptor.a, descriptor.negate_a, packed_a.data(),
                          static_cast<int>(packed_a.size()) / mma::kRowBytes, descriptor.k(), mma::kRowBytes);
        if (!ws) all_a.insert(all_a.end(), packed_a.begin(), packed_a.end());
      }
      multiply(*member, half, block, *rows_of_a, columns_of_b);
    }
    ++half;
  }
  if (!ws) collect_operand(pipe.collector_a, "a", a_source, all_a);
  cluster.count_mma(format("%s %dx%dx%d cta_group::%d %s%s", mma::name(descriptor.a), descriptor.m, descriptor.n, descriptor.k(), group,
                           a_in_tensor ? "TS" : "SS", ws ? " .ws" : ""));
}

/// Issue by one thread: every check that needs no data.
void issue_mma(Warp& warp, const MmaData& d, int lane) {
  Cta& cta = *warp.cta;
  Cluster& cluster = *cta.cluster;
  auto op = std::make_unique<MmaOp>();
  op->kind = d.kind;
  op->group = d.group;
  op->cta = &cta;
  op->ws = d.ws;
  op->scale = d.scale;
  op->buffer = d.buffer;
  op->collect = d.collect;
  op->descriptor = mma::decode_instruction_descriptor(warp.r32(d.idesc)[lane], d.kind, d.group, d.ws);
  const InstructionDescriptor& desc = op->descriptor;
  op->accumulate = (((warp.pred(d.accumulate) >> lane) & 1) != 0) != d.accumulate_negated;
  const uint32_t d_address = warp.r32(d.d)[lane] + static_cast<uint32_t>(d.d_offset);
  op->d_lane = d_address >> 16;
  op->d_column = d_address & 0xffff;
  for (const Slot slot : d.disable) op->disable.push_back(warp.r32(slot)[lane]);
  if (d.zero_mask != kNoSlot) {
    const uint64_t zero = warp.r64(d.zero_mask)[lane];
    if ((zero >> 39 & 1) != 0 || (zero >> 56 & 0x3f) != 0) fail(Fault::unsupported, "zero-column masks that select columns are not known (0x%016llx)", static_cast<unsigned long long>(zero));
  }
  const int columns_here = desc.n / d.group;   // columns of B that each CTA supplies
  const uint64_t b_bits = warp.r64(d.b)[lane];
  op->b.emplace(mma::decode_shared_descriptor(b_bits), desc.b, desc.mn_major_b, columns_here, "B");
  op->b_source = format("shared memory, descriptor 0x%016llx", static_cast<unsigned long long>(b_bits));
  op->a_in_tensor = d.a_in_tensor;
  const auto blocks = mma::place_accumulator(desc, d.group, d.ws, static_cast<int>(op->d_lane));
  const uint32_t columns = static_cast<uint32_t>(mma::accumulator_columns(desc, d.group, d.ws));
  if (!d.a_in_tensor) {
    const uint64_t a_bits = warp.r64(d.a)[lane];
    op->a.emplace(mma::decode_shared_descriptor(a_bits), desc.a, desc.mn_major_a, op->rows(), "A");
    op->a_source = format("shared memory, descriptor 0x%016llx", static_cast<unsigned long long>(a_bits));
  } else {
    const uint32_t a_address = warp.r32(d.a)[lane] + static_cast<uint32_t>(d.a_offset);
    op->a_lane = a_address >> 16;
    op->a_column = a_address & 0xffff;
    op->a_source = format("Tensor Memory 0x%08x", a_address);
    if (desc.mn_major_a) fail(Fault::descriptor, "instruction descriptor: A lies in Tensor Memory and cannot be transposed");
    if (d.ws && desc.m != 128) fail(Fault::unsupported, "A in Tensor Memory for .ws with M = %d: its layout is not known", desc.m);
    if (mma::container_bits(desc.a) == 8 && desc.a != mma::Element::e4m3 && desc.a != mma::Element::e5m2 && !mma::is_integer(desc.a)) {
      fail(Fault::unsupported, "A of type %s in Tensor Memory: its packing is not known", mma::name(desc.a));
    }
    if (op->a_lane != op->d_lane) {
      fail(Fault::descriptor, "A begins in lane %u of Tensor Memory, D in lane %u; they must begin in the same lane", op->a_lane, op->d_lane);
    }
  }
  for (Cta* member : op->members()) {
    if (member->ended()) {
      fail(Fault::tensor_memory, "tcgen05.mma with cta_group::2 while the peer CTA rank %u has already ended", member->rank);
    }
    for (const mma::PlacedBlock& block : blocks) {
      const uint32_t block_lane = static_cast<uint32_t>(block.lane), lanes = static_cast<uint32_t>(block.rows);
      op->writes.push_back({member->rank, block_lane, lanes, op->d_column, columns});
      check_allocated(cluster, op->writes.back(), "tcgen05.mma: D");
      if (!d.a_in_tensor) continue;
      op->reads.push_back({member->rank, block_lane, lanes, op->a_column, mma::kRowBytes / 4});
      check_allocated(cluster, op->reads.back(), "tcgen05.mma: A");
    }
    check_units(*member, op->b->units, "tcgen05.mma: B");
    if (op->a) check_units(*member, op->a->units, "tcgen05.mma: A");
  }
  submit(warp, lane, std::move(op));
}

Step run_mma(Warp& warp, const Instruction& in, uint32_t mask) {
  const auto& d = in.as<MmaData>();
  use_group(*warp.cta, d.group);
  for (uint32_t rest = mask; rest; rest &= rest - 1) {
    const int lane = __builtin_ctz(rest);
    try {
      issue_mma(warp, d, lane);
    } catch (Verdict& verdict) {
      if (verdict.where.empty()) verdict.where = format("lane %d", lane);
      throw;
    }
  }
  return Step::next;
}

// ---------------------------------------------------------------- cp

struct CopyShape {
  const char* name;
  int rows, units;     // 16-byte units a row
};
constexpr CopyShape kCopyShapes[] = {{"128x256b", 128, 2}, {"128x128b", 128, 1}, {"64x128b", 64, 1}, {"32x128b", 32, 1}, {"4x256b", 4, 2}};

struct CopyData : Payload {
  int group = 1, shape = 0;
  int cast = -1;                // index into .warpx2::02_13, .warpx2::01_23, .warpx4
  Slot taddr = kNoSlot, source = kNoSlot;
  int64_t offset = 0;
};

class CopyOp final : public TensorOp {
 public:
  const CopyData* data = nullptr;
  uint32_t lane = 0, column = 0;
  std::vector<uint32_t> units;

  /// Lanes that source row `row` goes to.
  static std::vector<uint32_t> lanes(const CopyData& d, uint32_t base, uint32_t row) {
    switch (d.cast) {
      case 0: return {row, row + 64};                                            // warps 0 and 2, 1 and 3 alike
      case 1: return {row / 32 * 64 + row % 32, row / 32 * 64 + row % 32 + 32};  // warps 0 and 1, 2 and 3 alike
      case 2: return {row, row + 32, row + 64, row + 96};
      default: break;
    }
    if (kCopyShapes[d.shape].rows == 4) return {base + 32 * row};   // one lane in each quarter
    return {row};
  }

  std::string describe() const override {
    return format("tcgen05.cp.%s cta_group::%d to column %u", kCopyShapes[data->shape].name, group, column);
  }

 protected:
  void execute(Cluster& cluster) override {
    const CopyShape& shape = kCopyShapes[data->shape];
    for (Cta* member : members()) {
      check_units(*member, units, "tcgen05.cp");
      notify_units(cluster, *this, *member, units);
      for (int row = 0; row < shape.rows; ++row) {
        for (const uint32_t target : lanes(*data, lane, static_cast<uint32_t>(row))) {
          for (int u = 0; u < shape.units; ++u) {
            uint32_t words[4];
            std::memcpy(words, member->shared + units[row * shape.units + u], sizeof words);
            for (uint32_t w = 0; w < 4; ++w) member->tensor.word(target, column + 4 * static_cast<uint32_t>(u) + w) = words[w];
          }
        }
      }
    }
  }
};

void issue_copy(Warp& warp, const CopyData& d, int lane) {
  Cta& cta = *warp.cta;
  const CopyShape& shape = kCopyShapes[d.shape];
  auto op = std::make_unique<CopyOp>();
  op->data = &d;
  op->order = shape.rows == 4 ? TensorOrder::copy_4x256b : TensorOrder::copy;
  op->group = d.group;
  op->cta = &cta;
  const uint32_t address = warp.r32(d.taddr)[lane] + static_cast<uint32_t>(d.offset);
  op->lane = address >> 16;
  op->column = address & 0xffff;
  if (op->lane != 0 && !(shape.rows == 4 && op->lane < 32)) {
    fail(Fault::tensor_memory, "tcgen05.cp.%s to lane %u; it must be %s", shape.name, op->lane, shape.rows == 4 ? "below 32" : "0");
  }
  op->units = mma::k_major_units(mma::decode_shared_descriptor(warp.r64(d.source)[lane]), shape.rows, shape.units);
  for (Cta* member : op->members()) {
    check_units(*member, op->units, "tcgen05.cp");
    std::vector<bool> hit(TensorMemory::kRows);
    for (int row = 0; row < shape.rows; ++row)
      for (const uint32_t target : CopyOp::lanes(d, op->lane, static_cast<uint32_t>(row))) hit[target] = true;
    for (uint32_t begin = 0; begin < TensorMemory::kRows; ++begin) {
      if (!hit[begin]) continue;
      uint32_t end = begin;
      while (end < TensorMemory::kRows && hit[end]) ++end;
      op->writes.push_back({member->rank, begin, end - begin, op->column, 4u * static_cast<uint32_t>(shape.units)});
      check_allocated(*cta.cluster, op->writes.back(), "tcgen05.cp");
      begin = end;
    }
  }
  submit(warp, lane, std::move(op));
}

Step run_copy(Warp& warp, const Instruction& in, uint32_t mask) {
  const auto& d = in.as<CopyData>();
  use_group(*warp.cta, d.group);
  for (uint32_t rest = mask; rest; rest &= rest - 1) issue_copy(warp, d, __builtin_ctz(rest));
  return Step::next;
}

// ---------------------------------------------------------------- shift

struct ShiftData : Payload {
  int group = 1;
  Slot taddr = kNoSlot;
  int64_t offset = 0;
};

/// Eight columns of 32 lanes move one lane toward lane 0; the last lane keeps its data. That "down" is this way follows
/// from the lane that tcgen05.cp.4x256b refreshes afterwards, which is the last one of every 32.
class ShiftOp final : public TensorOp {
 public:
  uint32_t lane = 0, column = 0;
  std::string describe() const override { return format("tcgen05.shift.down cta_group::%d of lanes %u-%u", group, lane, lane + 31); }

 protected:
  void execute(Cluster&) override {
    for (Cta* member : members()) {
      for (uint32_t c = column; c < column + 8; ++c) {
        uint32_t* lanes = member->tensor.column(c) + lane;
        std::memmove(lanes, lanes + 1, 31 * sizeof(uint32_t));
      }
    }
  }
};

Step run_shift(Warp& warp, const Instruction& in, uint32_t mask) {
  const auto& d = in.as<ShiftData>();
  use_group(*warp.cta, d.group);
  for (uint32_t rest = mask; rest; rest &= rest - 1) {
    const int lane = __builtin_ctz(rest);
    auto op = std::make_unique<ShiftOp>();
    op->order = TensorOrder::shift;
    op->group = d.group;
    op->cta = warp.cta;
    const uint32_t address = warp.r32(d.taddr)[lane] + static_cast<uint32_t>(d.offset);
    op->lane = address >> 16;
    op->column = address & 0xffff;
    if (op->lane % 32 != 0) fail_lane(lane, Fault::tensor_memory, "tcgen05.shift at lane %u; it must be a multiple of 32", op->lane);
    for (const Cta* member : op->members()) {
      op->reads.push_back({member->rank, op->lane, 32, op->column, 8});
      check_allocated(*warp.cta->cluster, op->reads.back(), "tcgen05.shift");
      op->writes.push_back({member->rank, op->lane, 31, op->column, 8});
    }
    submit(warp, lane, std::move(op));
  }
  return Step::next;
}

// ---------------------------------------------------------------- commit

struct CommitData : Payload {
  int group = 1;
  Address barrier;
  bool shared_space = false;
  Slot mask = kNoSlot;   // .multicast::cluster
};

class CommitOp final : public AsyncOp {
 public:
  std::vector<std::pair<Cta*, uint32_t>> targets;

  bool advance(Cluster&) override {
    for (const auto& [target, offset] : targets) target->barriers.arrive(*target, offset, 1);
    return true;
  }
  bool needs_cta(uint32_t rank) const override {
    return std::any_of(targets.begin(), targets.end(), [&](const auto& t) { return t.first->rank == rank; });
  }
  std::string describe() const override {
    return format("tcgen05.commit to the mbarrier at shared offset 0x%x of CTA rank %u", targets[0].second, targets[0].first->rank);
  }
};

void issue_commit(Warp& warp, const CommitData& d, int lane) {
  Cta& cta = *warp.cta;
  Cluster& cluster = *cta.cluster;
  uint64_t address = warp.address(d.barrier, lane);
  if (!d.shared_space) {
    if (address < kSharedWindow || address >= kSharedWindow + (1ull << 32)) {
      fail_lane(lane, Fault::out_of_bounds, "tcgen05.commit: mbarrier address 0x%llx is not in shared memory", static_cast<unsigned long long>(address));
    }
    address -= kSharedWindow;
  }
  auto op = std::make_unique<CommitOp>();
  uint32_t offset;
  Cta& named = cluster.shared_cta(address, &offset);
  if (offset % 8) fail_lane(lane, Fault::misaligned, "tcgen05.commit: mbarrier at shared offset 0x%x; it is aligned to 8 bytes", offset);
  if (d.mask == kNoSlot) {
    op->targets.emplace_back(&named, offset);
  } else {
    const uint32_t ctas = warp.r32(d.mask)[lane] & 0xffff;
    if (ctas == 0 || ctas >> cluster.ctas.size() != 0) {
      fail_lane(lane, Fault::illegal_operand, "tcgen05.commit: ctaMask 0x%x in a cluster of %zu CTAs", ctas, cluster.ctas.size());
    }
    for (uint32_t rest = ctas; rest; rest &= rest - 1) op->targets.emplace_back(&cluster.cta(static_cast<uint32_t>(__builtin_ctz(rest))), offset);
  }
  for (const auto& [target, at] : op->targets) {
    if (target->ended()) fail_lane(lane, Fault::in_flight, "tcgen05.commit to CTA rank %u, which has ended", target->rank);
    target->barriers.at(*target, at);
  }
  op->agent = warp.agent(lane);
  op->agent.engine = Engine::tensor;
  op->proxy = Proxy::generic;
  op->line = warp.line;
  const uint32_t thread = cta.rank << 16 | static_cast<uint32_t>(warp.index * kLanes + lane);
  for (const TensorOp* earlier : tensor_pipe(cta).operations)
    if (earlier->thread == thread) op->after.push_back(earlier->id);
  // A thread's commits signal in order of issue: kernels count on the last one, and the tensor pipe is a queue.
  op->pipe = cluster.async.pipe(uint64_t{1} << 49 | thread);
  cluster.async.submit(cluster, std::move(op));
}

Step run_commit(Warp& warp, const Instruction& in, uint32_t mask) {
  const auto& d = in.as<CommitData>();
  use_group(*warp.cta, d.group);
  for (uint32_t rest = mask; rest; rest &= rest - 1) issue_commit(warp, d, __builtin_ctz(rest));
  return Step::next;
}

// ---------------------------------------------------------------- decoding

Collect take_collect(Modifiers& mods, const std::string& buffer, bool* given) {
  constexpr const char* names[] = {"discard", "fill", "use", "lastuse"};
  for (int i = 0; i < 4; ++i) {
    if (!mods.take_anywhere(("collector::" + buffer + "::" + names[i]).c_str())) continue;
    *given = true;
    return static_cast<Collect>(i);
  }
  return Collect::discard;
}

Slot tensor_address(Decoder& decoder, const Statement& s, const Operand& operand, int64_t* offset) {
  const Address address = decoder.address(operand);
  if (operand.items[0].kind == Operand::Kind::reg && address.bits != 32) unsupported(s, "a Tensor Memory address has 32 bits");
  *offset = address.offset;
  return address.base;
}

void take_accumulate(Decoder& decoder, const Operand& operand, MmaData* d) {
  Operand plain = operand;
  d->accumulate_negated = plain.negated;
  plain.negated = false;
  d->accumulate = decoder.source(plain, Type::pred);
}

void take_scale(Decoder& decoder, const Statement& s, const Operand& operand, MmaData* d) {
  const int64_t scale = decoder.immediate(operand);
  if (d->kind != Kind::f16 && d->kind != Kind::tf32) unsupported(s, "scale-input-d exists for kind::f16 and kind::tf32 only");
  if (scale < 0 || scale > 15) unsupported(s, format("scale-input-d is %lld; it must be 0 to 15", static_cast<long long>(scale)));
  d->scale = static_cast<int>(scale);
}

void decode_mma(Decoder& decoder, const Statement& s, Modifiers& mods, Instruction& in) {
  auto d = std::make_unique<MmaData>();
  if (mods.take_anywhere("sp")) unsupported(s, "sparse matrices (.sp) are not known");
  if (mods.take_anywhere("block_scale")) unsupported(s, "block-scaled kinds are not known");
  d->ws = mods.take("ws");
  d->group = mods.take_one({"cta_group::1", "cta_group::2"}, -2) + 1;
  if (d->ws && d->group == 2) unsupported(s, "tcgen05.mma.ws takes cta_group::1 only");
  d->kind = static_cast<Kind>(mods.take_one({"kind::f16", "kind::tf32", "kind::f8f6f4", "kind::i8"}, -2));
  if (mods.take_anywhere("ashift")) unsupported(s, ".ashift: the direction of the shift is not known");
  bool given = false;
  if (d->ws) {
    for (int i = 0; i < 4 && !given; ++i) {
      d->collect = take_collect(mods, "b" + std::to_string(i), &given);
      d->buffer = given ? i : 0;
    }
  } else {
    d->collect = take_collect(mods, "a", &given);
  }
  decoder.operand_count(s, 5, d->ws ? 6 : 7);
  d->d = tensor_address(decoder, s, s.operands[0], &d->d_offset);
  d->a_in_tensor = s.operands[1].kind == Operand::Kind::address;
  d->a = d->a_in_tensor ? tensor_address(decoder, s, s.operands[1], &d->a_offset) : decoder.source(s.operands[1], Type::b64);
  d->b = decoder.source(s.operands[2], Type::b64);
  d->idesc = decoder.source(s.operands[3], Type::b32);
  size_t next = 4;
  if (!d->ws && s.operands[next].kind == Operand::Kind::vector) {
    const size_t words = s.operands[next].items.size();
    if (words != 4u * static_cast<uint32_t>(d->group)) {
      unsupported(s, format("disable-output-lane takes %d registers with cta_group::%d; got %zu", 4 * d->group, d->group, words));
    }
    for (const Operand& item : s.operands[next].items) d->disable.push_back(decoder.source(item, Type::b32));
    ++next;
  }
  if (next >= s.operands.size()) unsupported(s, "'" + s.mnemonic + "' lacks enable-input-d");
  take_accumulate(decoder, s.operands[next++], d.get());
  if (next < s.operands.size()) {
    if (d->ws) {
      d->zero_mask = decoder.source(s.operands[next++], Type::b64);
    } else {
      take_scale(decoder, s, s.operands[next++], d.get());
    }
  }
  if (next != s.operands.size()) unsupported(s, "'" + s.mnemonic + "' has too many operands");
  in.exec = run_mma;
  decoder.keep(in, std::move(d));
}

void decode_copy(Decoder& decoder, const Statement& s, Modifiers& mods, Instruction& in) {
  auto d = std::make_unique<CopyData>();
  d->group = mods.take_one({"cta_group::1", "cta_group::2"}, -2) + 1;
  d->shape = mods.take_one({kCopyShapes[0].name, kCopyShapes[1].name, kCopyShapes[2].name, kCopyShapes[3].name, kCopyShapes[4].name}, -2);
  d->cast = mods.take_one({"warpx2::02_13", "warpx2::01_23", "warpx4"});
  const int rows = kCopyShapes[d->shape].rows;
  const bool fits = rows == 64 ? d->cast == 0 || d->cast == 1 : rows == 32 ? d->cast == 2 : d->cast == -1;
  if (!fits) unsupported(s, "tcgen05.cp: .64x128b needs .warpx2, .32x128b needs .warpx4, the other shapes take neither");
  if (!mods.peek().empty()) unsupported(s, "tcgen05.cp with decompression is not known");
  decoder.operand_count(s, 2, 2);
  d->taddr = tensor_address(decoder, s, s.operands[0], &d->offset);
  d->source = decoder.source(s.operands[1], Type::b64);
  in.exec = run_copy;
  decoder.keep(in, std::move(d));
}

void decode_commit(Decoder& decoder, const Statement& s, Modifiers& mods, Instruction& in) {
  auto d = std::make_unique<CommitData>();
  d->group = mods.take_one({"cta_group::1", "cta_group::2"}, -2) + 1;
  if (!mods.take("mbarrier::arrive::one")) unsupported(s, "'" + s.mnemonic + "' lacks .mbarrier::arrive::one");
  d->shared_space = mods.take("shared::cluster");
  const bool multicast = mods.take("multicast::cluster");
  if (!mods.take("b64")) unsupported(s, "'" + s.mnemonic + "' lacks .b64");
  decoder.operand_count(s, 1 + multicast, 1 + multicast);
  d->barrier = decoder.address(s.operands[0]);
  if (multicast) d->mask = decoder.source(s.operands[1], Type::b16);
  in.exec = run_commit;
  decoder.keep(in, std::move(d));
}

void decode_shift(Decoder& decoder, const Statement& s, Modifiers& mods, Instruction& in) {
  // The ISA's syntax has the group before .down, its example after it.
  auto d = std::make_unique<ShiftData>();
  if (!mods.take_anywhere("down")) unsupported(s, "'" + s.mnemonic + "' lacks .down");
  d->group = mods.take_one({"cta_group::1", "cta_group::2"}, -2) + 1;
  decoder.operand_count(s, 1, 1);
  d->taddr = tensor_address(decoder, s, s.operands[0], &d->offset);
  in.exec = run_shift;
  decoder.keep(in, std::move(d));
}

const Family mma_family("tcgen05.mma", decode_mma);
const Family copy_family("tcgen05.cp", decode_copy);
const Family commit_family("tcgen05.commit", decode_commit);
const Family shift_family("tcgen05.shift", decode_shift);

}  // namespace
}  // namespace emu
