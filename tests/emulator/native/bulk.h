// Bulk copies in flight: what cp.async.bulk and cp.reduce.async.bulk, with and without a tensor map, hand to the
// asynchronous queue.
//
// A load poisons its destination when it is issued and writes it when it lands, one destination CTA a stage. A store
// reads shared memory in its first stage (then the source may be reused: wait_group.read) and writes global memory in
// its second (wait_group).
#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "machine.h"
#include "tma.h"

namespace emu {

/// The global side of a copy: a tile of a tensor, or plain bytes.
struct GlobalSide {
  std::optional<Tile> tile;
  uint64_t address = 0;  // plain bytes
  uint32_t size = 0;

  uint32_t bytes() const { return tile ? tile->bytes() : size; }
  uint32_t shared_bytes() const { return tile ? tile->shared_bytes() : size; }
  void walk(uint32_t base, const std::function<void(const TileRun&)>& visit) const;
  /// Verdict if what will be touched is not inside one buffer of the launch (a tile: its part inside the tensor).
  void check(const Grid& grid, Access access, const char* what) const;
  std::string describe() const;
};

/// Where a load goes and whom it tells.
struct LoadTarget {
  Cta* cta;
  uint32_t offset;
  Cta* barrier_cta;
  uint32_t barrier;
};

/// Bytes that arrive in shared memory: from global memory, or from the shared memory of `source_cta`.
class BulkLoad : public AsyncOp {
 public:
  GlobalSide global;
  Cta* source_cta = nullptr;  // not null: a copy between shared memories
  uint32_t source = 0;
  bool reduces = false;  // of shared memory by shared memory
  Reduction reduction = Reduction::add;
  ReduceType type = ReduceType::u32;
  std::vector<LoadTarget> targets;

  /// Overwrites the destinations with poison; called before submit.
  void poison();
  bool advance(Cluster& cluster) override;
  bool needs_cta(uint32_t rank) const override;
  std::string describe() const override;

 private:
  void land(Cluster& cluster, const LoadTarget& target);
  size_t next_ = 0;
};

/// Bytes from shared memory to global memory, copied or reduced.
class BulkStore : public AsyncOp {
 public:
  GlobalSide global;
  Cta* cta = nullptr;
  uint32_t source = 0;
  bool reduces = false;
  Reduction reduction = Reduction::add;
  ReduceType type = ReduceType::u32;
  uint16_t byte_mask = 0xffff;  // .cp_mask: which bytes of every 16 are written
  std::shared_ptr<AsyncGroup> group;

  bool advance(Cluster& cluster) override;
  bool grid_ordered() const override { return reduces && !data_.empty(); }
  bool needs_cta(uint32_t) const override;
  std::string describe() const override;

 private:
  void read(Cluster& cluster);
  void write(Cluster& cluster);
  std::vector<uint8_t> data_;  // filled by the first stage, in the order of GlobalSide::walk
};

/// Reports a memory event to the launch's observer, if there is one.
void notify(Cluster& cluster, const AsyncOp& op, Access access, Region region, uint64_t address, uint64_t bytes);

}  // namespace emu
