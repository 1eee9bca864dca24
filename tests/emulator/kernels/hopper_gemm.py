"""C[M, N] = A·B with Hopper's wgmma: one tile of one CTA, in every operand form.

A producer warp brings A and B by TMA through a ring of two stages; one or two warpgroups of 64 rows each multiply,
with the products of one stage in flight while the next one's are issued. With source "RS" A goes through registers. C
is written by each thread. The ring is used several times. Parameters of the entry: map a (SS) or pointer a (RS), map b,
pointer c; 8 bytes of coordinate sizes follow each map.
"""

from dataclasses import dataclass

STAGES = 2
WARPGROUP = 128  # threads
PRODUCERS = 32
ELEMENT_BYTES = {"f16": 2, "bf16": 2, "e4m3": 1}


@dataclass(frozen=True)
class Config:
    """One form of wgmma; `illegal` says why a combination does not exist.

    Attributes:
      source: "SS": A in shared memory; "RS": A in registers.
      m: Rows of the tile, 64 or 128: one warpgroup for 64.
      n: Of the wgmma.
      k_tiles: Stages' worth of K.
      dtype: Of A and B: "f16", "bf16" or "e4m3".
      accumulator: "f32" or "f16".
      a_major, b_major: "K" or "MN".
      swizzle: Of both operands: "none", "32B", "64B" or "128B".
      loop: Whether K is a loop at run time, with accumulators in flight from one round to the next.
    """

    source: str = "SS"
    m: int = 64
    n: int = 64
    k_tiles: int = 3
    dtype: str = "f16"
    accumulator: str = "f32"
    a_major: str = "K"
    b_major: str = "K"
    swizzle: str = "128B"
    loop: bool = False

    @property
    def swizzle_elements(self) -> int:
        """Elements of a row of the swizzle's atom."""
        row_bytes = 16 if self.swizzle == "none" else int(self.swizzle[:-1])
        return row_bytes // ELEMENT_BYTES[self.dtype]

    @property
    def k_tile(self) -> int:
        """Elements of K in one stage: two steps of 32 bytes, or a row of the swizzle's atom if that is more."""
        return max(self.swizzle_elements, 64 // ELEMENT_BYTES[self.dtype])

    @property
    def k(self) -> int:
        return self.k_tiles * self.k_tile

    @property
    def threads(self) -> int:
        return self.m // 64 * WARPGROUP + PRODUCERS

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory: the barriers, then both rings, each on a kilobyte."""
        size = ELEMENT_BYTES[self.dtype] * self.k_tile * STAGES
        return 1024 + size * (self.n + (self.m if self.source == "SS" else 0)) + 1024

    def illegal(self) -> str | None:
        """The rule of the instruction set (or of this kernel) that a combination breaks; None if it is legal."""
        if self.m not in (64, 128):
            return "M is 64 or 128 in this kernel"
        if self.n % 8 or not 8 <= self.n <= 256:
            return "N is a multiple of 8, at most 256"
        if self.source == "RS" and self.a_major != "K":
            return "A in registers is K-major"
        majors = {"A": self.a_major, "B": self.b_major}
        if ELEMENT_BYTES[self.dtype] != 2 and "MN" in majors.values():
            return "only 16-bit operands are transposed"
        if self.accumulator == "f16" and self.dtype == "bf16":
            return "bf16 operands have f32 accumulators"
        for name, extent in (("A", self.m), ("B", self.n)):
            if name == "A" and self.source == "RS":
                continue
            if majors[name] == "MN" and extent % self.swizzle_elements:
                return f"{name}: an MN-major swizzle row of {self.swizzle_elements} elements does not divide {extent}"
        return None

    def map_of(self, operand: str) -> dict:
        """Dimensions, strides, box and swizzle of the tensor map of "a" or "b", the fastest dimension first."""
        size = ELEMENT_BYTES[self.dtype]
        rows = self.m if operand == "a" else self.n
        if (self.a_major if operand == "a" else self.b_major) == "K":
            dims, box = (self.k, rows), (self.swizzle_elements, rows)
        else:
            dims, box = (rows, self.k), (self.swizzle_elements, self.k_tile)
        return {"dims": dims, "strides_bytes": (dims[0] * size,), "box": box, "swizzle": self.swizzle}
