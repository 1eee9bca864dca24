// The matrix-multiply library for Python tests (ctypes): descriptors, operand layouts and arithmetic without a machine.
#include <algorithm>
#include <cstdio>
#include <cstring>
#include <exception>

#include "error.h"
#include "mma.h"
#include "mma_operands.h"

#define EMU_EXPORT extern "C" __attribute__((visibility("default")))

namespace {

using namespace emu::mma;

// Runs `body`; 0, or 1 with the verdict "fault: message" in `error`.
template <class Body>
int guarded(char* error, size_t error_size, Body body) {
  try {
    body();
    return 0;
  } catch (const emu::Verdict& verdict) {
    std::snprintf(error, error_size, "%s: %s", emu::fault_name(verdict.fault), verdict.message.c_str());
  } catch (const std::exception& other) {
    std::snprintf(error, error_size, "internal: %s", other.what());
  }
  return 1;
}

}  // namespace

/// D[m][n] += A[m][k] * B[n][k]; rows of A and B are contiguous containers, D is row-major. `inner_a` chooses which of
/// the two the vector loop walks.
EMU_EXPORT int emu_mma_multiply(int element_a, int element_b, int accumulator, int m, int n, int k, const uint8_t* a,
                                const uint8_t* b, uint32_t* d, int negate_a, int negate_b, int read_c, int scale_c,
                                int saturate, int portable, int inner_a, int window, int fraction_bits, char* error, size_t error_size) {
  return guarded(error, error_size, [&] {
    const auto ea = static_cast<Element>(element_a), eb = static_cast<Element>(element_b);
    using Side = Multiplicand::Side;
    const Multiplicand left(inner_a ? Side::inner : Side::outer, ea, negate_a, a, m, k, k * container_bits(ea) / 8);
    const Multiplicand right(inner_a ? Side::outer : Side::inner, eb, negate_b, b, n, k, k * container_bits(eb) / 8);
    Options options;
    options.accumulator = static_cast<Accumulator>(accumulator);
    options.read_c = read_c;
    options.scale_c = scale_c;
    options.saturate = saturate;
    options.portable = portable;
    options.precision = {window, fraction_bits};
    const int outer = inner_a ? n : m, inner = inner_a ? m : n;
    std::vector<uint32_t> work(static_cast<size_t>(outer) * inner);
    std::vector<uint32_t*> rows(outer);
    for (int o = 0; o < outer; ++o) {
      rows[o] = work.data() + static_cast<size_t>(o) * inner;
      for (int i = 0; i < inner; ++i) rows[o][i] = inner_a ? d[i * n + o] : d[o * n + i];
    }
    if (inner_a) {
      multiply_accumulate(right, left, 0, inner, rows.data(), options);
    } else {
      multiply_accumulate(left, right, 0, inner, rows.data(), options);
    }
    for (int o = 0; o < outer; ++o) {
      for (int i = 0; i < inner; ++i) (inner_a ? d[i * n + o] : d[o * n + i]) = rows[o][i];
    }
  });
}

/// The operand that a shared-memory descriptor names, as `rows` rows of 32 bytes.
EMU_EXPORT int emu_mma_gather(uint64_t descriptor, int element, int mn_major, int rows, const uint8_t* shared,
                              uint32_t shared_bytes, uint8_t* packed, char* error, size_t error_size) {
  return guarded(error, error_size, [&] {
    const SharedOperand operand(decode_shared_descriptor(descriptor), static_cast<Element>(element), mn_major, rows, "A");
    for (const uint32_t unit : operand.units) {
      if (unit + kUnitBytes > shared_bytes) emu::fail(emu::Fault::out_of_bounds, "unit at 0x%x", unit);
    }
    const std::vector<uint8_t> gathered = operand.gather(shared);
    std::memcpy(packed, gathered.data(), gathered.size());
  });
}

/// fields: a, b, d, saturate, negate_a, negate_b, mn_major_a, mn_major_b, m, n, k, max_shift, layout letter, columns.
EMU_EXPORT int emu_mma_instruction(uint32_t bits, int kind, int cta_group, int ws, int* fields, char* error,
                                   size_t error_size) {
  return guarded(error, error_size, [&] {
    const InstructionDescriptor d = decode_instruction_descriptor(bits, static_cast<Kind>(kind), cta_group, ws);
    const int values[] = {static_cast<int>(d.a), static_cast<int>(d.b), static_cast<int>(d.d), d.saturate, d.negate_a,
                          d.negate_b, d.mn_major_a, d.mn_major_b, d.m, d.n, d.k(), d.max_shift,
                          layout_letter(d, cta_group, ws), accumulator_columns(d, cta_group, ws)};
    std::copy(std::begin(values), std::end(values), fields);
  });
}

/// Lane and column of every D[row][n] of one CTA: out[(row * n_count + n) * 2 + {0, 1}]. Rows not covered keep -1.
EMU_EXPORT int emu_mma_place(uint32_t bits, int kind, int cta_group, int ws, int lane, int* out, char* error,
                             size_t error_size) {
  return guarded(error, error_size, [&] {
    const InstructionDescriptor d = decode_instruction_descriptor(bits, static_cast<Kind>(kind), cta_group, ws);
    for (const PlacedBlock& block : place_accumulator(d, cta_group, ws, lane)) {
      for (int r = 0; r < block.rows; ++r) {
        for (int n = 0; n < block.columns; ++n) {
          int* at = out + (static_cast<size_t>(block.row + r) * d.n + block.n + n) * 2;
          at[0] = block.lane + r;
          at[1] = n;
        }
      }
    }
  });
}

EMU_EXPORT int emu_mma_has_vector_path() { return has_vector_path(); }
