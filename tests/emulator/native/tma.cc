#include "tma.h"

#include <algorithm>
#include <cstring>

#include "error.h"
#include "floats.h"

namespace emu {

uint32_t element_bytes(TmaType type) {
  switch (type) {
    case TmaType::u8: return 1;
    case TmaType::u16:
    case TmaType::f16:
    case TmaType::bf16: return 2;
    case TmaType::u64:
    case TmaType::s64:
    case TmaType::f64: return 8;
    default: return 4;
  }
}

const char* tma_type_name(TmaType type) {
  static const char* const names[] = {"u8",  "u16", "u32",  "s32",     "u64",  "s64",     "f16",
                                      "f32", "f64", "bf16", "f32.ftz", "tf32", "tf32.ftz"};
  return names[static_cast<size_t>(type)];
}

uint32_t TensorMapData::sum() const {  // FNV-1a
  const auto* bytes = reinterpret_cast<const uint8_t*>(this);
  uint32_t hash = 2166136261u;
  for (size_t i = 0; i < offsetof(TensorMapData, checksum); ++i) hash = (hash ^ bytes[i]) * 16777619u;
  return hash;
}

uint32_t TensorMapData::box_rows() const {
  uint32_t count = 1;
  for (int i = 1; i < rank; ++i) count *= box_elements(i);
  return count;
}

namespace {

template <class Array>
std::string list(const Array& values, int count) {
  std::string text = "[";
  for (int i = 0; i < count; ++i) text += (i > 0 ? ", " : "") + std::to_string(values[i]);
  return text + "]";
}

const char* swizzle_name(Swizzle swizzle) {
  static const char* const names[] = {"none", "32B", "64B", "128B", "128B with 32B atoms"};
  return names[static_cast<size_t>(swizzle)];
}

bool is_float_type(TmaType type) {
  return type == TmaType::f16 || type == TmaType::bf16 || type == TmaType::f64 || type == TmaType::f32 ||
         type >= TmaType::f32_ftz;
}

uint32_t swizzle_span(Swizzle swizzle) {
  switch (swizzle) {
    case Swizzle::none: return 0;
    case Swizzle::b32: return 32;
    case Swizzle::b64: return 64;
    default: return 128;
  }
}

}  // namespace

uint32_t TensorMapData::pitch() const { return std::max(row_bytes(), swizzle_span(swizzle)); }

uint32_t Tile::shared_bytes() const {
  const uint32_t all = (rows ? 4 : map.box_rows()) * map.pitch();
  return map.swizzle == Swizzle::none ? all : (all + 127) / 128 * 128;  // chunks move within lines of 128 bytes
}

std::string TensorMapData::describe() const {
  return std::string(tma_type_name(type)) + " " + list(dims, rank) + " box " + list(box, rank) + " swizzle " +
         swizzle_name(swizzle);
}

std::string tensor_map_error(const TensorMapData& map) {
  if (map.magic != TensorMapData::kMagic) return "these 128 bytes are not a tensor map";
  if (map.checksum != map.sum()) return "the tensor map was changed by ordinary writes (its checksum does not match)";
  if (map.rank < 1 || map.rank > kMaxRank) return format("rank is %d, expected 1 to 5", map.rank);
  if (map.type > TmaType::tf32_ftz) return format("element type is %d, expected 0 to 12", static_cast<int>(map.type));
  if (map.interleave != 0) return format("interleave is %d, expected none", map.interleave);
  if (map.swizzle > Swizzle::b128_atom_32b) {
    return format("swizzle is %d, expected none, 32B, 64B, 128B or 128B with 32B atoms", static_cast<int>(map.swizzle));
  }
  if (map.nan_fill > 1) return format("out-of-bounds fill is %d, expected 0 (zero) or 1 (NaN)", map.nan_fill);
  if (map.nan_fill != 0 && !is_float_type(map.type)) {
    return format("out-of-bounds fill is NaN, which element type %s does not have", tma_type_name(map.type));
  }
  if (map.base % 16 != 0)
    return format("global address is 0x%llx, expected a multiple of 16", static_cast<unsigned long long>(map.base));
  for (int i = 0; i < map.rank; ++i) {
    if (map.dims[i] == 0 || map.dims[i] > uint64_t{1} << 32) {
      return format("dimension %d is %llu, expected 1 to 2^32", i, static_cast<unsigned long long>(map.dims[i]));
    }
    if (map.box[i] == 0 || map.box[i] > 256) return format("box dimension %d is %u, expected 1 to 256", i, map.box[i]);
    if (map.element_strides[i] == 0 || map.element_strides[i] > 8) {
      return format("element stride %d is %u, expected 1 to 8", i, map.element_strides[i]);
    }
    if (i > 0 && (map.strides[i - 1] % 16 != 0 || map.strides[i - 1] >= uint64_t{1} << 40)) {
      return format("stride of dimension %d is %llu bytes, expected a multiple of 16 below 2^40", i,
                    static_cast<unsigned long long>(map.strides[i - 1]));
    }
  }
  if (map.row_bytes() % 16 != 0)
    return format("box dimension 0 has %u bytes, expected a multiple of 16", map.row_bytes());
  const uint32_t span = swizzle_span(map.swizzle);
  if (span != 0 && map.row_bytes() > span) {
    return format("box dimension 0 has %u bytes, expected at most the swizzle's %u", map.row_bytes(), span);
  }
  return "";
}

bool Tile::has_negative() const {
  const int count = rows ? 5 : map.rank;
  return std::any_of(coords.begin(), coords.begin() + count, [](int32_t c) { return c < 0; });
}

namespace {

// The part of a row of `bytes` at unswizzled `offset`, in pieces that swizzling leaves whole.
void visit_row(const TensorMapData& map, uint32_t offset, uint32_t bytes, uint64_t global, bool inside,
               const std::function<void(const TileRun&)>& visit) {
  while (bytes > 0) {
    const uint32_t piece = map.swizzle == Swizzle::none ? bytes : std::min(bytes, 16 - offset % 16);
    visit({swizzled(offset, map.swizzle), piece, inside ? global : 0, inside});
    offset += piece;
    bytes -= piece;
    global += piece;
  }
}

// One row along dimension 0, whose other coordinates are inside the tensor or not.
void walk_row(const TensorMapData& map, uint64_t elements, int64_t column, uint64_t row_address, bool row_inside,
              uint32_t offset,
              const std::function<void(const TileRun&)>& visit) {
  const uint32_t size = element_bytes(map.type);
  const int64_t count = map.box_elements(0);
  const int64_t end = static_cast<int64_t>(elements);
  int64_t first = std::clamp<int64_t>(-column, 0, count);
  int64_t last = std::clamp<int64_t>(end - column, first, count);
  if (!row_inside) first = last = count;
  const auto bytes = [&](int64_t elements) { return static_cast<uint32_t>(elements) * size; };
  visit_row(map, offset, bytes(first), 0, false, visit);
  visit_row(map, offset + bytes(first), bytes(last - first),
            row_address + static_cast<uint64_t>((column + first) * size), true, visit);
  visit_row(map, offset + bytes(last), bytes(count - last), 0, false, visit);
}

}  // namespace

void Tile::walk(uint32_t base, const std::function<void(const TileRun&)>& visit) const {
  const uint32_t pitch = map.pitch();
  if (rows) {
    for (int i = 0; i < 4; ++i) {
      const int64_t row = coords[static_cast<size_t>(i) + 1];
      const bool inside = row >= 0 && row < static_cast<int64_t>(map.dims[1]);
      const uint64_t address = map.base + (inside ? static_cast<uint64_t>(row) * map.strides[0] : 0);
      walk_row(map, row_elements(), coords[0], address, inside, base + static_cast<uint32_t>(i) * pitch, visit);
    }
    return;
  }
  std::array<uint32_t, kMaxRank> index{};
  uint32_t offset = base;
  for (;;) {
    bool inside = true;
    uint64_t address = map.base;
    for (int i = 1; i < map.rank; ++i) {
      const int64_t c = static_cast<int64_t>(coords[i]) + static_cast<int64_t>(index[i]) * map.element_strides[i];
      inside = inside && c >= 0 && c < static_cast<int64_t>(map.dims[i]);
      address += static_cast<uint64_t>(c) * map.strides[i - 1];
    }
    walk_row(map, row_elements(), coords[0], address, inside, offset, visit);
    offset += pitch;
    int i = 1;
    while (i < map.rank && ++index[i] == map.box_elements(i)) index[i++] = 0;
    if (i >= map.rank) return;
  }
}

void convert_loaded(TmaType type, uint8_t* data, uint32_t bytes) {
  if (type < TmaType::f32_ftz) return;
  for (uint32_t i = 0; i + 4 <= bytes; i += 4) {
    uint32_t bits;
    std::memcpy(&bits, data + i, 4);
    if (type != TmaType::tf32) bits = fp::flush_f32(bits);
    const bool finite = (bits & 0x7f800000) != 0x7f800000;  // infinities and NaNs pass as they are
    if (type != TmaType::f32_ftz && finite) bits = fp::encode_tf32(fp::as_float(bits), fp::Round::rn);
    std::memcpy(data + i, &bits, 4);
  }
}

void fill_outside(const TensorMapData& map, uint8_t* data, uint32_t bytes) {
  if (map.nan_fill == 0) {
    std::memset(data, 0, bytes);
    return;
  }
  for (uint32_t i = 0; i < bytes; ++i) data[i] = i % 2 == 0 ? 0xf7 : 0x7f;  // 0x7ff7 in every half word
}

// ---- reductions ---------------------------------------------------------------------------------

uint32_t element_bytes(ReduceType type) {
  switch (type) {
    case ReduceType::f16:
    case ReduceType::bf16: return 2;
    case ReduceType::u32:
    case ReduceType::s32:
    case ReduceType::f32:
    case ReduceType::b32: return 4;
    default: return 8;
  }
}

const char* reduction_name(Reduction op) {
  static const char* const names[] = {"add", "min", "max", "inc", "dec", "and", "or", "xor"};
  return names[static_cast<size_t>(op)];
}

const char* reduce_type_name(ReduceType type) {
  static const char* const names[] = {"u32", "s32", "u64", "s64", "f16", "bf16", "f32", "f64", "b32", "b64"};
  return names[static_cast<size_t>(type)];
}

bool reducible(Reduction op, ReduceType type) {
  switch (op) {
    case Reduction::add: return type != ReduceType::s64 && type != ReduceType::b32 && type != ReduceType::b64;
    case Reduction::min:
    case Reduction::max: return type <= ReduceType::bf16;
    case Reduction::inc:
    case Reduction::dec: return type == ReduceType::u32;
    default: return type == ReduceType::b32 || type == ReduceType::b64;
  }
}

bool reduce_type(TmaType type, Reduction op, ReduceType* out) {
  const bool bits = op >= Reduction::bit_and;
  switch (type) {
    case TmaType::u32: *out = bits ? ReduceType::b32 : ReduceType::u32; break;
    case TmaType::s32: *out = bits ? ReduceType::b32 : ReduceType::s32; break;
    case TmaType::u64: *out = bits ? ReduceType::b64 : ReduceType::u64; break;
    case TmaType::s64: *out = bits ? ReduceType::b64 : ReduceType::s64; break;
    case TmaType::f16: *out = ReduceType::f16; break;
    case TmaType::bf16: *out = ReduceType::bf16; break;
    case TmaType::f32: *out = ReduceType::f32; break;
    default: return false;
  }
  return reducible(op, *out);
}

namespace {

template <class T>
T combine(Reduction op, T d, T s) {
  switch (op) {
    case Reduction::add: return static_cast<T>(d + s);
    case Reduction::min: return std::min(d, s);
    case Reduction::max: return std::max(d, s);
    case Reduction::inc: return d >= s ? 0 : static_cast<T>(d + 1);
    case Reduction::dec: return d == 0 || d > s ? s : static_cast<T>(d - 1);
    case Reduction::bit_and: return d & s;
    case Reduction::bit_or: return d | s;
    case Reduction::bit_xor: return d ^ s;
  }
  return d;
}

uint16_t combine_half(Reduction op, uint16_t d, uint16_t s, bool bf16) {
  if (op == Reduction::add) return static_cast<uint16_t>(fp::reduce_add_half(d, s, bf16));
  fp::HalfMode mode;
  mode.bf16 = bf16;
  fp::MinMax choice;
  choice.is_max = op == Reduction::max;
  const uint32_t a = d, b = s;
  uint32_t result;
  fp::min_max_half(&a, &b, nullptr, &result, 1, mode, choice);
  return static_cast<uint16_t>(result);
}

uint64_t add_f64(uint64_t d, uint64_t s) { return fp::as_bits64(fp::as_double(d) + fp::as_double(s)); }

template <class T, class F>
void for_elements(uint8_t* destination, const uint8_t* source, uint32_t bytes, F&& f) {
  for (uint32_t i = 0; i + sizeof(T) <= bytes; i += sizeof(T)) {
    T d, s;
    std::memcpy(&d, destination + i, sizeof(T));
    std::memcpy(&s, source + i, sizeof(T));
    d = f(d, s);
    std::memcpy(destination + i, &d, sizeof(T));
  }
}

}  // namespace

void reduce(Reduction op, ReduceType type, uint8_t* destination, const uint8_t* source, uint32_t bytes) {
  switch (type) {
    case ReduceType::u32:
    case ReduceType::b32:
      return for_elements<uint32_t>(destination, source, bytes,
                                    [=](uint32_t d, uint32_t s) { return combine(op, d, s); });
    case ReduceType::u64:
    case ReduceType::b64:
      return for_elements<uint64_t>(destination, source, bytes,
                                    [=](uint64_t d, uint64_t s) { return combine(op, d, s); });
    case ReduceType::s32:
      return for_elements<uint32_t>(destination, source, bytes, [=](uint32_t d, uint32_t s) {
        if (op == Reduction::add) return d + s;  // wraps
        return static_cast<uint32_t>(combine(op, static_cast<int32_t>(d), static_cast<int32_t>(s)));
      });
    case ReduceType::s64:
      return for_elements<uint64_t>(destination, source, bytes, [=](uint64_t d, uint64_t s) {
        return static_cast<uint64_t>(combine(op, static_cast<int64_t>(d), static_cast<int64_t>(s)));
      });
    case ReduceType::f16:
    case ReduceType::bf16:
      return for_elements<uint16_t>(destination, source, bytes, [=](uint16_t d, uint16_t s) {
        return combine_half(op, d, s, type == ReduceType::bf16);
      });
    case ReduceType::f32:
      return for_elements<uint32_t>(destination, source, bytes,
                                    [](uint32_t d, uint32_t s) { return fp::reduce_add_f32(d, s, true); });
    case ReduceType::f64: return for_elements<uint64_t>(destination, source, bytes, add_f64);
  }
}

}  // namespace emu

