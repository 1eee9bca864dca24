// Opcodes of bulk copies: cp.async.bulk, cp.async.bulk.tensor, cp.reduce.async.bulk, their tensor form, prefetches and
// bulk groups.
#include <string>

#include "bulk.h"
#include "lanes.h"
#include "program.h"

namespace emu {
namespace {

enum class Direction : uint8_t { load_cta, load_cluster, store, shared_to_shared, prefetch };

struct BulkData : Payload {
  Direction direction = Direction::load_cta;
  bool tensor = false, rows = false, multicast = false, reduces = false;
  int dims = 0;  // .1d to .5d
  int cta_group = 1;
  Reduction reduction = Reduction::add;
  ReduceType type = ReduceType::u32;
  Address shared;  // destination of a load, source of a store
  Address map;     // tensor map, or the global address
  Address source;  // shared source of a copy between shared memories
  Address barrier;
  std::array<Slot, kMaxRank> coords{};
  Slot size = kNoSlot, mask = kNoSlot, byte_mask = kNoSlot;
  const char* what = "";  // for verdicts
};

// ---- execution ----------------------------------------------------------------------------------

TensorMapData read_map(Warp& warp, int lane, const BulkData& data) {
  const uint64_t address = warp.address(data.map, lane);
  if (address % 64 != 0) {
    fail_lane(lane, Fault::misaligned, "tensor map at 0x%llx, expected a multiple of 64",
              static_cast<unsigned long long>(address));
  }
  TensorMapData map;
  std::memcpy(&map, warp.cta->cluster->grid->global_at(address, sizeof map, Access::read, "tensor map"), sizeof map);
  const std::string error = tensor_map_error(map);
  if (!error.empty()) fail_lane(lane, Fault::tensor_map, "%s: %s", data.what, error.c_str());
  return map;
}

GlobalSide global_side(Warp& warp, int lane, const BulkData& data, Access access) {
  GlobalSide side;
  if (data.tensor) {
    Tile tile;
    tile.map = read_map(warp, lane, data);
    tile.rows = data.rows;
    tile.whole_chunks = data.direction == Direction::store && tile.map.rank > 1;
    const int count = data.rows ? 5 : data.dims;
    for (int i = 0; i < count; ++i) {
      tile.coords[static_cast<size_t>(i)] = static_cast<int32_t>(warp.r32(data.coords[static_cast<size_t>(i)])[lane]);
    }
    if (tile.map.rank != data.dims) {
      fail_lane(lane, Fault::tensor_map, "%s has .%dd, but its tensor map has rank %d", data.what, data.dims,
                tile.map.rank);
    }
    if (data.rows && tile.map.box[1] != 1) {
      fail_lane(lane, Fault::tensor_map, "%s needs a box of 1 row, the tensor map has %u", data.what, tile.map.box[1]);
    }
    const int64_t start = static_cast<int64_t>(tile.coords[0]) * element_bytes(tile.map.type);
    if (start % 16 != 0) {  // an H200 raises "illegal instruction"
      fail_lane(lane, Fault::misaligned,
                "%s: the box starts at element %d, %lld bytes into its row, expected a multiple of 16 bytes", data.what,
                tile.coords[0], static_cast<long long>(start));
    }
    side.tile = tile;
  } else {
    side.address = warp.address(data.map, lane);
    side.size = warp.r32(data.size)[lane];
    if (side.address % 16 != 0) {
      fail_lane(lane, Fault::misaligned, "%s: global address 0x%llx, expected a multiple of 16", data.what,
                static_cast<unsigned long long>(side.address));
    }
  }
  side.check(*warp.cta->cluster->grid, access, data.what);
  return side;
}

void check_size(int lane, const BulkData& data, uint32_t size) {
  if (size == 0 || size % 16 != 0) {
    fail_lane(lane, Fault::illegal_operand, "%s of %u bytes, expected a positive multiple of 16", data.what, size);
  }
}

// CTA and offset of the shared end, with its alignment, bounds and barrier rules.
Cta& shared_side(Warp& warp, int lane, const BulkData& data, uint64_t address, const GlobalSide& global, bool own,
                 uint32_t* offset) {
  Cta& cta = warp.cta->cluster->shared_cta(address, offset);
  if (own && &cta != warp.cta) {
    fail_lane(lane, Fault::illegal_operand,
              "%s: shared address 0x%llx lies in CTA %u of the cluster, expected the executing CTA %u", data.what,
              static_cast<unsigned long long>(address), cta.rank, warp.cta->rank);
  }
  if (cta.ended()) fail_lane(lane, Fault::out_of_bounds, "%s: CTA %u of the cluster has ended", data.what, cta.rank);
  const uint32_t alignment = data.tensor ? 128 : 16;
  if (*offset % alignment != 0) {
    fail_lane(lane, Fault::misaligned, "%s: shared address 0x%llx, expected a multiple of %u", data.what,
              static_cast<unsigned long long>(address), alignment);
  }
  cta.shared_at(*offset, global.shared_bytes(), data.what);
  cta.check_barriers(*offset, global.shared_bytes(), data.what);
  return cta;
}

Cta& barrier_side(Warp& warp, int lane, const BulkData& data, uint32_t* offset) {
  const uint64_t address = warp.address(data.barrier, lane);
  Cta& cta = warp.cta->cluster->shared_cta(address, offset);
  if (*offset % 8 != 0) {
    fail_lane(lane, Fault::misaligned, "%s: mbarrier at 0x%llx, expected a multiple of 8", data.what,
              static_cast<unsigned long long>(address));
  }
  return cta;
}

void add_target(Warp& warp, int lane, const BulkData& data, BulkLoad& load, LoadTarget target) {
  if (target.cta->ended() || target.barrier_cta->ended()) {
    fail_lane(lane, Fault::out_of_bounds, "%s: CTA %u of the cluster has ended", data.what,
              target.cta->ended() ? target.cta->rank : target.barrier_cta->rank);
  }
  target.barrier_cta->barriers.at(*target.barrier_cta, target.barrier);  // verdict unless initialised
  target.cta->check_barriers(target.offset, load.global.shared_bytes(), data.what);
  load.targets.push_back(target);
}

void add_multicast(Warp& warp, int lane, const BulkData& data, BulkLoad& load, const LoadTarget& pattern) {
  Cluster& cluster = *warp.cta->cluster;
  const uint32_t mask = warp.r32(data.mask)[lane] & 0xffff;
  if (mask == 0 || mask >> cluster.ctas.size() != 0) {
    fail_lane(lane, Fault::illegal_operand, "%s: CTA mask 0x%x, expected a nonzero mask of the cluster's %zu CTAs",
              data.what, mask, cluster.ctas.size());
  }
  for (uint32_t rank = 0; rank < cluster.ctas.size(); ++rank) {
    if ((mask >> rank & 1) == 0) continue;
    LoadTarget target = pattern;
    target.cta = &cluster.cta(rank);
    const uint32_t barrier_rank = data.cta_group == 2 ? ((rank & ~1u) | (pattern.barrier_cta->rank & 1)) : rank;
    target.barrier_cta = &cluster.cta(barrier_rank);
    add_target(warp, lane, data, load, target);
  }
}

void submit(Warp& warp, int lane, std::unique_ptr<AsyncOp> op) {
  op->agent = warp.agent(lane);
  op->agent.engine = Engine::tma;
  op->proxy = Proxy::async;
  op->line = warp.line;
  warp.cta->cluster->async.submit(*warp.cta->cluster, std::move(op));
}

void issue_load(Warp& warp, int lane, const BulkData& data) {
  auto load = std::make_unique<BulkLoad>();
  LoadTarget target{};
  if (data.direction == Direction::shared_to_shared) {
    load->global.size = warp.r32(data.size)[lane];
    check_size(lane, data, load->global.size);
    load->source_cta =
        &shared_side(warp, lane, data, warp.address(data.source, lane), load->global, true, &load->source);
    load->reduces = data.reduces;
    load->reduction = data.reduction;
    load->type = data.type;
  } else {
    if (!data.tensor) check_size(lane, data, warp.r32(data.size)[lane]);
    load->global = global_side(warp, lane, data, Access::read);
  }
  const bool own = data.direction == Direction::load_cta;
  target.cta = &shared_side(warp, lane, data, warp.address(data.shared, lane), load->global, own, &target.offset);
  target.barrier_cta = &barrier_side(warp, lane, data, &target.barrier);
  if (load->source_cta == target.cta) {
    fail_lane(lane, Fault::illegal_operand, "%s within CTA %u, expected a destination in another CTA of the cluster",
              data.what, target.cta->rank);
  }
  if (data.multicast) {
    add_multicast(warp, lane, data, *load, target);
  } else {
    const uint32_t pair = data.cta_group == 2 ? ~1u : ~0u;
    if ((target.cta->rank & pair) != (target.barrier_cta->rank & pair)) {
      fail_lane(lane, Fault::illegal_operand, "%s: destination in CTA %u, mbarrier in CTA %u; .cta_group::%d allows %s",
                data.what, target.cta->rank, target.barrier_cta->rank, data.cta_group,
                data.cta_group == 2 ? "the same pair" : "the same CTA");
    }
    add_target(warp, lane, data, *load, target);
  }
  load->poison();
  submit(warp, lane, std::move(load));
}

void issue_store(Warp& warp, int lane, const BulkData& data) {
  auto store = std::make_unique<BulkStore>();
  const Access access = data.reduces ? Access::reduce : Access::write;
  if (!data.tensor) check_size(lane, data, warp.r32(data.size)[lane]);
  store->global = global_side(warp, lane, data, access);
  store->reduces = data.reduces;
  store->reduction = data.reduction;
  store->type = data.type;
  if (data.tensor) {
    const Tile& tile = *store->global.tile;
    if (tile.has_negative()) {
      fail_lane(lane, Fault::illegal_operand, "%s: %s: a start coordinate is negative, which stores do not allow",
                data.what, store->global.describe().c_str());
    }
    if (data.reduces && !reduce_type(tile.map.type, data.reduction, &store->type)) {
      fail_lane(lane, Fault::tensor_map, "%s: no .%s of element type %s", data.what, reduction_name(data.reduction),
                tma_type_name(tile.map.type));
    }
    if (tile.map.type >= TmaType::f32_ftz) {
      fail_lane(lane, Fault::unsupported, "%s: stores of element type %s are not known here", data.what,
                tma_type_name(tile.map.type));
    }
  }
  store->cta = &shared_side(warp, lane, data, warp.address(data.shared, lane), store->global, true, &store->source);
  if (data.byte_mask != kNoSlot) store->byte_mask = static_cast<uint16_t>(warp.r32(data.byte_mask)[lane]);
  store->group = warp.bulk_groups(lane).join();
  ++store->group->unread;
  ++store->group->unfinished;
  submit(warp, lane, std::move(store));
}

Step run_bulk(Warp& warp, const Instruction& in, uint32_t mask) {
  const auto& data = in.as<BulkData>();
  for (int lane = 0; lane < kLanes; ++lane) {
    if ((mask >> lane & 1) == 0) continue;
    if (data.direction == Direction::store) {
      issue_store(warp, lane, data);
    } else if (data.direction == Direction::prefetch) {
      if (!data.tensor) check_size(lane, data, warp.r32(data.size)[lane]);
      global_side(warp, lane, data, Access::read);  // its rules; a prefetch has no effect
    } else {
      issue_load(warp, lane, data);
    }
  }
  warp.cta->cluster->touch();
  return Step::next;
}

// ---- decoding -----------------------------------------------------------------------------------

// Modifiers of all forms; the compilers write them in different orders.
struct Form {
  std::string destination, source;  // state spaces
  int dims = 0;
  bool prefetch_l2 = false, mbarrier = false, bulk_group = false, hint = false, multicast = false, mask = false,
       noftz = false;
  std::string mode = "tile", cta_group, reduction, type;
};

bool one_of(const std::string& text, std::initializer_list<const char*> list) {
  for (const char* item : list) {
    if (text == item) return true;
  }
  return false;
}

Form parse_form(const Statement& statement, size_t first) {
  Form form;
  for (size_t i = first; i < statement.opcode.size(); ++i) {
    const std::string& part = statement.opcode[i];
    if (part.size() == 2 && part[1] == 'd' && part[0] >= '1' && part[0] <= '5') form.dims = part[0] - '0';
    else if (one_of(part, {"shared::cta", "shared::cluster", "global"}))
      (form.destination.empty() ? form.destination : form.source) = part;
    else if (part == "L2") form.prefetch_l2 = true;
    else if (part == "mbarrier::complete_tx::bytes") form.mbarrier = true;
    else if (part == "bulk_group") form.bulk_group = true;
    else if (part == "L2::cache_hint") form.hint = true;
    else if (part == "multicast::cluster") form.multicast = true;
    else if (part == "cp_mask") form.mask = true;
    else if (part == "noftz") form.noftz = true;
    else if (one_of(part, {"tile", "tile::gather4", "tile::scatter4"})) form.mode = part;
    else if (one_of(part, {"cta_group::1", "cta_group::2"})) form.cta_group = part;
    else if (one_of(part, {"add", "min", "max", "inc", "dec", "and", "or", "xor"})) form.reduction = part;
    else if (one_of(part, {"u32", "s32", "u64", "s64", "f16", "bf16", "f32", "f64", "b32", "b64"})) form.type = part;
    else unsupported(statement, "modifier ." + part + " of a bulk copy");
  }
  return form;
}

// The operands in the order in which the forms list them.
class Operands {
 public:
  Operands(Decoder& decoder, const Statement& statement) : decoder_(decoder), statement_(statement) {}
  const Operand& next() {
    if (next_ >= statement_.operands.size()) unsupported(statement_, "an operand is missing");
    return statement_.operands[next_++];
  }
  Address address() { return decoder_.address(next()); }
  Slot value(Type type) { return decoder_.source(next(), type); }
  void done() const {
    if (next_ != statement_.operands.size()) unsupported(statement_, "an operand too many");
  }

