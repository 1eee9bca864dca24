#include "tensor_map.h"

#include <iterator>

namespace jfa {
namespace {

// Indexed by ElementType.
constexpr cu::TensorMapDataType kDataTypes[] = {
    cu::kTensorMapBFloat16, cu::kTensorMapFloat16, cu::kTensorMapFloat32, cu::kTensorMapInt32,  cu::kTensorMapUint8,
    cu::kTensorMapFloat64,  cu::kTensorMapInt64,   cu::kTensorMapUint32,  cu::kTensorMapUint16, cu::kTensorMapUint64};
static_assert(std::size(kDataTypes) == static_cast<size_t>(ElementType::kCount));

// The plan's other choices have the driver's numbers.
static_assert(static_cast<int>(Swizzle::k128B) == cu::kSwizzle128B);
static_assert(static_cast<int>(L2Promotion::k256B) == cu::kL2_256B);
static_assert(static_cast<int>(OutOfBoundsFill::kNan) == cu::kOobFillNanRequestZeroFma);

}  // namespace

cu::Result EncodeTensorMap(const cu::Driver& driver, const TensorMap& map, void* address, cu::TensorMap* out) {
  return driver.TensorMapEncodeTiled(
      out, kDataTypes[static_cast<size_t>(map.element_type)], map.rank, address, map.dims.data(),
      map.strides_bytes.data(), map.box.data(), map.element_strides.data(), cu::kInterleaveNone,
      static_cast<cu::TensorMapSwizzle>(map.swizzle), static_cast<cu::TensorMapL2Promotion>(map.l2_promotion),
      static_cast<cu::TensorMapFloatOobFill>(map.fill));
}

}  // namespace jfa
