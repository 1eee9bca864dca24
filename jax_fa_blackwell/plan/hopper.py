"""Tiles of the Hopper kernels: what is fixed when they are compiled, and the classes of head dims they come in."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from jax_fa_blackwell.plan.spec import AttentionSpec
from jax_fa_blackwell.plan.target import get_target

ARCH = "sm_90a"
TILE_ROWS = 64
"""Rows of a warpgroup's products."""
SLICE = 64
"""Head dims of a slice: one row of the 128-byte swizzle in 16-bit elements."""
REGISTERS = {2: (240, 24), 3: (160, 32)}
"""Registers of a consumer's and of a producer's thread by the number of consumer warpgroups."""
_SPARE_REGISTERS = 26  # addresses, counters, statistics of the rows and what is in flight


@dataclasses.dataclass(frozen=True)
class ForwardTile:
    """The compile-time sizes of the forward kernel.

    Attributes:
      head_dim: class of the head dim: the products' sums are so long.
      value_dim: class of the value head dim: the accumulator is so wide.
      columns: keys of a KV block.
      warpgroups: consumer warpgroups of 64 query rows.
    """

    head_dim: int
    value_dim: int
    columns: int
    warpgroups: int

    HEADER_BYTES: ClassVar[int] = 1024

    def __post_init__(self):
        """The legality rule: instruction shapes, registers and shared memory."""
        if self.head_dim % 16 or self.value_dim % 8 or self.columns % 16 or max(self.columns, self.value_dim) > 256:
            raise ValueError(f"forward tile has no wgmma shape: {self}")
        if self.warpgroups not in REGISTERS:
            raise ValueError(f"warpgroups must be one of {', '.join(map(str, REGISTERS))}; got {self.warpgroups}")
        if self.registers > self.consumer_registers:
            raise ValueError(f"forward tile needs {self.registers} registers of {self.consumer_registers}: {self}")
        if self.stages < 2:
            raise ValueError(f"forward tile has shared memory for {self.stages} stages and needs 2: {self}")

    @property
    def rows(self) -> int:
        """Query rows of a block."""
        return self.warpgroups * TILE_ROWS

    @property
    def threads(self) -> int:
        """Threads of a block: consumers and one producer warpgroup."""
        return 128 * (self.warpgroups + 1)

    @property
    def consumer_registers(self) -> int:
        """Registers of a consumer's thread."""
        return REGISTERS[self.warpgroups][0]

    @property
    def producer_registers(self) -> int:
        """Registers of a producer's thread."""
        return REGISTERS[self.warpgroups][1]

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
        rest = get_target(ARCH).shared_bytes - self.HEADER_BYTES - self.warpgroups * self.query_bytes
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
    ForwardTile(128, 128, 128, 2),
    ForwardTile(160, 160, 112, 2),
    ForwardTile(192, 128, 128, 2),
    ForwardTile(192, 192, 112, 2),
    ForwardTile(256, 256, 80, 2),
)
"""The classes of head dims, the cheapest first; a call takes the first that holds both of its head dims."""

MAX_DIM = 256


def choose(tiles, spec: AttentionSpec):
    """The first tile, in their order, whose class holds both head dims of the call."""
    return next(t for t in tiles if spec.head_dim <= t.head_dim and spec.value_head_dim <= t.value_dim)