// ---- C interface -------------------------------------------------------------------------------

/// Fills the 128 bytes at `out` as cuTensorMapEncodeTiled would. Returns 0, or 1 with a text in `message` that names
/// the bad argument. `strides` has rank - 1 entries.
extern "C" __attribute__((visibility("default"))) int emu_tensor_map(
    char* out, int type, int rank, uint64_t base, const uint64_t* dims, const uint64_t* strides, const uint32_t* box,
    const uint32_t* element_strides, int swizzle, int nan_fill, char* message, uint64_t message_bytes) {
  using namespace emu;
  std::string error;
  TensorMapData map{};
  map.magic = TensorMapData::kMagic;
  map.base = base;
  map.dims.fill(1);
  map.box.fill(1);
  map.element_strides.fill(1);
  if (rank < 1 || rank > kMaxRank) error = format("rank is %d, expected 1 to 5", rank);
  for (int i = 0; i < rank && error.empty(); ++i) {
    map.dims[i] = dims[i];
    if (i > 0) map.strides[i - 1] = strides[i - 1];
    const uint32_t step = i > 0 ? element_strides[i] : 1;  // the first one is ignored
    if (step == 0 || step > 8) error = format("element stride %d is %u, expected 1 to 8", i, step);
    map.box[i] = static_cast<uint16_t>(std::min(box[i], 65535u));
    map.element_strides[i] = static_cast<uint8_t>(step);
  }
  map.type = static_cast<TmaType>(type);
  map.rank = static_cast<uint8_t>(rank);
  map.swizzle = static_cast<Swizzle>(swizzle);
  map.nan_fill = static_cast<uint8_t>(nan_fill);
  map.seal();
  if (error.empty()) error = tensor_map_error(map);
  if (error.empty()) {
    std::memcpy(out, &map, sizeof map);
    return 0;
  }
  std::strncpy(message, error.c_str(), message_bytes - 1);
  message[message_bytes - 1] = 0;
  return 1;
}
