"""A micro kernel: PTX text for sm_90a, its inputs and its launch, in a form that a GPU and the emulator both execute.

Only numpy is used here, because `record.py` runs on machines that have nothing else.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

HEADER = ".version 8.6\n.target sm_90a\n.address_size 64\n"

#: Tensor map element types: name -> (CUtensorMapDataType, bytes).
MAP_DTYPES = {
    "u8": (0, 1),
    "u16": (1, 2),
    "u32": (2, 4),
    "s32": (3, 4),
    "u64": (4, 8),
    "f16": (6, 2),
    "f32": (7, 4),
    "bf16": (9, 2),
    "tf32": (11, 4),
}
SWIZZLES = ("none", "32B", "64B", "128B")


@dataclass(frozen=True)
class Pointer:
    """Parameter: the device address of a buffer, `offset` bytes in."""

    buffer: str
    offset: int = 0


@dataclass(frozen=True)
class Map:
    """Parameter: a tiled tensor map over a buffer; dims, box and strides start with the fastest dimension."""

    buffer: str
    dtype: str
    dims: tuple[int, ...]
    strides_bytes: tuple[int, ...]
    box: tuple[int, ...]
    element_strides: tuple[int, ...] | None = None
    swizzle: str = "none"
    fill: str = "zero"
    offset_bytes: int = 0

    def __post_init__(self):
        if self.dtype not in MAP_DTYPES:
            raise ValueError(f"dtype is {self.dtype!r}; expected one of {sorted(MAP_DTYPES)}")
        if self.swizzle not in SWIZZLES or self.fill not in ("zero", "nan"):
            raise ValueError(f"swizzle {self.swizzle!r}, fill {self.fill!r}: unknown")
        if len(self.strides_bytes) != len(self.dims) - 1 or len(self.box) != len(self.dims):
            raise ValueError(f"dims {self.dims}, strides_bytes {self.strides_bytes}, box {self.box}: ranks differ")

    @property
    def box_bytes(self) -> int:
        return int(np.prod(self.box)) * MAP_DTYPES[self.dtype][1]


@dataclass(frozen=True)
class Micro:
    """One micro kernel.

    Attributes:
      name: Unique; the key of its results.
      ptx: The module's text, with one entry.
      buffers: Device buffers by name, with the content they start with.
      params: The entry's parameters in order: `Pointer`, `Map` or a numpy scalar.
      outputs: The buffers that are compared afterwards.
      grid, block, cluster: Launch dimensions.
      max_ulp: 0 for results that must agree bit for bit; otherwise outputs are f32 (or f16/bf16, see `ulp_dtype`) and
        may differ from the recorded value by that many units in the last place.
      ulp_dtype: How to read outputs where max_ulp > 0.
      absolute: An absolute error that is allowed as well, where the PTX manual states one.
    """

    name: str
    ptx: str
    buffers: Mapping[str, np.ndarray]
    params: Sequence[Pointer | Map | np.generic]
    outputs: Sequence[str] = ("out",)
    grid: tuple[int, int, int] = (1, 1, 1)
    block: tuple[int, int, int] = (32, 1, 1)
    cluster: tuple[int, int, int] = (1, 1, 1)
    max_ulp: float = 0.0
    ulp_dtype: str = "f32"
    absolute: float = 0.0

    def digest(self) -> str:
        """Of everything that decides the results, so that a record of another version is noticed."""
        state = hashlib.sha256(self.ptx.encode())
        state.update(repr((list(self.params), self.grid, self.block, self.cluster)).encode())
        for name, array in self.buffers.items():
            state.update(name.encode() + array.tobytes())
        return state.hexdigest()[:16]


def poison(count: int, dtype: type = np.uint32) -> np.ndarray:
    """An output buffer whose bytes are 0xA5, so that what a kernel does not write is recognised."""
    return np.full(count * np.dtype(dtype).itemsize, 0xA5, np.uint8).view(dtype)


def entry(params: str, body: str, *, name: str = "kernel", shared: str = "", directives: str = "") -> str:
    """A module with one entry. `params`: "u64 out, u32 n, map m"; parameters are loaded into registers %out, %n.

    A map parameter's generic address is put into %m. Scratch registers are declared by the body itself.
    """
    declared, loads = [], []
    for item in filter(None, (part.strip() for part in params.split(","))):
        kind, ident = item.split()
        if kind == "map":
            declared.append(f"    .param .align 64 .b8 {ident}_param[128]")
            loads.append(f"    .reg .b64 %{ident};\n    mov.b64 %{ident}, {ident}_param;")
            loads.append(f"    cvta.param.u64 %{ident}, %{ident};")
        else:
            declared.append(f"    .param .{kind} {ident}_param")
            bits = kind[1:]
            loads.append(f"    .reg .b{bits} %{ident};\n    ld.param.b{bits} %{ident}, [{ident}_param];")
            if kind == "u64":
                loads.append(f"    cvta.to.global.u64 %{ident}, %{ident};")
    joined = ",\n".join(declared)
    text = "\n".join(loads)
    code = f"{shared}\n{text}\n{body.rstrip()}\n    ret;\n"
    return f"{HEADER}\n.visible .entry {name}(\n{joined}\n)\n{directives}\n{{\n{code}}}\n"


#: Registers every body may use, with the linear thread index in %t and the block index in %blk.
PROLOGUE = """
    .reg .pred p<16>;
    .reg .b16 h<64>;
    .reg .b32 r<160>;
    .reg .b64 d<64>;
    .reg .b32 %t, %blk;
    mov.u32 %t, %tid.x;
    mov.u32 %blk, %ctaid.x;
