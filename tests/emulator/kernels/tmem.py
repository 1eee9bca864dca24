"""TMEM loads and stores in every shape: PTX text for sm_100a, and where each register lies by definition.

One CTA of 128 threads. Every warp fills its 32 lanes with lane·4096 + column by stores of shape 32x32b, loads through
the shape under test, writes the registers to `loaded` [128, registers], stores thread·4096 + register through the
shape, and reads its lanes back to `stored` [128, columns].
"""

from dataclasses import dataclass

import numpy as np

SHAPES = {"32x32b": (1, 128), "16x64b": (1, 128), "16x128b": (2, 64), "16x256b": (4, 32), "16x32bx2": (1, 128)}
FILL = 0x5A5A0000


@dataclass(frozen=True)
class Access:
    """One form of tcgen05.ld and tcgen05.st.

    Attributes:
      shape: A key of SHAPES.
      num: Repetition: 1, 2, 4, ... up to the shape's limit.
      packed: .pack::16b on the load, .unpack::16b on the store: a register has the low halves of two columns.
      split: Of 16x32bx2: columns between the two halves.
      lane: 0, or 16 for the 16-lane shapes: the lane of each warp's 32 to start at.
    """

    shape: str
    num: int
    packed: bool = False
    split: int = 0
    lane: int = 0

    def __post_init__(self):
        if self.shape not in SHAPES or self.num & (self.num - 1) or not 1 <= self.num <= SHAPES[self.shape][1]:
            raise ValueError(f"shape {self.shape!r}, num {self.num}: no such form")

    @property
    def name(self) -> str:
        return f"{self.shape}_x{self.num}{'_packed' if self.packed else ''}{f'_lane{self.lane}' if self.lane else ''}"

    @property
    def registers(self) -> int:
        return SHAPES[self.shape][0] * self.num

    def places(self) -> tuple[np.ndarray, np.ndarray]:
        """Lane (of the warp's 32) and column of register r of thread t, arrays [32, registers], as if not packed."""
        t, r = np.meshgrid(np.arange(32), np.arange(self.registers), indexing="ij")
        if self.shape == "32x32b":
            lane, column = t, r
        elif self.shape == "16x64b":
            lane, column = t // 4 + 8 * (t % 2), t // 2 % 2 + 2 * r
        elif self.shape == "16x128b":
            lane, column = t // 4 + 8 * (r % 2), t % 4 + 4 * (r // 2)
        elif self.shape == "16x256b":
            lane, column = t // 4 + 8 * (r // 2 % 2), 2 * (t % 4) + r % 2 + 8 * (r // 4)
        else:
            lane, column = t % 16, r + self.split * (t // 16)
        return lane + self.lane, column

    def columns_of(self) -> tuple[np.ndarray, np.ndarray]:
        """Columns of the low and the high half of every register; equal if not packed."""
        _, column = self.places()
        if not self.packed:
            return column, column
        if self.shape == "16x32bx2":
            low = (
                2 * (column - self.split * (np.arange(32) // 16)[:, None]) + self.split * (np.arange(32) // 16)[:, None]
            )
        else:
            low = 2 * column
        return low, low + 1

    @property
    def columns(self) -> int:
        return int(self.columns_of()[1].max()) + 1

    @property
    def allocated(self) -> int:
        return max(32, 1 << (self.columns - 1).bit_length())


def all_accesses() -> list[Access]:
    """Every shape and repetition that 512 columns hold, plain and packed; the 16-lane shapes from lane 16 too."""
    found = []
    for shape, (_, limit) in SHAPES.items():
        num = 1
        while num <= limit:
            for packed in (False, True):
                split = 2 * num + 1 if packed else num + 3
                access = Access(shape, num, packed, split if shape == "16x32bx2" else 0)
                if access.columns <= 512:
                    found.append(access)
            num *= 2
        if shape != "32x32b":
            found.append(Access(shape, 4, False, 7 if shape == "16x32bx2" else 0, lane=16))
    return found


def expected(access: Access) -> tuple[np.ndarray, np.ndarray]:
    """`loaded` and `stored` of the kernel, uint32."""
    lane, _ = access.places()
    low, high = access.columns_of()
    warp = 32 * np.arange(4)[:, None, None]
    if access.packed:
        loaded = ((warp + lane) * 4096 + low & 0xFFFF) | (((warp + lane) * 4096 + high & 0xFFFF) << 16)
    else:
        loaded = (warp + lane) * 4096 + low
    stored = np.full((4, 32, access.allocated), 0, np.int64)
    stored[:] = np.arange(128).reshape(4, 32, 1) * 4096 + np.arange(access.allocated)
    value = (warp + np.arange(32)[:, None]) * 4096 + np.arange(access.registers) | FILL
    for w in range(4):
        if access.packed:
            stored[w, lane, low] = value[w] & 0xFFFF
            stored[w, lane, high] = value[w] >> 16
        else:
            stored[w, lane, low] = value[w]
    return loaded.reshape(128, -1).astype(np.uint32), stored.reshape(128, -1).astype(np.uint32)


def _list(prefix: str, count: int) -> str:
    return "{" + ", ".join(f"{prefix}{i}" for i in range(count)) + "}"


def ptx(access: Access) -> str:
    """Parameters of the entry: pointer loaded, pointer stored."""
    n = access.registers
    form = f"sync.aligned.{access.shape}.x{access.num}"
    split = f", {access.split}" if access.shape == "16x32bx2" else ""
    loads = "\n".join(f"    st.global.b32 [%loaded+{4 * i}], v{i};" for i in range(n))
    values = "\n".join(f"    add.u32 v{i}, %mine, {i};\n    or.b32 v{i}, v{i}, {FILL:#x};" for i in range(n))
    return f"""
.version 8.8
.target sm_100a
.address_size 64
.visible .entry kernel(.param .u64 loaded_param, .param .u64 stored_param)
.reqntid 128
{{
    .shared .align 4 .b32 holder;
    .reg .b32 v<128>;
    .reg .b32 %t, %warp, %tmem, %lanes, %at, %word, %mine, %i, %holder;
    .reg .b64 %loaded, %stored, %offset;
    .reg .pred %p;
    ld.param.b64 %loaded, [loaded_param];
    ld.param.b64 %stored, [stored_param];
    mov.u32 %t, %tid.x;
    shr.u32 %warp, %t, 5;
    mov.u32 %holder, holder;
    setp.ne.u32 %p, %warp, 0;
    @%p bra ALLOCATED;
    tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%holder], {access.allocated};
    tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;
ALLOCATED:
    bar.sync 0;
    ld.shared.b32 %tmem, [%holder];
    shl.b32 %lanes, %warp, 21;
    add.u32 %lanes, %lanes, %tmem;
    shl.b32 %mine, %t, 12;
    mul.wide.u32 %offset, %t, {4 * n};
    add.u64 %loaded, %loaded, %offset;
    mul.wide.u32 %offset, %t, {4 * access.allocated};
    add.u64 %stored, %stored, %offset;
    mov.u32 %i, 0;
FILL:
    add.u32 %at, %lanes, %i;
    add.u32 %word, %mine, %i;
    tcgen05.st.sync.aligned.32x32b.x1.b32 [%at], {{%word}};
    add.u32 %i, %i, 1;
    setp.lt.u32 %p, %i, {access.allocated};
    @%p bra FILL;
    tcgen05.wait::st.sync.aligned;
    add.u32 %at, %lanes, {access.lane << 16};
    tcgen05.ld.{form}{".pack::16b" if access.packed else ""}.b32 {_list("v", n)}, [%at]{split};
    tcgen05.wait::ld.sync.aligned;
{loads}
{values}
    tcgen05.st.{form}{".unpack::16b" if access.packed else ""}.b32 [%at]{split}, {_list("v", n)};
    tcgen05.wait::st.sync.aligned;
    mov.u32 %i, 0;
READ:
    add.u32 %at, %lanes, %i;
    tcgen05.ld.sync.aligned.32x32b.x1.b32 {{%word}}, [%at];
    tcgen05.wait::ld.sync.aligned;
    st.global.b32 [%stored], %word;
    add.u64 %stored, %stored, 4;
    add.u32 %i, %i, 1;
    setp.lt.u32 %p, %i, {access.allocated};
    @%p bra READ;
    bar.sync 0;
    setp.ne.u32 %p, %warp, 0;
    @%p bra END;
    tcgen05.dealloc.cta_group::1.sync.aligned.b32 %tmem, {access.allocated};
END:
    ret;
}}
"""
