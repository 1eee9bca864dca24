#include "bulk.h"

#include <cstring>

namespace emu {

void notify(Cluster& cluster, const AsyncOp& op, Access access, Region region, uint64_t address, uint64_t bytes) {
  Observer* observer = cluster.grid->observer;
  if (observer == nullptr || bytes == 0) return;
  observer->memory({op.agent, op.proxy, access, region, address, bytes, op.id, cluster.order++, op.line});
}

namespace {

uint8_t* host(uint64_t address) { return reinterpret_cast<uint8_t*>(address); }

// Events of a tile: global rows, and the shared bytes; runs that touch are joined.
class Joined {
 public:
  Joined(Cluster& cluster, const AsyncOp& op, Access access, Region region, uint64_t base = 0)
      : cluster_(cluster), op_(op), access_(access), region_(region), base_(base) {}
  ~Joined() { notify(cluster_, op_, access_, region_, base_ + begin_, end_ - begin_); }
  void add(uint64_t address, uint32_t bytes) {
    if (cluster_.grid->observer == nullptr) return;
    if (address == end_ && end_ != begin_) {
      end_ += bytes;
      return;
    }
    notify(cluster_, op_, access_, region_, base_ + begin_, end_ - begin_);
    begin_ = address;
    end_ = address + bytes;
  }

