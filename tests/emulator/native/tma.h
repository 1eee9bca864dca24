// Tensor maps and the walk of a TMA tile, without any machine around them.
//
// A real tensor map is an opaque 128-byte object; this is a private encoding of the same content, with a magic number
// and a checksum, so that anything else in its place is noticed. The rules are those of cuTensorMapEncodeTiled. Tile
// semantics: PTX ISA 5.5 and measurements on an H200 (out-of-bounds elements are zero or 0x7ff77ff7, never touch memory
// when stored, and count as transferred bytes).
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <string>

namespace emu {

/// Element types, numbered as CUtensorMapDataType. The packed sub-byte types (13 and above) are not implemented.
enum class TmaType : uint8_t { u8, u16, u32, s32, u64, s64, f16, f32, f64, bf16, f32_ftz, tf32, tf32_ftz };
uint32_t element_bytes(TmaType type);
const char* tma_type_name(TmaType type);

/// Numbered as CUtensorMapSwizzle. The last exchanges 32-byte chunks (the layout of transposed tf32 operands).
enum class Swizzle : uint8_t { none, b32, b64, b128, b128_atom_32b };

constexpr int kMaxRank = 5;

struct TensorMapData {
  static constexpr uint64_t kMagic = 0x70616d726f736e74;
  uint64_t magic;
  uint64_t base;
  std::array<uint64_t, kMaxRank> dims;         // elements
  std::array<uint64_t, kMaxRank - 1> strides;  // bytes, of dimensions 1 and up
  std::array<uint16_t, kMaxRank> box;          // elements traversed
  std::array<uint8_t, kMaxRank> element_strides;
  TmaType type;
  uint8_t rank;
  uint8_t interleave;  // 0: the only one implemented
  Swizzle swizzle;
  uint8_t nan_fill;
  uint8_t l2_promotion;  // no effect
  uint8_t reserved[15];
  uint32_t checksum;  // of everything before it

  uint32_t sum() const;
  void seal() { checksum = sum(); }
  /// Elements that the box has in shared memory along a dimension. Dimension 0 has no element stride.
  uint32_t box_elements(int dimension) const {
    if (dimension == 0) return box[0];
    return (box[dimension] + element_strides[dimension] - 1) / element_strides[dimension];
  }
  uint32_t row_bytes() const { return box_elements(0) * element_bytes(type); }
  /// Distance of rows in shared memory: a row narrower than the swizzle's span still takes the span (H200).
  uint32_t pitch() const;
  uint32_t box_rows() const;
  /// Bytes of a whole box, which is what a load adds to complete_tx.
  uint32_t box_bytes() const { return box_rows() * row_bytes(); }
  /// "bf16 [1024, 64] box [64, 128] swizzle 128B"
  std::string describe() const;
};
static_assert(sizeof(TensorMapData) == 128);

/// Empty if the map is legal; otherwise what is wrong, naming the field, its value and what was expected.
std::string tensor_map_error(const TensorMapData& map);

/// Byte offset in shared memory after swizzling an absolute offset.
inline uint32_t swizzled(uint32_t offset, Swizzle swizzle) {
  switch (swizzle) {
    case Swizzle::none: return offset;
    case Swizzle::b32: return offset ^ ((offset >> 7 & 1) << 4);
    case Swizzle::b64: return offset ^ ((offset >> 7 & 3) << 4);
    case Swizzle::b128: return offset ^ ((offset >> 7 & 7) << 4);
    case Swizzle::b128_atom_32b: return offset ^ ((offset >> 7 & 3) << 5);
  }
  return offset;
}

/// A run of bytes of a tile, contiguous in global and in shared memory.
struct TileRun {
  uint32_t shared;  // offset, swizzled
  uint32_t bytes;
  uint64_t global;  // address; 0 outside the tensor
  bool inside;
};

/// Tile of a map at coordinates (element units, dimension 0 first), or with `rows` the four rows coords[1..4] of a 2D
/// map at column coords[0].
struct Tile {
  TensorMapData map;
  std::array<int32_t, kMaxRank> coords{};
  bool rows = false;
  /// Stores and reductions of rank 2 and up take in the whole 16 bytes that the end of a row lies in (H200).
  bool whole_chunks = false;

  /// Elements of dimension 0 that count as inside the tensor.
  uint64_t row_elements() const {
    const uint64_t chunk = 16 / element_bytes(map.type);
    return whole_chunks ? (map.dims[0] + chunk - 1) / chunk * chunk : map.dims[0];
  }
  uint32_t bytes() const { return rows ? 4 * map.row_bytes() : map.box_bytes(); }
  /// Bytes of shared memory from the base on that the tile may touch.
  uint32_t shared_bytes() const;
  /// Calls visit for every run of the tile placed at shared offset `base`, in ascending order of unswizzled offsets.
  void walk(uint32_t base, const std::function<void(const TileRun&)>& visit) const;
  /// True if a coordinate is negative (which stores do not allow).
  bool has_negative() const;
};

/// What a load does to elements on their way (tf32 rounds, ftz types flush); in place.
void convert_loaded(TmaType type, uint8_t* data, uint32_t bytes);
/// Fills with the value of elements outside the tensor.
void fill_outside(const TensorMapData& map, uint8_t* data, uint32_t bytes);

// ---- reductions ---------------------------------------------------------------------------------

enum class Reduction : uint8_t { add, min, max, inc, dec, bit_and, bit_or, bit_xor };
/// Element types of reductions; the float adds round to nearest even, f32's flushes subnormals, f16's and bf16's do
/// not.
enum class ReduceType : uint8_t { u32, s32, u64, s64, f16, bf16, f32, f64, b32, b64 };
uint32_t element_bytes(ReduceType type);
const char* reduction_name(Reduction op);
const char* reduce_type_name(ReduceType type);
/// True if PTX defines the reduction of global memory for the type.
bool reducible(Reduction op, ReduceType type);
/// destination[i] = op(destination[i], source[i]). The caller has checked reducible().
void reduce(Reduction op, ReduceType type, uint8_t* destination, const uint8_t* source, uint32_t bytes);
/// The reduction type of a tensor map's elements for an operation; false if there is none.
bool reduce_type(TmaType type, Reduction op, ReduceType* out);

}  // namespace emu
