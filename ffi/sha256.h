// SHA-256 (FIPS 180-4) of a byte string: the name and the check of a cubin.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>

namespace jfa {

using Sha256Digest = std::array<uint8_t, 32>;

Sha256Digest Sha256(std::string_view bytes);
std::string Hex(const Sha256Digest& digest);

}  // namespace jfa