"""


def elementwise(
    name: str,
    inputs: Mapping[str, np.ndarray],
    ops: Sequence[str],
    *,
    results: str = "32",
    max_ulp: float = 0.0,
    ulp_dtype: str = "f32",
    absolute: float = 0.0,
    extra: str = "",
) -> Micro:
    """Thread i loads element i of every input and applies every op; result k of thread i is out[k, i].

    Args:
      name: Of the micro kernel.
      inputs: Arrays of equal length, of 2-, 4- or 8-byte elements; the length is a multiple of 32.
      ops: PTX with {0}, {1}, ... for the inputs and {d} for the result register; several statements are allowed, with
        the scratch registers p, h, r, d.
      results: Bits of a result: "16", "32" or "64".
      max_ulp: As in `Micro`.
      ulp_dtype: As in `Micro`.
      absolute: As in `Micro`.
      extra: Declarations put in front.
    """
    arrays = list(inputs.values())
    count = len(arrays[0])
    if any(len(a) != count for a in arrays) or count % 32:
        raise ValueError(f"inputs of {name} have lengths {[len(a) for a in arrays]}; expected equal multiples of 32")
    lines = [PROLOGUE, extra]
    lines.append("    .reg .b64 %address, %index;")
    lines.append(f"    mad.lo.s32 r159, %blk, {min(count, 128)}, %t;\n    cvt.u64.u32 %index, r159;")
    for k, array in enumerate(arrays):
        bits = array.dtype.itemsize * 8
        lines.append(f"    .reg .b{bits} %x{k};")
        lines.append(f"    mad.lo.u64 %address, %index, {array.dtype.itemsize}, %in{k};")
        lines.append(f"    ld.global.b{bits} %x{k}, [%address];")
    size = int(results) // 8
    lines.append(f"    .reg .b{results} %y;\n    .reg .b64 %place;\n    mad.lo.u64 %place, %index, {size}, %out;")
    registers = [f"%x{k}" for k in range(len(arrays))]
    for k, op in enumerate(ops):
        lines.append(f"    {op.format(*registers, d='%y')}")
        lines.append(f"    st.global.b{results} [%place+{k * count * size}], %y;")
    block = min(count, 128)
    if count % block:
        raise ValueError(f"inputs of {name} have length {count}; expected a multiple of {block}")
    params = ", ".join([f"u64 in{k}" for k in range(len(arrays))] + ["u64 out"])
    dtype = {"16": np.uint16, "32": np.uint32, "64": np.uint64}[results]
    buffers = {f"in{k}": a for k, a in enumerate(arrays)} | {"out": poison(count * len(ops), dtype)}
    return Micro(
        name=name,
        ptx=entry(params, "\n".join(lines)),
        buffers=buffers,
        params=[Pointer(f"in{k}") for k in range(len(arrays))] + [Pointer("out")],
        grid=(count // block, 1, 1),
        block=(block, 1, 1),
        max_ulp=max_ulp,
        ulp_dtype=ulp_dtype,
        absolute=absolute,
    )