 private:
  Cluster& cluster_;
  const AsyncOp& op_;
  Access access_;
  Region region_;
  uint64_t base_, begin_ = 0, end_ = 0;
};

uint64_t shared_base(const Cta& cta) { return cta.address(0); }

}  // namespace

void GlobalSide::walk(uint32_t base, const std::function<void(const TileRun&)>& visit) const {
  if (tile) return tile->walk(base, visit);
  visit({base, size, address, true});
}

namespace {

// Part of [first, first + count * step) that lies in [0, size), as indices; false if there is none.
bool clip(int64_t first, uint32_t count, uint32_t step, uint64_t size, uint64_t* low, uint64_t* high) {
  int64_t begin = first;
  if (begin < 0) begin += (-begin + step - 1) / step * step;
  int64_t last = first + static_cast<int64_t>(count - 1) * step;
  const int64_t limit = static_cast<int64_t>(size) - 1;
  if (last > limit) last -= (last - limit + step - 1) / step * step;
  if (begin > last) return false;
  *low = static_cast<uint64_t>(begin);
  *high = static_cast<uint64_t>(last);
  return true;
}

}  // namespace

void GlobalSide::check(const Grid& grid, Access access, const char* what) const {
  if (!tile) {
    grid.global_at(address, size, access, what);
    return;
  }
  const TensorMapData& map = tile->map;
  uint64_t low, high;
  if (!clip(tile->coords[0], map.box_elements(0), 1, tile->row_elements(), &low, &high)) return;
  const uint64_t first = low * element_bytes(map.type), row = (high - low + 1) * element_bytes(map.type);
  if (tile->rows) {
    for (int i = 1; i <= 4; ++i) {
      const int32_t r = tile->coords[static_cast<size_t>(i)];
      if (r < 0 || static_cast<uint64_t>(r) >= map.dims[1]) continue;
      grid.global_at(map.base + static_cast<uint64_t>(r) * map.strides[0] + first, row, access, what);
    }
    return;
  }
  uint64_t begin = map.base + first, end = begin + row;
  for (int i = 1; i < map.rank; ++i) {
    if (!clip(tile->coords[i], map.box_elements(i), map.element_strides[i], map.dims[i], &low, &high)) return;
    begin += low * map.strides[i - 1];
    end += high * map.strides[i - 1];
  }
  grid.global_at(begin, end - begin, access, what);
}

std::string GlobalSide::describe() const {
  if (!tile) return format("%u bytes at global 0x%llx", size, static_cast<unsigned long long>(address));
  std::string text = tile->map.describe() + " at (";
  const int count = tile->rows ? 5 : tile->map.rank;
  for (int i = 0; i < count; ++i) text += (i > 0 ? ", " : "") + std::to_string(tile->coords[static_cast<size_t>(i)]);
  return text + ")";
}

// ---- loads --------------------------------------------------------------------------------------

void BulkLoad::poison() {
  if (reduces) return;  // a reduction needs what is there
  for (const LoadTarget& target : targets) {
    global.walk(target.offset, [&](const TileRun& run) {
      uint8_t* d = target.cta->shared + run.shared;
      const auto* pattern = reinterpret_cast<const uint8_t*>(&kPoison);
      for (uint32_t i = 0; i < run.bytes; ++i) d[i] = pattern[(run.shared + i) % 4];
    });
  }
}

void BulkLoad::land(Cluster& cluster, const LoadTarget& target) {
  if (source_cta != nullptr) {
    uint8_t* d = target.cta->shared + target.offset;
    const uint8_t* s = source_cta->shared + source;
    if (reduces) {
      reduce(reduction, type, d, s, global.size);
    } else {
      std::memcpy(d, s, global.size);
    }
    notify(cluster, *this, Access::read, Region::shared, source_cta->address(source), global.size);
    notify(cluster, *this, reduces ? Access::reduce : Access::write, Region::shared, target.cta->address(target.offset),
           global.size);
    return;
  }
  Joined reads(cluster, *this, Access::read, Region::global);
  Joined writes(cluster, *this, Access::write, Region::shared, shared_base(*target.cta));
  global.walk(target.offset, [&](const TileRun& run) {
    if (run.bytes == 0) return;
    uint8_t* d = target.cta->shared + run.shared;
    writes.add(run.shared, run.bytes);
    if (!run.inside) {
      fill_outside(global.tile->map, d, run.bytes);
      return;
    }
    std::memcpy(d, host(run.global), run.bytes);
    if (global.tile) convert_loaded(global.tile->map.type, d, run.bytes);
    reads.add(run.global, run.bytes);
  });
}

bool BulkLoad::advance(Cluster& cluster) {
  const LoadTarget& target = targets[next_++];
  land(cluster, target);
  const uint32_t bytes = global.bytes();
  cluster.tma_bytes_in += bytes;
  target.barrier_cta->barriers.complete_tx(*target.barrier_cta, target.barrier, bytes);
  return next_ == targets.size();
}

bool BulkLoad::needs_cta(uint32_t rank) const {
  for (size_t i = next_; i < targets.size(); ++i) {
    if (targets[i].cta->rank == rank || targets[i].barrier_cta->rank == rank) return true;
  }
  return source_cta != nullptr && source_cta->rank == rank && next_ < targets.size();
}

std::string BulkLoad::describe() const {
  std::string text = source_cta != nullptr
                         ? format("%s of %u bytes from shared 0x%x", reduces ? "bulk reduction" : "bulk copy",
                                  global.size, source_cta->address(source))
                         : std::string(global.tile ? "TMA load of " : "bulk load of ") + global.describe();
  for (size_t i = next_; i < targets.size(); ++i) {
    text += format(" to shared 0x%x (mbarrier 0x%x)", targets[i].cta->address(targets[i].offset),
                   targets[i].barrier_cta->address(targets[i].barrier));
  }
  return text;
}

// ---- stores -------------------------------------------------------------------------------------

void BulkStore::read(Cluster& cluster) {
  data_.reserve(global.bytes());
  Joined reads(cluster, *this, Access::read, Region::shared, shared_base(*cta));
  global.walk(source, [&](const TileRun& run) {
    const uint8_t* s = cta->shared + run.shared;
    data_.insert(data_.end(), s, s + run.bytes);
    reads.add(run.shared, run.bytes);
  });
}

void BulkStore::write(Cluster& cluster) {
  const uint8_t* s = data_.data();
  Joined writes(cluster, *this, reduces ? Access::reduce : Access::write, Region::global);
  global.walk(source, [&](const TileRun& run) {
    if (run.inside) {
      uint8_t* d = host(run.global);
      if (reduces) {
        reduce(reduction, type, d, s, run.bytes);
      } else if (byte_mask == 0xffff) {
        std::memcpy(d, s, run.bytes);
      } else {
        for (uint32_t i = 0; i < run.bytes; ++i) {
          if ((byte_mask >> (i % 16) & 1) != 0) d[i] = s[i];
        }
      }
      writes.add(run.global, run.bytes);
    }
    s += run.bytes;
  });
}

bool BulkStore::advance(Cluster& cluster) {
  if (data_.empty()) {
    read(cluster);
    --group->unread;
    cluster.wake();
    return false;
  }
  write(cluster);
  cluster.tma_bytes_out += global.bytes();
  --group->unfinished;
  cluster.wake();
  return true;
}

bool BulkStore::needs_cta(uint32_t rank) const { return data_.empty() && cta->rank == rank; }

std::string BulkStore::describe() const {
  const char* kind = global.tile ? (reduces ? "TMA reduction of " : "TMA store of ")
                                 : (reduces ? "bulk reduction of " : "bulk store of ");
  return kind + global.describe() +
         format(" from shared 0x%x%s", cta->address(source), data_.empty() ? "" : ", source read");
}

}  // namespace emu
