// Opcodes that handle tensor maps: prefetch.tensormap, tensormap.replace, tensormap.cp_fenceproxy,
// fence.proxy.tensormap.
#include <string>

#include "lanes.h"
#include "machine.h"
#include "program.h"
#include "tma.h"

namespace emu {
namespace {

enum class Field : uint8_t {
  global_address,
  rank,
  box_dim,
  global_dim,
  global_stride,
  element_stride,
  elemtype,
  interleave_layout,
  swizzle_mode,
  swizzle_atomicity,
  fill_mode
};

struct MapData : Payload {
  Address address, source;
  Space space = Space::generic;
  Field field = Field::global_address;
  bool has_ordinal = false;
  int64_t ordinal = 0;
  Slot value = kNoSlot;
};

uint64_t checked_address(Warp& warp, int lane, const Address& operand, uint32_t alignment) {
  const uint64_t address = warp.address(operand, lane);
  if (address % alignment != 0) {
    fail_lane(lane, Fault::misaligned, "tensor map at 0x%llx, expected a multiple of %u",
              static_cast<unsigned long long>(address), alignment);
  }
  return address;
}

// 128 bytes of global memory or of the executing CTA's shared memory.
uint8_t* map_bytes(Warp& warp, int lane, Space space, const Address& operand, Access access) {
  const uint64_t address = checked_address(warp, lane, operand, 64);
  const bool shared =
      space == Space::shared_cta || (space == Space::generic && (address & ~0xffffffffull) == kSharedWindow);
  if (!shared) return warp.cta->cluster->grid->global_at(address, sizeof(TensorMapData), access, "tensor map");
  uint32_t offset;
  Cta& cta = warp.cta->cluster->shared_cta(address & 0xffffffffull, &offset);
  if (&cta != warp.cta)
    fail_lane(lane, Fault::illegal_operand, "tensor map in the shared memory of CTA %u, expected the own CTA",
              cta.rank);
  return cta.shared_at(offset, sizeof(TensorMapData), "tensor map");
}

void touched(Warp& warp, int lane, Access access, const uint8_t* bytes, Proxy proxy) {
  Cluster& cluster = *warp.cta->cluster;
  cluster.touch();
  Observer* observer = cluster.grid->observer;
  if (observer == nullptr) return;
  const bool shared = bytes >= warp.cta->shared && bytes < warp.cta->shared + warp.cta->shared_end;
  const uint64_t address =
      shared ? warp.cta->address(static_cast<uint32_t>(bytes - warp.cta->shared)) : reinterpret_cast<uint64_t>(bytes);
  observer->memory({warp.agent(lane), proxy, access, shared ? Region::shared : Region::global, address,
                    sizeof(TensorMapData), 0, cluster.order++, warp.line});
}

// ---- tensormap.replace --------------------------------------------------------------------------

// PTX numbers element types in another order than the driver does.
TmaType element_type(int lane, uint64_t value) {
  static constexpr TmaType types[] = {TmaType::u8,   TmaType::u16,  TmaType::u32,     TmaType::s32,     TmaType::u64,
                                      TmaType::s64,  TmaType::f16,  TmaType::f32,     TmaType::f32_ftz, TmaType::f64,
                                      TmaType::bf16, TmaType::tf32, TmaType::tf32_ftz};
  if (value >= std::size(types)) {
    fail_lane(lane, Fault::unsupported, "tensormap.replace: element type %llu is not known here",
              static_cast<unsigned long long>(value));
  }
  return types[value];
}

void set_swizzle(int lane, TensorMapData& map, Field field, uint64_t value) {
  if (field == Field::swizzle_mode && value <= 3) {
    map.swizzle = static_cast<Swizzle>(value);
  } else if (field == Field::swizzle_atomicity && value == 0) {
    if (map.swizzle == Swizzle::b128_atom_32b) map.swizzle = Swizzle::b128;
  } else if (field == Field::swizzle_atomicity && value == 1 && map.swizzle >= Swizzle::b128) {
    map.swizzle = Swizzle::b128_atom_32b;
  } else {
    fail_lane(lane, Fault::unsupported, "tensormap.replace: this %s (%llu) is not known here",
              field == Field::swizzle_mode ? "swizzle mode" : "swizzle atomicity",
              static_cast<unsigned long long>(value));
  }
}

void replace_field(int lane, TensorMapData& map, const MapData& data, uint64_t value) {
  const auto ordinal = static_cast<size_t>(data.ordinal);
  const uint64_t small = std::min<uint64_t>(value, 255);  // out of range stays out of range
  switch (data.field) {
    case Field::global_address: map.base = value; break;
    case Field::rank: map.rank = static_cast<uint8_t>(std::min<uint64_t>(value + 1, 255)); break;
    case Field::box_dim: map.box[ordinal] = static_cast<uint16_t>(std::min<uint64_t>(value, 65535)); break;
    case Field::global_dim: map.dims[ordinal] = value; break;
    case Field::global_stride: map.strides[ordinal] = value; break;
    case Field::element_stride: map.element_strides[ordinal] = static_cast<uint8_t>(small); break;
    case Field::elemtype: map.type = element_type(lane, value); break;
    case Field::interleave_layout: map.interleave = static_cast<uint8_t>(small); break;
    case Field::swizzle_mode:
    case Field::swizzle_atomicity: set_swizzle(lane, map, data.field, value); break;
    case Field::fill_mode: map.nan_fill = static_cast<uint8_t>(small); break;
  }
}

Step run_replace(Warp& warp, const Instruction& in, uint32_t mask) {
  const auto& data = in.as<MapData>();
  const bool wide = data.field == Field::global_address || data.field == Field::global_stride;
  for (int lane = 0; lane < kLanes; ++lane) {
    if ((mask >> lane & 1) == 0) continue;
    uint8_t* bytes = map_bytes(warp, lane, data.space, data.address, Access::write);
    TensorMapData map;
    std::memcpy(&map, bytes, sizeof map);
    if (map.magic != TensorMapData::kMagic || map.checksum != map.sum()) {
      fail_lane(lane, Fault::tensor_map,
                "tensormap.replace: these 128 bytes are not a tensor map, or were changed by ordinary writes");
    }
    replace_field(lane, map, data, wide ? warp.r64(data.value)[lane] : warp.r32(data.value)[lane]);
    map.seal();
    std::memcpy(bytes, &map, sizeof map);
    touched(warp, lane, Access::write, bytes, Proxy::generic);
  }
  return Step::next;
}

void decode_replace(Decoder& decoder, const Statement& statement, Modifiers& mods, Instruction& instruction) {
  if (!mods.take("tile")) unsupported(statement, "tensormap.replace has the mode .tile only");
  auto data = std::make_unique<MapData>();
  data->field = static_cast<Field>(
      mods.take_one({"global_address", "rank", "box_dim", "global_dim", "global_stride", "element_stride", "elemtype",
                     "interleave_layout", "swizzle_mode", "swizzle_atomicity", "fill_mode"},
                    -2));
  if (mods.take("global")) data->space = Space::global;
  else if (mods.take("shared::cta")) data->space = Space::shared_cta;
  if (!mods.take("b1024")) unsupported(statement, "tensormap.replace needs .b1024");
  const bool wide = data->field == Field::global_address || data->field == Field::global_stride;
  if (mods.need_type() != (wide ? Type::b64 : Type::b32)) unsupported(statement, "the type of the new value");
  mods.done();
  data->has_ordinal = data->field >= Field::box_dim && data->field <= Field::element_stride;
  const size_t count = data->has_ordinal ? 3 : 2;
  decoder.operand_count(statement, count, count);
  data->address = decoder.address(statement.operands[0]);
  if (data->has_ordinal) {
    data->ordinal = decoder.immediate(statement.operands[1]);
    const int64_t end = data->field == Field::global_stride ? kMaxRank - 1 : kMaxRank;
    if (data->ordinal < 0 || data->ordinal >= end) unsupported(statement, "this ordinal");
  }
  data->value = decoder.source(statement.operands[count - 1], wide ? Type::b64 : Type::b32);
  instruction.exec = run_replace;
  decoder.keep(instruction, std::move(data));
}

// ---- tensormap.cp_fenceproxy, fence.proxy.tensormap, prefetch.tensormap -------------------------

Step run_copy(Warp& warp, const Instruction& in, uint32_t mask) {
  const auto& data = in.as<MapData>();
  const int lane = __builtin_ctz(mask);  // one copy for the warp
  const uint8_t* from = map_bytes(warp, lane, Space::shared_cta, data.source, Access::read);
  uint8_t* to = map_bytes(warp, lane, Space::global, data.address, Access::write);
  touched(warp, lane, Access::read, from, Proxy::generic);
  std::memcpy(to, from, sizeof(TensorMapData));
  touched(warp, lane, Access::write, to, Proxy::generic);
  return Step::next;
}

void need_size(Decoder& decoder, const Statement& statement, const Operand& operand) {
  if (decoder.immediate(operand) != static_cast<int64_t>(sizeof(TensorMapData)))
    unsupported(statement, "a size other than 128");
}

void decode_copy(Decoder& decoder, const Statement& statement, Modifiers& mods, Instruction& instruction) {
  for (const char* part : {"global", "shared::cta", "tensormap::generic", "release"}) {
    if (!mods.take(part)) unsupported(statement, std::string("expected .") + part);
  }
  mods.take_one({"cta", "cluster", "gpu", "sys"}, -2);
  for (const char* part : {"sync", "aligned"}) {
    if (!mods.take(part)) unsupported(statement, std::string("expected .") + part);
  }
  mods.done();
  decoder.operand_count(statement, 3, 3);
  auto data = std::make_unique<MapData>();
  data->address = decoder.address(statement.operands[0]);
  data->source = decoder.address(statement.operands[1]);
  need_size(decoder, statement, statement.operands[2]);
  instruction.aligned = true;
  instruction.exec = run_copy;
  decoder.keep(instruction, std::move(data));
}

Step run_fence(Warp& warp, const Instruction& in, uint32_t mask) {
  Cluster& cluster = *warp.cta->cluster;
  for (int lane = 0; lane < kLanes; ++lane) {
    if ((mask >> lane & 1) == 0) continue;
    if (in.data != nullptr)
      map_bytes(warp, lane, Space::generic, in.as<MapData>().address, Access::read);  // must be a place for a map
    if (Observer* observer = cluster.grid->observer) {
      observer->sync({SyncKind::fence, warp.agent(lane), 0, 0, in.flags, 0, cluster.order++, warp.line});
    }
  }
  return Step::next;
}

void decode_fence(Decoder& decoder, const Statement& statement, Modifiers& mods, Instruction& instruction) {
  const bool acquire = mods.take_one({"release", "acquire"}, -2) == 1;
  mods.take_one({"cta", "cluster", "gpu", "sys"}, -2);
  mods.done();
  decoder.operand_count(statement, acquire ? 2 : 0, acquire ? 2 : 0);
  if (acquire) {
    auto data = std::make_unique<MapData>();
    data->address = decoder.address(statement.operands[0]);
    need_size(decoder, statement, statement.operands[1]);
    decoder.keep(instruction, std::move(data));
  }
  instruction.flags = acquire ? 1 : 0;
  instruction.exec = run_fence;
}

Step run_prefetch(Warp& warp, const Instruction& in, uint32_t mask) {
  for (int lane = 0; lane < kLanes; ++lane) {
    if ((mask >> lane & 1) == 0) continue;
    const uint8_t* bytes = map_bytes(warp, lane, Space::global, in.as<MapData>().address, Access::read);
    TensorMapData map;
    std::memcpy(&map, bytes, sizeof map);
    const std::string error = tensor_map_error(map);
    if (!error.empty()) fail_lane(lane, Fault::tensor_map, "prefetch: %s", error.c_str());
  }
  return Step::next;
}

void decode_prefetch(Decoder& decoder, const Statement& statement, Modifiers& mods, Instruction& instruction) {
  mods.done();
  decoder.operand_count(statement, 1, 1);
  auto data = std::make_unique<MapData>();
  data->address = decoder.address(statement.operands[0]);
  instruction.exec = run_prefetch;
  decoder.keep(instruction, std::move(data));
}

const Family families[] = {
    {"tensormap.replace", decode_replace},
    {"tensormap.cp_fenceproxy", decode_copy},
    {"fence.proxy.tensormap::generic", decode_fence},
    {"prefetch.tensormap", decode_prefetch},
    {"prefetch.const.tensormap", decode_prefetch},
    {"prefetch.param.tensormap", decode_prefetch},
};

}  // namespace
}  // namespace emu
