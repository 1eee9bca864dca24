// Warp-wide address resolution with a fast path for accesses that fall into one buffer.
#pragma once

#include <algorithm>

#include "machine.h"

namespace emu {

/// Host pointers for the lanes of `mask`, with every check of resolve(). Reports the access to the grid's observer.
void locate(Warp& warp, Space space, const Address& address, uint32_t bytes, uint32_t mask, Access access, uint8_t** at);

}  // namespace emu
