"""Copies or adds a matrix tile by tile: TMA load, multicast to a cluster, TMA store or reduction.

Each cluster has one tile; its CTAs load a part of it each and send that part to all. Then CTA r stores the whole tile
to matrix r of the output, or adds it to the one output. Parameters: map in, map out, each followed by its sizes (8 and
12 bytes).
"""

from dataclasses import dataclass

BYTES = {"f16": 2, "bf16": 2, "f32": 4}


@dataclass(frozen=True)
class Config:
    """A tile is `tile_rows` by one swizzle row.

    Attributes:
      dtype: "f16", "bf16" or "f32".
      swizzle: "none" (rows of 64 bytes), "32B", "64B" or "128B".
      cluster: CTAs that share a tile.
      reduce: Add to the output, which is one matrix then, instead of storing `cluster` matrices.
    """

    dtype: str = "bf16"
    swizzle: str = "128B"
    cluster: int = 1
    reduce: bool = False
    tile_rows: int = 16

    @property
    def tile_columns(self) -> int:
        return (64 if self.swizzle == "none" else int(self.swizzle[:-1])) // BYTES[self.dtype]
