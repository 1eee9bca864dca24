"""Tiles of the Hopper kernels: what is fixed when they are compiled, and the classes of head dims they come in."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from jax_fa_blackwell.plan.slices import round_up
from jax_fa_blackwell.plan.spec import AttentionSpec
from jax_fa_blackwell.plan.target import get_target

ARCH = "sm_90a"
TILE_ROWS = 64
"""Rows of a warpgroup's products."""
WARPGROUP_THREADS = 128
SLICE = 64
"""Head dims of a slice: one row of the 128-byte swizzle in 16-bit elements."""
SHARED_BYTES = get_target(ARCH).shared_bytes - 1024
"""Dynamic shared memory that a block may have: cubins of this toolchain for sm_90a ask for 1024 static bytes."""
_SPARE_REGISTERS = 24  # addresses, counters, statistics of the rows and what is in flight


class _Warpgroups:
    """What follows from the number of consumer warpgroups of 64 rows."""

    warpgroups: int
    REGISTERS: ClassVar[dict[int, tuple[int, int]]]

    def check_warpgroups(self):
        """ValueError unless registers are known for so many."""
        if self.warpgroups not in self.REGISTERS:
            raise ValueError(f"warpgroups must be one of {', '.join(map(str, self.REGISTERS))}; got {self.warpgroups}")

    @property
    def rows(self) -> int:
        """Rows of a block."""
        return self.warpgroups * TILE_ROWS

    @property
    def threads(self) -> int:
        """Threads of a block: consumers and one producer warpgroup."""
        return 128 * (self.warpgroups + 1)

    @property
    def consumer_registers(self) -> int:
        """Registers of a consumer's thread."""
        return self.REGISTERS[self.warpgroups][0]

    @property
    def producer_registers(self) -> int:
        """Registers of a producer's thread."""
        return self.REGISTERS[self.warpgroups][1]


