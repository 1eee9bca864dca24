"""LaunchPlan: everything an executor needs to run one custom call, as data.

A plan is made at trace time, when every shape is known. Two executors read it: the XLA FFI handler (``ffi/plan.cc``)
on a GPU and the PTX emulator (``tests/emulator``) on a CPU. An operand is named by its index in the call's
arguments followed by its results. A plan may hold one program for each architecture; the executor picks by device.

Byte format (little endian; ``ffi/plan.cc`` is its mirror): ``u32``, ``i64``, ``f32`` as named; a string or byte
string is a ``u32`` length and its bytes; a list is a ``u32`` count and its items. A string is a name: printable ASCII,
at least one character. ``programmatic`` is 0 or 1. Both readers refuse whatever the classes below refuse.

    plan     = "JFAP" u32:version string:name list[i64]:argument_bytes list[i64]:result_bytes list[program]
    program  = string:arch list[step]
    step     = u32:0 fill | u32:1 launch
    fill     = u32:operand i64:offset_bytes i64:words u32:word
    launch   = string:kernel bytes[32]:sha256 string:symbol 3*u32:grid 3*u32:block 3*u32:cluster u32:shared_bytes
               u32:programmatic list[param]
    param    = u32:0 u32:operand i64:offset_bytes u32:dtype list[i64]:dims list[i64]:strides_bytes list[u32]:box
                     list[u32]:element_strides u32:swizzle u32:fill u32:l2_promotion
             | u32:1 u32:operand i64:offset_bytes
             | u32:2 i64:value
             | u32:3 f32:value
             | u32:4 bytes:data
"""

from __future__ import annotations

import dataclasses
import math
import re
import struct

VERSION = 1
MAGIC = b"JFAP"

MAX_OPERANDS = 64
"""Arguments and results of one call: the executor keeps their addresses on its stack."""
MAX_PROGRAMS = 16
MAX_PARAMS = 256
MAX_PARAM_BYTES = 4096
"""What every driver takes for one launch, with each parameter aligned to 8 bytes (tensor maps to 64)."""

DTYPES = ("bfloat16", "float16", "float32", "int32", "uint8", "float64", "int64", "uint32", "uint16", "uint64")
DTYPE_BYTES = (2, 2, 4, 4, 1, 8, 8, 4, 2, 8)
SWIZZLES = ("none", "32B", "64B", "128B")
FLOATING = ("bfloat16", "float16", "float32", "float64")
FILLS = ("zero", "nan")
L2_PROMOTIONS = ("none", "64B", "128B", "256B")


def _require(condition: bool, what: str) -> None:
    if not condition:
        raise ValueError(what)


def _require_name(name: str, what: str) -> None:
    _require(bool(re.fullmatch("[ -~]+", name)), f"{what} must be printable ASCII and not empty; got {name!r}")


