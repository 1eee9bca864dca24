"""C[M, N] = A·B with tcgen05.mma: one tile, one CTA or one pair of CTAs, in every operand form.

A and B come by TMA through a ring of two stages; with source "TS" A goes through registers into TMEM. C is written as
fp32 by each thread. K has three tiles, so that the ring is used again. Parameters of the entry: map a (SS) or pointer a
(TS), map b, pointer c; 8 bytes of coordinate sizes follow each map.
"""

from dataclasses import dataclass

STAGES = 2
K_TILES = 3
ELEMENT_BYTES = {"f16": 2, "bf16": 2, "tf32": 4, "e4m3": 1}


@dataclass(frozen=True)
class Config:
    """One form of the MMA; `illegal` says why a combination does not exist.

    Attributes:
      source: "SS": A in shared memory; "TS": A in TMEM.
      cta_group: 1, or 2 for a pair of CTAs that share B.
      m, n: Of the MMA, both CTAs together.
      dtype: Of A and B: "f16", "bf16", "tf32" or "e4m3".
      a_major, b_major: "K" or "MN".
      swizzle: Of both operands: "32B", "64B" or "128B".
    """

    source: str = "SS"
    cta_group: int = 1
    m: int = 128
    n: int = 64
    dtype: str = "f16"
    a_major: str = "K"
    b_major: str = "K"
    swizzle: str = "128B"

    @property
    def swizzle_elements(self) -> int:
        return int(self.swizzle[:-1]) // ELEMENT_BYTES[self.dtype]

    @property
    def k_tile(self) -> int:
        """Elements of K in one stage: a swizzle row if an operand is K-major, and two MMA steps otherwise."""
        k_major = "K" in (self.a_major if self.source == "SS" else "", self.b_major)
        return self.swizzle_elements if k_major else 64 // ELEMENT_BYTES[self.dtype]

    @property
    def k(self) -> int:
        return K_TILES * self.k_tile

    @property
    def m_cta(self) -> int:
        return self.m // self.cta_group

    @property
    def n_cta(self) -> int:
        """Rows of B that one CTA loads."""
        return self.n // self.cta_group

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory: the barriers, then both rings, each on a kilobyte."""
        size = ELEMENT_BYTES[self.dtype] * self.k_tile * STAGES
        return 1024 + size * (self.n_cta + (self.m_cta if self.source == "SS" else 0)) + 1024

    def illegal(self) -> str | None:
        """The rule of the instruction set (or of this kernel) that a combination breaks; None if it is legal."""
        if self.m not in ((64, 128) if self.cta_group == 1 else (128, 256)):
            return "M is 64 or 128 for one CTA, 128 or 256 for a pair"
        if self.n % (8 * self.cta_group) or not 8 * self.cta_group <= self.n <= 256:
            return "N is a multiple of 8 (16 for a pair), at most 256"
        if self.source == "TS" and self.a_major != "K":
            return "A in TMEM is K-major"
        majors = {"A": self.a_major, "B": self.b_major}
        if self.dtype == "tf32" and "MN" in majors.values():
            return "32-bit operands are transposed only with the 32-byte swizzle atom, which plain tensor maps lack"
        for name, extent in (("A", self.m_cta), ("B", self.n_cta)):
            if name == "A" and self.source == "TS":
                continue
            if majors[name] == "MN" and extent % self.swizzle_elements:
                return f"{name}: an MN-major swizzle row of {self.swizzle_elements} elements does not divide {extent}"
        if self.b_major == "MN" and self.dtype == "e4m3" and self.n % 16:
            return "N is a multiple of 16 for transposed 8-bit B"
        if self.k_tile * ELEMENT_BYTES[self.dtype] % 32:
            return "an MMA step takes 32 bytes of K"
        return None

    def map_of(self, operand: str) -> dict:
        """Dimensions, strides, box and swizzle of the tensor map of "a" or "b", the fastest dimension first."""
        size = ELEMENT_BYTES[self.dtype]
        rows = self.m if operand == "a" else self.n
        rows_cta = self.m_cta if operand == "a" else self.n_cta
        if (self.a_major if operand == "a" else self.b_major) == "K":
            dims, box = (self.k, rows), (self.swizzle_elements, rows_cta)
        else:
            dims, box = (rows, self.k), (self.swizzle_elements, self.k_tile)
        return {"dims": dims, "strides_bytes": (dims[0] * size,), "box": box, "swizzle": self.swizzle}