 private:
  Decoder& decoder_;
  const Statement& statement_;
  size_t next_ = 0;
};

// [tensorMap, {c0, c1, ...}]
void take_tensor(Decoder& decoder, const Statement& statement, const Operand& operand, BulkData& data) {
  data.map = decoder.address(operand);
  if (operand.items.size() != 2 || operand.items[1].kind != Operand::Kind::vector) {
    unsupported(statement, "expected [tensorMap, {coordinates}]");
  }
  const std::vector<Operand>& coords = operand.items[1].items;
  const size_t count = data.rows ? 5 : static_cast<size_t>(data.dims);
  if (coords.size() != count) {
    unsupported(statement, format("%zu tensor coordinates, expected %zu", coords.size(), count));
  }
  for (size_t i = 0; i < count; ++i) data.coords[i] = decoder.source(coords[i], Type::s32);
}

Reduction reduction_named(const std::string& name) {
  for (int i = 0;; ++i) {
    if (name == reduction_name(static_cast<Reduction>(i))) return static_cast<Reduction>(i);
  }
}

ReduceType reduce_type_named(const std::string& name) {
  for (int i = 0;; ++i) {
    if (name == reduce_type_name(static_cast<ReduceType>(i))) return static_cast<ReduceType>(i);
  }
}

Direction direction_of(const Statement& statement, const Form& form, bool prefetch) {
  if (prefetch) {
    if (form.destination == "global" && form.source.empty() && form.prefetch_l2 && !form.mbarrier && !form.bulk_group) {
      return Direction::prefetch;
    }
  } else if (form.destination == "global" && form.source == "shared::cta" && form.bulk_group && !form.mbarrier) {
    return Direction::store;
  } else if (form.source == "global" && form.mbarrier && !form.bulk_group) {
    return form.destination == "shared::cta" ? Direction::load_cta : Direction::load_cluster;
  } else if (form.destination == "shared::cluster" && form.source == "shared::cta" && form.mbarrier &&
             !form.bulk_group) {
    return Direction::shared_to_shared;
  }
  unsupported(statement, "this combination of state spaces and completion mechanism");
}

void check_reduction(const Statement& statement, const Form& form, BulkData& data) {
  if (form.reduction.empty()) unsupported(statement, "a reduction needs an operation");
  data.reduction = reduction_named(form.reduction);
  if (data.direction != Direction::store && data.direction != Direction::shared_to_shared)
    unsupported(statement, "a reduction in this direction");
  if (data.tensor) {
    if (!form.type.empty() || form.noftz || data.direction != Direction::store)
      unsupported(statement, "this tensor reduction");
    return;
  }
  if (form.type.empty()) unsupported(statement, "a reduction needs a type");
  data.type = reduce_type_named(form.type);
  const bool half = data.type == ReduceType::f16 || data.type == ReduceType::bf16;
  if (form.noftz != (half && data.reduction == Reduction::add))
    unsupported(statement, ".noftz goes with .add of .f16 and .bf16");
  bool known = reducible(data.reduction, data.type);
  if (data.direction == Direction::shared_to_shared) {  // fewer types than in global memory
    const bool wide = element_bytes(data.type) == 8;
    const bool fraction = half || data.type == ReduceType::f32 || data.type == ReduceType::f64;
    known = known && !fraction && (!wide || (data.type == ReduceType::u64 && data.reduction == Reduction::add));
  }
  if (!known) unsupported(statement, "." + form.reduction + " of ." + form.type);
}

void decode_bulk(Decoder& decoder, const Statement& statement, Modifiers& mods, Instruction& instruction, bool tensor,
                 bool reduces, bool prefetch, size_t used) {
  const Form form = parse_form(statement, used);
  while (!mods.peek().empty()) mods.take(std::string(mods.peek()).c_str());
  auto owned = std::make_unique<BulkData>();
  BulkData& data = *owned;
  data.tensor = tensor;
  data.reduces = reduces;
  data.direction = direction_of(statement, form, prefetch);
  data.dims = form.dims;
  data.multicast = form.multicast;
  data.cta_group = form.cta_group == "cta_group::2" ? 2 : 1;
  const bool load = data.direction == Direction::load_cta || data.direction == Direction::load_cluster;
  data.rows = form.mode != "tile";
  if (tensor != (form.dims != 0)) unsupported(statement, "the dimension goes with .tensor");
  if (!tensor && (data.rows || !form.cta_group.empty())) unsupported(statement, "a tensor modifier without .tensor");
  if (data.rows && form.dims != 2) unsupported(statement, ".tile::gather4 and .tile::scatter4 need .2d");
  if (form.mode == "tile::gather4" && !load && !prefetch) unsupported(statement, ".tile::gather4 of a store");
  if (form.mode == "tile::scatter4" && (data.direction != Direction::store || reduces))
    unsupported(statement, ".tile::scatter4 here");
  if (!form.cta_group.empty() && !load) unsupported(statement, ".cta_group of a store or prefetch");
  if (data.multicast && data.direction != Direction::load_cluster) unsupported(statement, ".multicast::cluster here");
  if (form.hint && data.direction == Direction::shared_to_shared)
    unsupported(statement, "a cache hint without global memory");
  if (form.mask && (tensor || reduces || data.direction != Direction::store)) unsupported(statement, ".cp_mask here");
  if (form.prefetch_l2 != prefetch) unsupported(statement, ".L2 here");
  if (reduces) check_reduction(statement, form, data);
  else if (!form.reduction.empty() || !form.type.empty() || form.noftz)
    unsupported(statement, "a reduction's modifier on a copy");

  Operands operands(decoder, statement);
  if (load || data.direction == Direction::shared_to_shared) {
    data.shared = operands.address();
    if (tensor) take_tensor(decoder, statement, operands.next(), data);
    else if (load) data.map = operands.address();
    else data.source = operands.address();
    if (!tensor) data.size = operands.value(Type::u32);
    data.barrier = operands.address();
    if (data.multicast) data.mask = operands.value(Type::b16);
  } else {
    if (tensor) take_tensor(decoder, statement, operands.next(), data);
    else data.map = operands.address();
    if (data.direction == Direction::store) data.shared = operands.address();
    if (!tensor) data.size = operands.value(Type::u32);
  }
  if (form.hint) operands.value(Type::b64);  // a hint: no effect
  if (form.mask) data.byte_mask = operands.value(Type::b16);
  operands.done();
  data.what = reduces                              ? (tensor ? "TMA reduction" : "bulk reduction")
              : prefetch                           ? (tensor ? "TMA prefetch" : "bulk prefetch")
              : load                               ? (tensor ? "TMA load" : "bulk load")
              : data.direction == Direction::store ? (tensor ? "TMA store" : "bulk store")
                                                   : "bulk copy";
  instruction.exec = run_bulk;
  decoder.keep(instruction, std::move(owned));
}

void decode_copy(Decoder& decoder, const Statement& statement, Modifiers& mods, Instruction& instruction) {
  decode_bulk(decoder, statement, mods, instruction, false, false, false, 3);
}
void decode_tensor(Decoder& decoder, const Statement& statement, Modifiers& mods, Instruction& instruction) {
  decode_bulk(decoder, statement, mods, instruction, true, false, false, 4);
}
void decode_reduce(Decoder& decoder, const Statement& statement, Modifiers& mods, Instruction& instruction) {
  decode_bulk(decoder, statement, mods, instruction, false, true, false, 4);
}
void decode_reduce_tensor(Decoder& decoder, const Statement& statement, Modifiers& mods, Instruction& instruction) {
  decode_bulk(decoder, statement, mods, instruction, true, true, false, 5);
}
void decode_prefetch(Decoder& decoder, const Statement& statement, Modifiers& mods, Instruction& instruction) {
  decode_bulk(decoder, statement, mods, instruction, false, false, true, 4);
}
void decode_prefetch_tensor(Decoder& decoder, const Statement& statement, Modifiers& mods, Instruction& instruction) {
  decode_bulk(decoder, statement, mods, instruction, true, false, true, 5);
}

// ---- groups -------------------------------------------------------------------------------------

Step run_commit(Warp& warp, const Instruction&, uint32_t mask) {
  for (int lane = 0; lane < kLanes; ++lane) {
    if ((mask >> lane & 1) != 0) warp.bulk_groups(lane).commit();
  }
  return Step::next;
}

Step run_wait(Warp& warp, const Instruction& in, uint32_t mask) {
  const bool read_only = in.flags != 0;
  for (int lane = 0; lane < kLanes; ++lane) {
    if ((mask >> lane & 1) == 0) continue;
    if (!warp.bulk_groups(lane).reached(in.imm, read_only)) {
      return warp.block(Wait::Kind::group, read_only ? "bulk groups to read their sources" : "bulk groups to complete");
    }
  }
  Cluster& cluster = *warp.cta->cluster;
  if (Observer* observer = cluster.grid->observer) {
    for (int lane = 0; lane < kLanes; ++lane) {
      if ((mask >> lane & 1) == 0) continue;
      observer->sync(
          {SyncKind::group_wait, warp.agent(lane), 0, 0, static_cast<int64_t>(in.imm), 0, cluster.order++, warp.line});
    }
  }
  return Step::next;
}

void decode_commit(Decoder& decoder, const Statement& statement, Modifiers& mods, Instruction& instruction) {
  mods.done();
  decoder.operand_count(statement, 0, 0);
  instruction.exec = run_commit;
}

void decode_wait(Decoder& decoder, const Statement& statement, Modifiers& mods, Instruction& instruction) {
  instruction.flags = mods.take("read") ? 1 : 0;
  mods.done();
  decoder.operand_count(statement, 1, 1);
  const int64_t count = decoder.immediate(statement.operands[0]);
  if (count < 0) unsupported(statement, "a negative number of groups");
  instruction.imm = static_cast<uint64_t>(count);
  instruction.exec = run_wait;
}

const Family families[] = {
    {"cp.async.bulk", decode_copy},
    {"cp.async.bulk.tensor", decode_tensor},
    {"cp.reduce.async.bulk", decode_reduce},
    {"cp.reduce.async.bulk.tensor", decode_reduce_tensor},
    {"cp.async.bulk.prefetch", decode_prefetch},
    {"cp.async.bulk.prefetch.tensor", decode_prefetch_tensor},
    {"cp.async.bulk.commit_group", decode_commit},
    {"cp.async.bulk.wait_group", decode_wait},
};

}  // namespace
}  // namespace emu
