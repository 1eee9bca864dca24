// Tensor Memory in use: who touches which cells, and what is in flight (PTX ISA 9.7.16).
//
// tcgen05.mma, .cp and .commit are operations of the cluster's asynchronous queue. tcgen05.ld and .st belong to their
// warp: eagerly they act at once, lazily at the last legal moment (a ld: when its registers are used or waited for;
// a st: when it is waited for), at random at one of the two. Whatever overlaps something in flight that it is not
// ordered after is reported as a fault of its own, besides the old or poisoned data that it sees.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "machine.h"

namespace emu {

constexpr uint16_t kPoisonHalf = kPoison >> 16;

/// A rectangle of cells of one CTA's Tensor Memory.
struct TensorRect {
  uint32_t rank;
  uint32_t lane, lanes;
  uint32_t column, columns;

  bool overlaps(const TensorRect& other) const {
    return rank == other.rank && lane < other.lane + other.lanes && other.lane < lane + lanes &&
           column < other.column + other.columns && other.column < column + columns;
  }
  std::string describe() const;
};
using TensorRects = std::vector<TensorRect>;

/// The first overlap, or nullptr.
const TensorRect* overlap(const TensorRects& x, const TensorRects& y);

/// Verdict unless all columns lie in live allocations.
void check_allocated(Cluster& cluster, const TensorRect& rect, const char* what);

/// Which pairs of operations are pipelined, that is, ordered without a wait (PTX ISA 9.7.16.6.2).
enum class TensorOrder : uint8_t { mma, shift, copy, copy_4x256b };

/// An operation of the tensor pipe that touches Tensor Memory.
class TensorOp : public AsyncOp {
 public:
  TensorOrder order = TensorOrder::mma;
  int group = 1;                 // cta_group
  Cta* cta = nullptr;            // of the issuing thread
  uint32_t thread = 0;           // warp * 32 + lane of the issuing thread
  TensorRects reads, writes;

  bool advance(Cluster& cluster) final;
  bool needs_cta(uint32_t rank) const override;
  /// CTAs whose memory the operation uses: one, or both of the pair, even rank first.
  std::vector<Cta*> members() const;

 protected:
  virtual void execute(Cluster& cluster) = 0;
};

/// A matrix kept in a collector buffer by ::fill.
struct Collector {
  bool valid = false;
  int line = 0;
  std::string source;            // where it was read from, for messages
  std::vector<uint8_t> bytes;
};

/// What a CTA (or CTA pair) has in flight.
struct TensorPipe {
  std::vector<TensorOp*> operations;       // in order of issue
  Collector collector_a;
  std::array<Collector, 4> collector_b;    // .ws

  /// A collective request of cta_group::2 that waits for the peer's warp.
  struct Request {
    enum class Kind : uint8_t { none, alloc, dealloc } kind = Kind::none;
    uint32_t count = 0, column = 0;
    int line = 0;
    const Warp* warp = nullptr;
    bool granted = false, detached = false;
  };
  std::array<Request, 2> requests;         // by rank parity
};

/// The pipe that serves a CTA's tcgen05 instructions.
TensorPipe& tensor_pipe(Cta& cta);
/// Notes the kernel's cta_group; Verdict if another one is in use, or if there is no peer for ::2.
void use_group(Cta& cta, int group);
Cta& peer_of(Cta& cta);

/// Submits an operation: its order among the pipe's operations, and the checks at issue.
void submit(Warp& warp, int lane, std::unique_ptr<TensorOp> op);

// ---------------------------------------------------------------- ld and st

/// How registers map to cells.
struct TensorAccess {
  enum class Shape : uint8_t { l32x32b, l16x64b, l16x128b, l16x256b, l16x32bx2 } shape = Shape::l32x32b;
  uint32_t repeat = 1;           // .num
  bool packed = false;           // .pack::16b, .unpack::16b: two columns a register
  uint32_t split = 0;            // immHalfSplitoff

  uint32_t registers() const;
  /// Columns that one access touches, from its base on.
  uint32_t columns() const;
  uint32_t lanes() const { return shape == Shape::l32x32b ? 32 : 16; }
  struct Cell { uint32_t lane, column; };
  /// Cell of register r of thread t, relative to the base; packed: the first of its two columns.
  Cell cell(uint32_t t, uint32_t r) const;
  TensorRects rects(uint32_t rank, uint32_t lane, uint32_t column) const;
};

struct PendingLoad {
  TensorAccess access;
  const Slot* destinations = nullptr;   // kNoSlot for a sink
  uint32_t lane = 0, column = 0;
  TensorRects rects;
  int line = 0;
  std::function<void(Warp&)> then;      // after the registers are filled (.red); may be empty
};

struct PendingStore {
  TensorAccess access;
  std::vector<uint32_t> values;         // [register][thread]
  uint32_t lane = 0, column = 0;
  TensorRects rects;
  int line = 0;
};

/// A warp's loads and stores in flight.
struct TensorTraffic {
  std::vector<PendingLoad> loads;
  std::vector<PendingStore> stores;
};

TensorTraffic& tensor_traffic(Warp& warp);
void issue_load(Warp& warp, PendingLoad load);
void issue_store(Warp& warp, PendingStore store);
void land_tensor_stores(Warp& warp);
/// Verdict if a load or store of the CTA in flight touches these columns.
void check_no_traffic(Cta& cta, uint32_t column, uint32_t columns, const char* what);

}  // namespace emu