@dataclasses.dataclass(frozen=True)
class TensorMap:
    """A tiled TMA descriptor, passed by value (128 bytes, 64-aligned). Dimensions run from the innermost outwards.

    Attributes:
      operand: index into arguments + results.
      dtype: element type, one of DTYPES.
      dims: extent of each dimension in elements, innermost first; rank 1 to 5.
      strides_bytes: distance between neighbours in dimensions 1, 2, ...; dimension 0 is contiguous.
      box: extent of the tile in elements.
      offset_bytes: where the tensor begins in the operand.
      element_strides: steps within the box; () means all 1.
      swizzle, fill, l2_promotion: one of SWIZZLES, FILLS, L2_PROMOTIONS.
    """

    operand: int
    dtype: str
    dims: tuple[int, ...]
    strides_bytes: tuple[int, ...]
    box: tuple[int, ...]
    offset_bytes: int = 0
    element_strides: tuple[int, ...] = ()
    swizzle: str = "none"
    fill: str = "zero"
    l2_promotion: str = "128B"

    size = 128
    alignment = 64

    def __post_init__(self):
        """The legality rule of cuTensorMapEncodeTiled (CUDA driver API), stated once."""
        rank = len(self.dims)
        _require(self.dtype in DTYPES, f"tensor map dtype must be one of {DTYPES}; got {self.dtype!r}")
        _require(self.swizzle in SWIZZLES, f"tensor map swizzle must be one of {SWIZZLES}; got {self.swizzle!r}")
        _require(self.fill in FILLS, f"tensor map fill must be one of {FILLS}; got {self.fill!r}")
        _require(
            self.l2_promotion in L2_PROMOTIONS,
            f"tensor map l2_promotion must be one of {L2_PROMOTIONS}; got {self.l2_promotion!r}",
        )
        _require(
            self.fill == "zero" or self.dtype in FLOATING, f"tensor map fill 'nan' needs a float; got {self.dtype!r}"
        )
        _require(1 <= rank <= 5, f"tensor map rank must be 1 to 5; got dims {self.dims}")
        _require(all(1 <= d <= 2**32 for d in self.dims), f"tensor map dims must be 1 to 2**32; got {self.dims}")
        _require(len(self.strides_bytes) == rank - 1, f"tensor map needs {rank - 1} strides; got {self.strides_bytes}")
        _require(
            all(s % 16 == 0 and 0 < s < 2**40 for s in self.strides_bytes),
            f"tensor map strides must be positive multiples of 16 bytes below 2**40; got {self.strides_bytes}",
        )
        _require(
            len(self.box) == rank and all(1 <= b <= 256 for b in self.box),
            f"tensor map box must have {rank} extents of 1 to 256; got {self.box}",
        )
        if not self.element_strides:
            object.__setattr__(self, "element_strides", (1,) * rank)
        _require(
            len(self.element_strides) == rank and all(1 <= s <= 8 for s in self.element_strides),
            f"tensor map element_strides must be {rank} steps of 1 to 8; got {self.element_strides}",
        )
        # The driver ignores the step of the innermost dimension, so only 1 says what happens.
        _require(
            self.element_strides[0] == 1, f"tensor map element_strides must begin with 1; got {self.element_strides}"
        )
        row_bytes = self.box[0] * self.element_bytes
        _require(row_bytes % 16 == 0, f"tensor map box rows must be multiples of 16 bytes; got {row_bytes}")
        if self.swizzle != "none":
            span = int(self.swizzle[:-1])
            _require(row_bytes <= span, f"tensor map box rows of {row_bytes} bytes exceed the {self.swizzle} swizzle")
        _require(self.offset_bytes % 16 == 0, f"tensor map offset must be a multiple of 16; got {self.offset_bytes}")

    @property
    def element_bytes(self) -> int:
        """Bytes of one element."""
        return DTYPE_BYTES[DTYPES.index(self.dtype)]

    @property
    def box_bytes(self) -> int:
        """Bytes that one tile load moves and that its mbarrier must expect."""
        steps = zip(self.box, self.element_strides, strict=True)
        return math.prod(-(-b // s) for b, s in steps) * self.element_bytes

    @property
    def end_bytes(self) -> int:
        """One past the last byte of the operand that the map can address."""
        last = sum((d - 1) * s for d, s in zip(self.dims[1:], self.strides_bytes, strict=True))
        return self.offset_bytes + last + self.dims[0] * self.element_bytes


@dataclasses.dataclass(frozen=True)
class Pointer:
    """The device address of an operand plus an offset in bytes."""

    operand: int
    offset_bytes: int = 0

    size = 8
    alignment = 8


@dataclasses.dataclass(frozen=True)
class Int32:
    """A 32-bit signed integer parameter."""

    value: int

    size = 4
    alignment = 4

    def __post_init__(self):
        _require(-(2**31) <= self.value < 2**31, f"Int32 parameter out of range: {self.value}")


@dataclasses.dataclass(frozen=True)
class Float32:
    """A binary32 parameter; the value given is rounded to binary32."""

    value: float

    size = 4
    alignment = 4

    def __post_init__(self):
        try:
            object.__setattr__(self, "value", struct.unpack("<f", struct.pack("<f", self.value))[0])
        except OverflowError:
            raise ValueError(f"Float32 parameter out of range: {self.value}") from None


@dataclasses.dataclass(frozen=True)
class Bytes:
    """A parameter given as its raw bytes."""

    data: bytes

    alignment = 8

    def __post_init__(self):
        legal = 1 <= len(self.data) <= MAX_PARAM_BYTES
        _require(legal, f"a Bytes parameter has 1 to {MAX_PARAM_BYTES} bytes; got {len(self.data)}")

    @property
    def size(self) -> int:
        """Bytes of the parameter."""
        return len(self.data)


Param = TensorMap | Pointer | Int32 | Float32 | Bytes


def parameter_bytes(params: tuple[Param, ...]) -> int:
    """Bytes of the executor's parameter block: each parameter aligned to 8 bytes, a tensor map to 64."""
    end = 0
    for param in params:
        alignment = max(param.alignment, 8)
        end = -(-end // alignment) * alignment + param.size
    return end


@dataclasses.dataclass(frozen=True)
class Fill:
    """Sets ``words`` 32-bit words of an operand to ``word`` before the steps that follow."""

    operand: int
    words: int
    word: int = 0
    offset_bytes: int = 0

    def __post_init__(self):
        _require(self.words > 0, f"a fill needs at least one word; got {self.words}")
        _require(0 <= self.word < 2**32, f"fill word must be an unsigned 32-bit value; got {self.word}")
        _require(self.offset_bytes % 4 == 0, f"a fill's offset must be a multiple of 4; got {self.offset_bytes}")

    @property
    def end_bytes(self) -> int:
        """One past the last byte filled."""
        return self.offset_bytes + 4 * self.words


@dataclasses.dataclass(frozen=True)
class Launch:
    """One kernel launch.

    Attributes:
      kernel: the kernel's stable name, for people.
      sha256: digest of the cubin in lower-case hexadecimal.
      symbol: entry point in the cubin.
      grid, block, cluster: extents in x, y, z; grid in blocks, not clusters.
      shared_bytes: dynamic shared memory of a block.
      params: in the order of the kernel's signature.
      programmatic: whether the kernel may start before the previous one ends (griddepcontrol orders its reads).
    """

    kernel: str
    sha256: str
    symbol: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    params: tuple[Param, ...]
    cluster: tuple[int, int, int] = (1, 1, 1)
    shared_bytes: int = 0
    programmatic: bool = False

    def __post_init__(self):
        where = f"launch of {self.kernel!r}"
        _require_name(self.kernel, "kernel name")
        _require_name(self.symbol, f"{where}: symbol")
        digits = re.fullmatch("[0-9a-f]{64}", self.sha256)
        _require(bool(digits), f"{where}: sha256 must be 64 lower-case hexadecimal digits; got {self.sha256!r}")
        for name, limits in (("grid", (2**31 - 1, 65535, 65535)), ("block", (1024, 1024, 64)), ("cluster", (16,) * 3)):
            extents = getattr(self, name)
            legal = len(extents) == 3 and all(1 <= e <= limit for e, limit in zip(extents, limits, strict=True))
            _require(legal, f"{where}: {name} must be three extents of 1 to {limits}; got {extents}")
        _require(math.prod(self.block) <= 1024, f"{where}: more than 1024 threads in block {self.block}")
        _require(math.prod(self.cluster) <= 16, f"{where}: more than 16 blocks in cluster {self.cluster}")
        divides = all(g % c == 0 for g, c in zip(self.grid, self.cluster, strict=True))
        _require(divides, f"{where}: cluster {self.cluster} does not divide grid {self.grid}")
        _require(
            0 <= self.shared_bytes <= 227 * 1024, f"{where}: shared_bytes must be 0 to 232448; got {self.shared_bytes}"
        )
        _require(len(self.params) <= MAX_PARAMS, f"{where}: {len(self.params)} parameters; at most {MAX_PARAMS}")
        size = parameter_bytes(self.params)
        _require(size <= MAX_PARAM_BYTES, f"{where}: parameters of {size} bytes; at most {MAX_PARAM_BYTES}")


Step = Fill | Launch


@dataclasses.dataclass(frozen=True)
class Program:
    """The steps for one architecture, run in order on one stream."""

    arch: str
    steps: tuple[Step, ...]

    def __post_init__(self):
        legal = re.fullmatch("sm_[1-9][0-9]{1,3}a", self.arch)
        _require(bool(legal), f"arch must name one compute capability, such as 'sm_90a'; got {self.arch!r}")


@dataclasses.dataclass(frozen=True)
class LaunchPlan:
    """One custom call: its buffers' sizes and a program for each architecture it may run on."""

    name: str
    argument_bytes: tuple[int, ...]
    result_bytes: tuple[int, ...]
    programs: tuple[Program, ...]

    def __post_init__(self):
        _require_name(self.name, "plan name")
        arches = [program.arch for program in self.programs]
        _require(len(arches) <= MAX_PROGRAMS, f"plan {self.name!r} has {len(arches)} programs; at most {MAX_PROGRAMS}")
        _require(len(set(arches)) == len(arches), f"plan {self.name!r} has an architecture twice: {arches}")
        sizes = self.argument_bytes + self.result_bytes
        _require(len(sizes) <= MAX_OPERANDS, f"plan {self.name!r} has {len(sizes)} operands; at most {MAX_OPERANDS}")
        _require(all(0 <= s < 2**63 for s in sizes), f"plan {self.name!r} has a buffer size out of range: {sizes}")
        for program in self.programs:
            for step in program.steps:
                for ref in (step,) if isinstance(step, Fill) else step.params:
                    if isinstance(ref, Int32 | Float32 | Bytes):
                        continue
                    where = f"plan {self.name!r}, {program.arch}: {type(ref).__name__}"
                    _require(0 <= ref.operand < len(sizes), f"{where} names operand {ref.operand} of {len(sizes)}")
                    size = sizes[ref.operand]
                    # A pointer names at least one byte, save that an empty operand has a beginning too.
                    end = ref.offset_bytes + (size > 0) if isinstance(ref, Pointer) else ref.end_bytes
                    inside = ref.offset_bytes >= 0 and end <= size
                    _require(inside, f"{where} ends at byte {end} of operand {ref.operand}, which has {size}")

    def program(self, arch: str) -> Program:
        """The program for ``arch``; ValueError lists what the plan has."""
        for program in self.programs:
            if program.arch == arch:
                return program
        have = ", ".join(program.arch for program in self.programs) or "none"
        raise ValueError(f"plan {self.name!r} has no program for {arch}; it has: {have}")

    def encode(self) -> bytes:
        """The plan in the byte format of this module's docstring."""
        writer = _Writer()
        writer.raw(MAGIC)
        writer.u32(VERSION)
        writer.string(self.name)
        writer.items(self.argument_bytes, writer.i64)
        writer.items(self.result_bytes, writer.i64)
        writer.items(self.programs, writer.program)
        return bytes(writer.out)

    @staticmethod
    def decode(data: bytes) -> LaunchPlan:
        """The inverse of ``encode``; ValueError says at which byte the data is not a plan."""
        return _Reader(data).plan()


class _Writer:
    def __init__(self):
        self.out = bytearray()

    def raw(self, data: bytes):
        self.out += data

    def u32(self, value: int):
        self.out += struct.pack("<I", value)

    def i64(self, value: int):
        self.out += struct.pack("<q", value)

    def data(self, value: bytes):
        self.u32(len(value))
        self.raw(value)

    def string(self, value: str):
        self.data(value.encode())

    def items(self, values, write):
        self.u32(len(values))
        for value in values:
            write(value)

    def program(self, program: Program):
        self.string(program.arch)
        self.items(program.steps, self.step)

    def step(self, step: Step):
        if isinstance(step, Fill):
            self.u32(0)
            self.u32(step.operand)
            self.i64(step.offset_bytes)
            self.i64(step.words)
            self.u32(step.word)
            return
        self.u32(1)
        self.string(step.kernel)
        self.raw(bytes.fromhex(step.sha256))
        self.string(step.symbol)
        for extents in (step.grid, step.block, step.cluster):
            for extent in extents:
                self.u32(extent)
        self.u32(step.shared_bytes)
        self.u32(int(step.programmatic))
        self.items(step.params, self.param)

    def param(self, param: Param):
        match param:
            case TensorMap():
                self.u32(0)
                self.u32(param.operand)
                self.i64(param.offset_bytes)
                self.u32(DTYPES.index(param.dtype))
                self.items(param.dims, self.i64)
                self.items(param.strides_bytes, self.i64)
                self.items(param.box, self.u32)
                self.items(param.element_strides, self.u32)
                self.u32(SWIZZLES.index(param.swizzle))
                self.u32(FILLS.index(param.fill))
                self.u32(L2_PROMOTIONS.index(param.l2_promotion))
            case Pointer():
                self.u32(1)
                self.u32(param.operand)
                self.i64(param.offset_bytes)
            case Int32():
                self.u32(2)
                self.i64(param.value)
            case Float32():
                self.u32(3)
                self.raw(struct.pack("<f", param.value))
            case Bytes():
                self.u32(4)
                self.data(param.data)


class _Reader:
    def __init__(self, data: bytes):
        self.data_in = data
        self.at = 0

    def raw(self, size: int) -> bytes:
        if size > len(self.data_in) - self.at:
            raise ValueError(f"launch plan ends early: {size} bytes wanted at byte {self.at} of {len(self.data_in)}")
        out = self.data_in[self.at : self.at + size]
        self.at += size
        return out

    def u32(self) -> int:
        return struct.unpack("<I", self.raw(4))[0]

    def i64(self) -> int:
        return struct.unpack("<q", self.raw(8))[0]

    def string(self) -> str:
        return self.raw(self.u32()).decode()

    def items(self, read) -> tuple:
        return tuple(read() for _ in range(self.u32()))

    def choice(self, table: tuple[str, ...]) -> str:
        index = self.u32()
        if index >= len(table):
            raise ValueError(f"launch plan has choice {index} of {table} at byte {self.at - 4}")
        return table[index]

    def plan(self) -> LaunchPlan:
        if self.raw(4) != MAGIC:
            raise ValueError("not a launch plan: wrong first four bytes")
        version = self.u32()
        if version != VERSION:
            raise ValueError(f"launch plan has version {version}; this package reads version {VERSION}")
        plan = LaunchPlan(self.string(), self.items(self.i64), self.items(self.i64), self.items(self.program))
        if self.at != len(self.data_in):
            raise ValueError(f"launch plan has {len(self.data_in) - self.at} bytes too many")
        return plan

    def program(self) -> Program:
        return Program(self.string(), self.items(self.step))

    def step(self) -> Step:
        kind = self.choice(("fill", "launch"))
        if kind == "fill":
            operand, offset, words, word = self.u32(), self.i64(), self.i64(), self.u32()
            return Fill(operand, words, word, offset)
        kernel, sha256, symbol = self.string(), self.raw(32).hex(), self.string()
        grid, block, cluster = ((self.u32(), self.u32(), self.u32()) for _ in range(3))
        shared_bytes, programmatic = self.u32(), self.choice(("no", "yes")) == "yes"
        return Launch(kernel, sha256, symbol, grid, block, self.items(self.param), cluster, shared_bytes, programmatic)

    def param(self) -> Param:
        kind = self.choice(("tensor map", "pointer", "int32", "float32", "bytes"))
        if kind == "tensor map":
            operand, offset = self.u32(), self.i64()
            dtype, dims, strides = self.choice(DTYPES), self.items(self.i64), self.items(self.i64)
            box, steps = self.items(self.u32), self.items(self.u32)
            swizzle, fill, promotion = self.choice(SWIZZLES), self.choice(FILLS), self.choice(L2_PROMOTIONS)
            return TensorMap(operand, dtype, dims, strides, box, offset, steps, swizzle, fill, promotion)
        if kind == "pointer":
            return Pointer(self.u32(), self.i64())
        if kind == "int32":
            return Int32(self.i64())
        if kind == "float32":
            return Float32(struct.unpack("<f", self.raw(4))[0])
        return Bytes(self.raw(self.u32()))