@dataclasses.dataclass(frozen=True)
class ForwardTile(_Warpgroups):
    """The compile-time sizes of the forward kernel.

    Attributes:
      head_dim: class of the head dim: the products' sums are so long.
      value_dim: class of the value head dim: the accumulator is so wide.
      columns: keys of a KV block.
      warpgroups: consumer warpgroups of 64 query rows.
      takes_turns: whether only one warpgroup at a time issues products, so that the others do their softmax.
    """

    head_dim: int
    value_dim: int
    columns: int
    warpgroups: int
    takes_turns: bool = True

    HEADER_BYTES: ClassVar[int] = 1024
    REGISTERS: ClassVar = {2: (240, 24), 3: (160, 32)}
    """Registers of a consumer's and of a producer's thread by the number of consumer warpgroups."""

    def __post_init__(self):
        """The legality rule: instruction shapes, registers and shared memory."""
        if self.head_dim % 16 or self.value_dim % 8 or self.columns % 16 or max(self.columns, self.value_dim) > 256:
            raise ValueError(f"forward tile has no wgmma shape: {self}")
        self.check_warpgroups()
        if self.registers > self.consumer_registers:
            raise ValueError(f"forward tile needs {self.registers} registers of {self.consumer_registers}: {self}")
        if self.stages < 2:
            raise ValueError(f"forward tile has shared memory for {self.stages} stages and needs 2: {self}")

    @property
    def registers(self) -> int:
        """Registers that a consumer's thread needs at least: O, the next scores, and P in 16 bits."""
        return self.value_dim // 2 + self.columns // 2 + self.columns // 4 + _SPARE_REGISTERS

    @property
    def key_slices(self) -> int:
        """Slices of the head dim."""
        return -(-self.head_dim // SLICE)

    @property
    def value_slices(self) -> int:
        """Slices of the value head dim."""
        return -(-self.value_dim // SLICE)

    @property
    def query_bytes(self) -> int:
        """Shared memory of a warpgroup's query rows."""
        return self.key_slices * TILE_ROWS * SLICE * 2

    @property
    def slice_bytes(self) -> int:
        """Shared memory of a slice of a block."""
        return self.columns * SLICE * 2

    @property
    def key_bytes(self) -> int:
        """Shared memory of a block of keys."""
        return self.key_slices * self.slice_bytes

    @property
    def value_bytes(self) -> int:
        """Shared memory of a block of values."""
        return self.value_slices * self.slice_bytes

    @property
    def stages(self) -> int:
        """Blocks of keys, and of values, in shared memory; more than four help nothing."""
        rest = SHARED_BYTES - self.HEADER_BYTES - self.warpgroups * self.query_bytes
        return min(rest // (self.key_bytes + self.value_bytes), 4)

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block."""
        return (
            self.HEADER_BYTES + self.warpgroups * self.query_bytes + self.stages * (self.key_bytes + self.value_bytes)
        )


FORWARD_TILES = (
    ForwardTile(64, 64, 128, 3),
    ForwardTile(80, 80, 96, 3),
    ForwardTile(96, 96, 96, 3),
    ForwardTile(128, 128, 128, 2, takes_turns=False),
    ForwardTile(160, 160, 112, 2),
    ForwardTile(192, 128, 128, 2),
    ForwardTile(192, 192, 96, 2),
    ForwardTile(256, 256, 64, 2),
)
"""The classes of head dims, the cheapest first; a call takes the first that holds both of its head dims.

Those of 64, 128, 192 and 256 are the fastest of ``benchmarks/hopper_tiles.py`` on an H200.
"""

STATISTIC_STAGES = 2
"""Blocks whose LSE and delta are in shared memory, where they belong to columns."""


@dataclasses.dataclass(frozen=True)
class BackwardTile(_Warpgroups):
    """The compile-time sizes of one pass of the backward kernel.

    Attributes:
      head_dim, value_dim: classes of the head dims: the products' sums are so long, the accumulators so wide.
      columns: columns of a block.
      transposed: rows are keys (for dK and dV) or queries (for dQ).
      has_c1: whether dV is computed.
      has_c2: whether dQ, or transposed dK, is computed.
      warpgroups: consumer warpgroups of 64 rows.
      adds_dq: transposed only: whether dQ is added in global memory.
      caps: whether it can soft-cap scores, which takes registers.
    """

    head_dim: int
    value_dim: int
    columns: int
    transposed: bool
    has_c1: bool
    has_c2: bool
    warpgroups: int = 2
    adds_dq: bool = False
    caps: bool = True

    BARRIER_BYTES: ClassVar[int] = 384
    REGISTERS: ClassVar = {2: (232, 40), 3: (160, 32)}
    """As for the forward."""

    def __post_init__(self):
        """The legality rule: instruction shapes, registers and shared memory."""
        if self.head_dim % 16 or self.value_dim % 16 or self.columns % 16:
            raise ValueError(f"backward tile has no wgmma shape: {self}")
        if max(self.head_dim, self.value_dim, self.columns) > 256:
            raise ValueError(f"backward tile has no wgmma shape: {self}")
        self.check_warpgroups()
        if not (self.has_c1 or self.has_c2) or (self.has_c1 and not self.transposed):
            raise ValueError(f"a backward pass computes dQ, or transposed dK, dV or both; got {self}")
        if self.adds_dq and not (self.has_c1 and self.has_c2 and self.warpgroups == 2 and self.columns in (64, 128)):
            raise ValueError(f"a pass that adds dQ has dK and dV, 2 warpgroups, and 64 or 128 columns; got {self}")
        if self.registers > self.consumer_registers:
            raise ValueError(f"backward tile needs {self.registers} registers of {self.consumer_registers}: {self}")
        if self.slots < 3:
            raise ValueError(f"backward tile has shared memory for {self.slots} slots and needs 3: {self}")

    @property
    def consumer_registers(self) -> int:
        """Registers of a consumer's thread."""
        return super().consumer_registers + (8 if self._is_tight else 0)

    @property
    def producer_registers(self) -> int:
        """Registers of a producer's thread."""
        return super().producer_registers - (16 if self._is_tight else 0)

    @property
    def _is_tight(self) -> bool:
        # A producer whose blocks have 64 columns spares what the products of one such block need.
        return self.adds_dq and self.head_dim > 96

    @property
    def registers(self) -> int:
        """Registers that a consumer's thread needs at least: the results, S and dP, and P in 16 bits."""
        results = (self.value_dim if self.has_c1 else 0) + (self.head_dim if self.has_c2 else 0)
        scores = self.part_columns * ((2 if self.has_c2 else 1) + self.looks_ahead)
        return (results + scores) // 2 + (self.part_columns // 4 if self.has_c1 else 0) + _SPARE_REGISTERS

    @property
    def score_slices(self) -> int:
        """Slices of the head dim."""
        return -(-self.head_dim // SLICE)

    @property
    def value_slices(self) -> int:
        """Slices of the value head dim."""
        return -(-self.value_dim // SLICE)

    @property
    def a1_bytes(self) -> int:
        """Shared memory of a warpgroup's rows of Q, or transposed of K."""
        return self.score_slices * TILE_ROWS * SLICE * 2

    @property
    def a2_bytes(self) -> int:
        """Shared memory of a warpgroup's rows of dO, or transposed of V; 0 where dP is not computed."""
        return self.value_slices * TILE_ROWS * SLICE * 2 if self.has_c2 else 0

    @property
    def slice_bytes(self) -> int:
        """Shared memory of a slice of a part."""
        return self.part_columns * SLICE * 2

    @property
    def slot_bytes(self) -> int:
        """Shared memory of a slot: a part of a block of either operand of the columns."""
        return max(self.score_slices, self.value_slices) * self.slice_bytes

    @property
    def statistic_bytes(self) -> int:
        """Shared memory of LSE and delta of a block's columns."""
        return 2 * 4 * self.columns if self.transposed else 0

    @property
    def weight_bytes(self) -> int:
        """Shared memory of dS of a block, from where dQ is made."""
        return self.rows * self.columns * 2 if self.adds_dq else 0

    @property
    def sum_bytes(self) -> int:
        """Shared memory of dQ of a block, from where it is added."""
        return 4 * self.columns * self.head_dim if self.adds_dq else 0

    @property
    def holds_rows(self) -> bool:
        """Whether the rows of K and V stay in registers, which spares shared memory the reading of them."""
        return self.adds_dq and self.head_dim + self.value_dim <= 128

    @property
    def begins_early(self) -> bool:
        """Whether the first scores of a block are multiplied during the block before, which takes a slot more."""
        return self.adds_dq and self.slots > 2 * self.parts

    @property
    def weight_stages(self) -> int:
        """Blocks whose dS is in shared memory: two, so that a block need not wait for the one before to be read."""
        return 2 if self.parts == 1 or self.head_dim <= SLICE else 1

    @property
    def parts(self) -> int:
        """Parts that a block's scores are computed in."""
        return self.columns // TILE_ROWS if self.adds_dq else 1

    @property
    def looks_ahead(self) -> bool:
        """Whether the scores of the next part are multiplied early; else there are not enough registers."""
        return self.parts > 1 and 128 < self.head_dim + self.value_dim <= 160

    @property
    def part_columns(self) -> int:
        """Columns of a part."""
        return self.columns // self.parts

    @property
    def dq_columns(self) -> int:
        """Head dims of dQ that a warpgroup multiplies: half of them, if its queries are all of the block's."""
        return self.head_dim // (self.warpgroups if self.parts == 1 else 1)

    @property
    def header_bytes(self) -> int:
        """Shared memory before the operands: barriers and statistics."""
        return round_up(self.BARRIER_BYTES + STATISTIC_STAGES * self.statistic_bytes, 1024)

    @property
    def slots(self) -> int:
        """Parts of blocks of columns in shared memory; more than six, or eight of two parts, help nothing."""
        most = 8 if self.parts > 1 else 4 if self.adds_dq else 6
        return min((SHARED_BYTES - self.fixed_bytes) // self.slot_bytes, most)

    @property
    def fixed_bytes(self) -> int:
        """Shared memory of everything but the slots."""
        rows = self.warpgroups * (self.a1_bytes + self.a2_bytes)
        return self.header_bytes + rows + self.weight_stages * self.weight_bytes + self.sum_bytes

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block."""
        return self.fixed_bytes + self.slots * self.slot_bytes


def _passes(dim: int, query_columns: int, *key_columns: int) -> tuple[BackwardTile, ...]:
    """dQ, then dK and dV in one pass or, given two numbers of columns, dK and dV apart."""
    passes = [BackwardTile(dim, dim, query_columns, transposed=False, has_c1=False, has_c2=True)]
    if len(key_columns) == 1:
        passes.append(BackwardTile(dim, dim, key_columns[0], transposed=True, has_c1=True, has_c2=True))
    else:
        passes.append(BackwardTile(dim, dim, key_columns[0], transposed=True, has_c1=False, has_c2=True))
        passes.append(BackwardTile(dim, dim, key_columns[1], transposed=True, has_c1=True, has_c2=False))
    return tuple(passes)


BACKWARD_PASSES = (
    _passes(64, 128, 96),
    _passes(80, 128, 80),
    _passes(96, 128, 80),
    _passes(128, 96, 64),
    _passes(160, 112, 112, 128),
    _passes(192, 80, 80, 112),
    _passes(256, 48, 64, 80),
)
"""Passes by class of head dims, the cheapest first; a call takes the first that hold both of its head dims."""

ONE_PASS = tuple(
    BackwardTile(dim, dim, columns, transposed=True, has_c1=True, has_c2=True, adds_dq=True, caps=False)
    for dim, columns in ((64, 128), (80, 128), (96, 128), (128, 64))
)
"""Passes that compute all gradients and add dQ in memory, by class of head dims, the cheapest first.

The order of the additions, and with it the rounding of dQ, differs from run to run.
"""


MAX_DIM = 256


def holds(tile: ForwardTile | BackwardTile, spec: AttentionSpec) -> bool:
    """Whether the tile's class of head dims holds those of the call."""
    return spec.head_dim <= tile.head_dim and spec.value_head_dim <= tile.value_dim
