// tcgen05.alloc, .dealloc, .relinquish_alloc_permit (PTX ISA 9.7.16.7).
#include <algorithm>

#include "tensor.h"

namespace emu {
namespace {

using Request = TensorPipe::Request;

struct AllocData : Payload {
  int group = 1;
  Address address;             // alloc: where the result goes; generic or shared
  bool shared_space = false;
  Slot taddr = kNoSlot;        // dealloc
  Slot count = kNoSlot;
};

/// The value that all lanes must agree on.
uint32_t uniform(Warp& warp, Slot slot, uint32_t mask, const char* what) {
  const uint32_t* lanes = warp.r32(slot);
  const int first = __builtin_ctz(mask);
  for (uint32_t rest = mask; rest; rest &= rest - 1) {
    const int lane = __builtin_ctz(rest);
    if (lanes[lane] != lanes[first]) {
      fail_lane(lane, Fault::illegal_operand, "%s differs between the threads of the warp: 0x%x in lane %d, 0x%x in lane %d", what,
                lanes[first], first, lanes[lane], lane);
    }
  }
  return lanes[first];
}

void check_count(uint32_t count, const char* what) {
  if (count < 32 || count > TensorMemory::kColumns || (count & (count - 1)) != 0) {
    fail(Fault::tensor_memory, "%s of %u columns; it takes a power of two from 32 to 512", what, count);
  }
}

/// A first column of `count` columns that are free in all of `ctas`, or -1.
int find_columns(Cluster& cluster, const std::vector<Cta*>& ctas, uint32_t count) {
  std::vector<uint32_t> fits;
  for (uint32_t begin = 0; begin + count <= TensorMemory::kColumns; begin += count) {
    bool free = true;
    for (const Cta* cta : ctas)
      for (uint32_t c = begin; c < begin + count && free; ++c) free = cta->tensor.owner[c] == 0;
    if (free) fits.push_back(begin);
  }
  if (fits.empty()) return -1;
  // Where an allocation lies is not the program's to know.
  const bool first = cluster.async.mode != AsyncMode::random;
  return static_cast<int>(fits[first ? 0 : cluster.random.below(static_cast<uint32_t>(fits.size()))]);
}

void take_columns(Cta& cta, uint32_t column, uint32_t count, int line) {
  TensorMemory& memory = cta.tensor;
  memory.make();
  const uint16_t id = memory.next_id++;
  memory.allocations.push_back({id, column, count, line});
  uint32_t live = 0;
  for (uint32_t c = column; c < column + count; ++c) {
    memory.owner[c] = id;
    std::fill_n(memory.column(c), TensorMemory::kRows, kPoison);
  }
  for (const uint16_t owner : memory.owner) live += owner != 0;
  memory.peak = std::max(memory.peak, live);
  memory.last_request = count;
}

void free_columns(Cta& cta, uint32_t column, uint32_t count) {
  TensorMemory& memory = cta.tensor;
  for (uint32_t c = column; c < column + count; ++c) {
    memory.owner[c] = 0;
    std::fill_n(memory.column(c), TensorMemory::kRows, kPoison);
  }
  auto& all = memory.allocations;
  all.erase(std::find_if(all.begin(), all.end(), [&](const auto& a) { return a.column == column; }));
  cta.cluster->wake();
}

void store_address(Warp& warp, const AllocData& d, uint32_t mask, uint32_t column) {
  const int lane = __builtin_ctz(mask);
  const Space space = d.shared_space ? Space::shared_cta : Space::generic;
  const uint64_t address = warp.address(d.address, lane);
  uint8_t* out = resolve(warp, lane, space, address, 4, Access::write);
  Cta& cta = *warp.cta;
  if (out < cta.shared || out >= cta.shared + cta.shared_end) {
    fail_lane(lane, Fault::illegal_operand, "tcgen05.alloc: address 0x%llx is not in shared memory of the CTA",
              static_cast<unsigned long long>(address));
  }
  std::memcpy(out, &column, 4);
  cta.cluster->touch();
  if (Observer* observer = cta.cluster->grid->observer) {
    observer->memory({warp.agent(lane), Proxy::generic, Access::write, Region::shared,
                      cta.address(static_cast<uint32_t>(out - cta.shared)), 4, 0, cta.cluster->order++, warp.line});
  }
}

void check_alloc(Cta& cta, uint32_t count) {
  TensorMemory& memory = cta.tensor;
  check_count(count, "tcgen05.alloc");
  if (memory.relinquished) {
    fail(Fault::tensor_memory, "tcgen05.alloc after a thread of the CTA executed tcgen05.relinquish_alloc_permit");
  }
  if (count > memory.last_request) {
    fail(Fault::tensor_memory, "tcgen05.alloc of %u columns after one of %u; the number of columns must not grow within a CTA", count,
         memory.last_request);
  }
}

void check_dealloc(Cta& cta, uint32_t taddr, uint32_t count) {
  TensorMemory& memory = cta.tensor;
  check_count(count, "tcgen05.dealloc");
  for (const auto& a : memory.allocations) {
    if (taddr != a.column) continue;
    if (count != a.count) {
      fail(Fault::tensor_memory, "tcgen05.dealloc of %u columns at column %u, where %u were allocated (line %d)", count, a.column, a.count,
           a.line);
    }
    check_no_traffic(cta, a.column, a.count, "tcgen05.dealloc");
    return;
  }
  fail(Fault::tensor_memory, "tcgen05.dealloc at 0x%08x, which is no live allocation of CTA rank %u", taddr, cta.rank);
}

/// The pair's two warps meet: true when this one may go on. `mine` is the request of this CTA.
Step meet(Warp& warp, Request& mine, Request& theirs) {
  Cta& cta = *warp.cta;
  Cluster& cluster = *cta.cluster;
  const bool allocates = mine.kind == Request::Kind::alloc;
  if (!mine.granted && theirs.kind != Request::Kind::none && !theirs.granted) {
    if (theirs.kind != mine.kind) {
      fail(Fault::tensor_memory, "tcgen05.%s with cta_group::2 meets the peer CTA's tcgen05.%s (line %d)", allocates ? "alloc" : "dealloc",
           allocates ? "dealloc" : "alloc", theirs.line);
    }
    if (theirs.count != mine.count || (!allocates && theirs.column != mine.column)) {
      fail(Fault::tensor_memory, "the two warps of a collective tcgen05.%s disagree: %u columns (line %d), %u columns in the peer CTA (line %d)",
           allocates ? "alloc" : "dealloc", mine.count, mine.line, theirs.count, theirs.line);
    }
    Cta& peer = peer_of(cta);
    int column = static_cast<int>(mine.column);
    if (allocates) {
      column = find_columns(cluster, {&cta, &peer}, mine.count);
      if (column >= 0) {
        take_columns(cta, static_cast<uint32_t>(column), mine.count, mine.line);
        take_columns(peer, static_cast<uint32_t>(column), theirs.count, theirs.line);
      }
    } else {
      free_columns(cta, mine.column, mine.count);
      if (!theirs.detached) free_columns(peer, theirs.column, theirs.count);
    }
    if (column >= 0) {
      mine.granted = theirs.granted = true;
      mine.column = theirs.column = static_cast<uint32_t>(column);
      if (theirs.detached) theirs = Request();
      cluster.wake();
    }
  }
  if (mine.granted) return Step::next;
  return warp.block(Wait::Kind::tensor_alloc, theirs.kind == Request::Kind::none
                                                  ? "the peer CTA's warp in this collective tcgen05 allocation instruction"
                                                  : "free Tensor Memory columns in both CTAs of the pair");
}

Step run_alloc(Warp& warp, const Instruction& in, uint32_t mask) {
  const auto& d = in.as<AllocData>();
  Cta& cta = *warp.cta;
  use_group(cta, d.group);
  const uint32_t count = uniform(warp, d.count, mask, "tcgen05.alloc: nCols");
  uint32_t column = 0;
  if (d.group == 1) {
    check_alloc(cta, count);
    const int found = find_columns(*cta.cluster, {&cta}, count);
    if (found < 0) return warp.block(Wait::Kind::tensor_alloc, "free Tensor Memory columns");
    column = static_cast<uint32_t>(found);
    take_columns(cta, column, count, warp.line);
  } else {
    TensorPipe& pipe = tensor_pipe(cta);
    Request &mine = pipe.requests[cta.rank & 1], &theirs = pipe.requests[~cta.rank & 1];
    if (mine.warp != &warp && mine.kind != Request::Kind::none) {
      return warp.block(Wait::Kind::tensor_alloc, "another collective tcgen05 allocation instruction of its CTA");
    }
    if (mine.kind == Request::Kind::none) {
      check_alloc(cta, count);
      mine.kind = Request::Kind::alloc;
      mine.count = count;
      mine.line = warp.line;
      mine.warp = &warp;
      cta.cluster->wake();
    }
    const Step step = meet(warp, mine, theirs);
    if (step == Step::blocked) return step;
    column = mine.column;
    mine = Request();
  }
  store_address(warp, d, mask, column);
  return Step::next;
}

Step run_dealloc(Warp& warp, const Instruction& in, uint32_t mask) {
  const auto& d = in.as<AllocData>();
  Cta& cta = *warp.cta;
  Cluster& cluster = *cta.cluster;
  use_group(cta, d.group);
  const uint32_t count = uniform(warp, d.count, mask, "tcgen05.dealloc: nCols");
  const uint32_t taddr = uniform(warp, d.taddr, mask, "tcgen05.dealloc: taddr");
  if (d.group == 1) {
    check_dealloc(cta, taddr, count);
    free_columns(cta, taddr, count);
    return Step::next;
  }
  TensorPipe& pipe = tensor_pipe(cta);
  Request &mine = pipe.requests[cta.rank & 1], &theirs = pipe.requests[~cta.rank & 1];
  if (mine.kind != Request::Kind::none && (mine.warp != &warp || mine.detached)) {
    return warp.block(Wait::Kind::tensor_alloc, "another collective tcgen05 allocation instruction of its CTA");
  }
  if (mine.kind == Request::Kind::none) {
    check_dealloc(cta, taddr, count);
    mine.kind = Request::Kind::dealloc;
    mine.count = count;
    mine.column = taddr;
    mine.line = warp.line;
    mine.warp = &warp;
    cluster.wake();
    // It may or may not block; both must work.
    const bool blocks = cluster.async.mode == AsyncMode::lazy || (cluster.async.mode == AsyncMode::random && cluster.random.below(2) == 0);
    if (!blocks && theirs.kind == Request::Kind::none) {
      mine.detached = true;   // the warp may even end before the peer comes
      free_columns(cta, taddr, count);
      return Step::next;
    }
  }
  const Step step = meet(warp, mine, theirs);
  if (step == Step::next) mine = Request();
  return step;
}

Step run_relinquish(Warp& warp, const Instruction& in, uint32_t) {
  use_group(*warp.cta, static_cast<int>(in.imm));
  warp.cta->tensor.relinquished = true;
  return Step::next;
}

int take_group(Modifiers& mods) { return mods.take_one({"cta_group::1", "cta_group::2"}, -2) + 1; }

void take_sync_aligned(const Statement& s, Modifiers& mods) {
  if (!mods.take("sync") || !mods.take("aligned")) unsupported(s, "'" + s.mnemonic + "' lacks .sync.aligned");
}

void decode_alloc(Decoder& decoder, const Statement& s, Modifiers& mods, Instruction& in) {
  decoder.operand_count(s, 2, 2);
  auto d = std::make_unique<AllocData>();
  d->group = take_group(mods);
  take_sync_aligned(s, mods);
  d->shared_space = mods.take("shared::cta");
  if (!mods.take("b32")) unsupported(s, "'" + s.mnemonic + "' lacks .b32");
  d->address = decoder.address(s.operands[0]);
  d->count = decoder.source(s.operands[1], Type::b32);
  in.aligned = true;
  in.exec = run_alloc;
  decoder.keep(in, std::move(d));
}

void decode_dealloc(Decoder& decoder, const Statement& s, Modifiers& mods, Instruction& in) {
  decoder.operand_count(s, 2, 2);
  auto d = std::make_unique<AllocData>();
  d->group = take_group(mods);
  take_sync_aligned(s, mods);
  if (!mods.take("b32")) unsupported(s, "'" + s.mnemonic + "' lacks .b32");
  d->taddr = decoder.source(s.operands[0], Type::b32);
  d->count = decoder.source(s.operands[1], Type::b32);
  in.aligned = true;
  in.exec = run_dealloc;
  decoder.keep(in, std::move(d));
}

void decode_relinquish(Decoder& decoder, const Statement& s, Modifiers& mods, Instruction& in) {
  decoder.operand_count(s, 0, 0);
  in.imm = static_cast<uint64_t>(take_group(mods));
  take_sync_aligned(s, mods);
  in.aligned = true;
  in.exec = run_relinquish;
}

const Family alloc_family("tcgen05.alloc", decode_alloc);
const Family dealloc_family("tcgen05.dealloc", decode_dealloc);
const Family relinquish_family("tcgen05.relinquish_alloc_permit", decode_relinquish);

}  // namespace
}  // namespace emu
