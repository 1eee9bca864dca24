"""Loading programs and launching kernels."""

from __future__ import annotations

import ctypes
import dataclasses
import math
import struct
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np

from emulator.library import Launch, library, take_json
from emulator.report import Report, Verdict

ALIGNMENT = 256  # bytes, of a device pointer
# Element types in the order of TmaType (native/tma.h): name and bytes.
_MAP_DTYPES = (
    ("u8", 1),
    ("u16", 2),
    ("u32", 4),
    ("s32", 4),
    ("u64", 8),
    ("s64", 8),
    ("f16", 2),
    ("f32", 4),
    ("f64", 8),
    ("bf16", 2),
    ("f32_ftz", 4),
    ("tf32", 4),
    ("tf32_ftz", 4),
)
_LONG_NAMES = {
    "uint8": "u8",
    "uint16": "u16",
    "uint32": "u32",
    "int32": "s32",
    "uint64": "u64",
    "int64": "s64",
    "float16": "f16",
    "float32": "f32",
    "float64": "f64",
    "bfloat16": "bf16",
}
_SWIZZLES = ("none", "32B", "64B", "128B", "128B_ATOM_32B")
_FILLS = ("zero", "nan")
_ASYNC = ("eager", "lazy", "random")


@dataclasses.dataclass(frozen=True)
class Schedule:
    """Which of the allowed orders of events a run takes. Results must not depend on it.

    Attributes:
      seed: of the order of warps and the lengths of their turns.
      async_: "eager": asynchronous copies and MMAs land at once; "lazy": when nothing else can run; "random": between.
      spurious_wait: probability that try_wait returns false though its phase is complete.
      threads: host threads; 0 is one a core. The result does not depend on it.
    """

    seed: int = 0
    async_: str = "random"
    spurious_wait: float = 0.0
    threads: int = 0

    def __post_init__(self):
        if self.async_ not in _ASYNC:
            raise ValueError(f"async_ must be one of {', '.join(_ASYNC)}; got {self.async_!r}")
        if not 0 <= self.spurious_wait < 1:
            raise ValueError(f"spurious_wait must be a probability below 1; got {self.spurious_wait}")


@dataclasses.dataclass(frozen=True)
class Checks:
    """Checks that can be turned off or tuned; all others are always on.

    Attributes:
      leaks: rules for the end of a CTA (operations in flight, byte counts, Tensor Memory, named barriers).
      spin_limit: warp instructions of a cluster without any store, barrier operation or copy after which threads that
        poll count as deadlocked.
      events: count memory and synchronisation events in the report, on one host thread.
    """

    leaks: bool = True
    spin_limit: int = 4_000_000
    events: bool = False


@dataclasses.dataclass(frozen=True, eq=False)
class Pointer:
    """The device address of a byte inside an array; the kernel may reach all of the array from it."""

    array: np.ndarray
    offset_bytes: int = 0

    def __post_init__(self):
        begin, end = _bounds(self.array)
        if not 0 <= self.offset_bytes <= end - begin:
            raise ValueError(f"offset_bytes must be 0 to {end - begin}; got {self.offset_bytes}")


@dataclasses.dataclass(frozen=True, eq=False)
class TensorMap:
    """A TMA descriptor of a numpy array, by the rules of cuTensorMapEncodeTiled. Innermost dimension first.

    Attributes:
      array: the memory; the kernel may write to it if it is writable.
      dtype: "bf16", "f16", "f32", "tf32", "u8", ... (or numpy's names).
      dims: extents in elements.
      strides_bytes: of dimensions 1 and up.
      box: extents of the tile in elements.
      element_strides: steps inside the box; None means all 1.
      swizzle: "none", "32B", "64B", "128B" or "128B_ATOM_32B".
      fill: of elements outside the tensor, "zero" or "nan".
      offset_bytes: where the tensor begins in the array.
    """

    array: np.ndarray
    dtype: str
    dims: Sequence[int]
    strides_bytes: Sequence[int]
    box: Sequence[int]
    element_strides: Sequence[int] | None = None
    swizzle: str = "none"
    fill: str = "zero"
    offset_bytes: int = 0

    def __post_init__(self):
        name = _LONG_NAMES.get(self.dtype, self.dtype)
        names = [known for known, _ in _MAP_DTYPES]
        if name not in names:
            raise ValueError(f"dtype must be one of {', '.join(names)}; got {self.dtype!r}")
        for field, value, known in (("swizzle", self.swizzle, _SWIZZLES), ("fill", self.fill, _FILLS)):
            if value not in known:
                raise ValueError(f"{field} must be one of {', '.join(known)}; got {value!r}")
        rank = len(self.dims)
        if not 1 <= rank <= 5:
            raise ValueError(f"dims must have 1 to 5 extents; got {tuple(self.dims)}")
        if len(self.strides_bytes) != rank - 1:
            raise ValueError(f"strides_bytes must have {rank - 1} values; got {tuple(self.strides_bytes)}")
        if any(stride >= 2**40 for stride in self.strides_bytes):
            raise ValueError(f"strides_bytes must be below 2^40; got {tuple(self.strides_bytes)}")
        if len(self.box) != rank:
            raise ValueError(f"box must have {rank} extents; got {tuple(self.box)}")
        if self.element_strides is not None and len(self.element_strides) != rank:
            raise ValueError(f"element_strides must have {rank} values; got {tuple(self.element_strides)}")
        for field in ("dims", "strides_bytes", "box", "element_strides"):
            if any(v < 0 for v in getattr(self, field) or ()):
                raise ValueError(f"{field} must not be negative; got {tuple(getattr(self, field))}")
        if self.offset_bytes < 0 or self.offset_bytes % 16:
            raise ValueError(f"offset_bytes must be a non-negative multiple of 16; got {self.offset_bytes}")
        object.__setattr__(self, "dtype", name)

    @property
    def element_bytes(self) -> int:
        """Bytes of one element."""
        return dict(_MAP_DTYPES)[self.dtype]

    def encode(self, base: int) -> bytes:
        """The 128 bytes of struct TensorMapData (native/tma.h) for an array at device address `base`.

        Raises:
          ValueError: a field breaks a rule of cuTensorMapEncodeTiled; the message says which.
        """
        rank = len(self.dims)
        data, error = ctypes.create_string_buffer(128), ctypes.create_string_buffer(256)
        refused = library().emu_tensor_map(
            data,
            [name for name, _ in _MAP_DTYPES].index(self.dtype),
            rank,
            base + self.offset_bytes,
            (ctypes.c_uint64 * rank)(*self.dims),
            (ctypes.c_uint64 * rank)(*self.strides_bytes),
            (ctypes.c_uint32 * rank)(*self.box),
            (ctypes.c_uint32 * rank)(*(self.element_strides or [1] * rank)),
            _SWIZZLES.index(self.swizzle),
            _FILLS.index(self.fill),
            error,
            len(error),
        )
        if refused:
            raise ValueError(f"tensor map: {error.value.decode()}")
        return data.raw


def _bounds(array: np.ndarray) -> tuple[int, int]:
    """First byte and one past the last byte of an array's memory."""
    begin = array.ctypes.data
    if array.size == 0:
        return begin, begin
    if any(stride < 0 for stride in array.strides):
        raise ValueError(f"arrays with negative strides are not supported; got strides {array.strides}")
    last = sum((extent - 1) * stride for extent, stride in zip(array.shape, array.strides, strict=True))
    return begin, begin + last + array.itemsize


class _Memory:
    """The device buffers of one launch: arrays that overlap share one, and each begins at a multiple of 256 bytes.

    Memory that is not so aligned is copied into memory that is, and back after the launch.
    """

    def __init__(self, arrays: Sequence[tuple[str, np.ndarray]]):
        spans = []
        for name, array in arrays:
            begin, end = _bounds(array)
            spans.append([begin, end, array.flags.writeable, name])
        spans.sort(key=lambda span: (span[0], span[1]))
        merged: list[list] = []
        for span in spans:
            if merged and span[0] < merged[-1][1]:
                merged[-1][1] = max(merged[-1][1], span[1])
                merged[-1][2] = merged[-1][2] or span[2]
                merged[-1][3] += f" and {span[3]}"
            elif not merged or span[:2] != merged[-1][:2]:
                merged.append(span)
        self.begins: list[int] = []
        self.sizes: list[int] = []
        self.writable: list[bool] = []
        self.names: list[str] = []
        self._host: list[tuple[int, int]] = []
        self._staging: list[np.ndarray | None] = []
        for begin, end, writable, name in merged:
            size = end - begin
            staging, device = None, begin
            if begin % ALIGNMENT or size == 0:
                staging = np.empty(size + ALIGNMENT, np.uint8)
                device = -(-staging.ctypes.data // ALIGNMENT) * ALIGNMENT
                ctypes.memmove(device, begin, size)
            self._host.append((begin, end))
            self._staging.append(staging)
            self.begins.append(device)
            self.sizes.append(size)
            self.writable.append(bool(writable))
            self.names.append(name)

    def address(self, array: np.ndarray) -> int:
        begin, end = _bounds(array)
        for (host, past), device in zip(self._host, self.begins, strict=True):
            if host <= begin and end <= past:
                return device + begin - host
        raise AssertionError("array was not registered")

    def copy_back(self) -> None:
        for (begin, end), device, writable in zip(self._host, self.begins, self.writable, strict=True):
            if device != begin and writable:
                ctypes.memmove(begin, device, end - begin)


@dataclasses.dataclass(frozen=True)
class Entry:
    """A kernel of a program.

    Attributes:
      name: symbol.
      params: (offset, size, alignment) of each parameter, in bytes.
      reqntid, maxntid, cluster: extents that the kernel asks for, zeros where it does not.
      static_shared: bytes; register_bytes: of a warp's emulated register file; local_bytes: a thread.
    """

    name: str
    params: tuple[tuple[int, int, int], ...]
    reqntid: tuple[int, int, int]
    maxntid: tuple[int, int, int]
    cluster: tuple[int, int, int]
    static_shared: int
    register_bytes: int
    local_bytes: int
    maxnreg: int
    minnctapersm: int


class Program:
    """A PTX module, decoded. Make it with `load`.

    Attributes:
      target: e.g. "sm_100a".
      entries: its kernels by name.
    """

    def __init__(self, handle: int):
        self._handle = handle
        weakref.finalize(self, library().emu_free, handle)
        about = take_json(library().emu_describe(handle))
        self.target: str = about["target"]
        self.instructions: int = about["instructions"]
        self.entries = {}
        for entry in about["entries"]:
            fields: dict[str, Any] = dict(entry)
            for name in ("reqntid", "maxntid", "cluster"):
                fields[name] = tuple(entry[name])
            fields["params"] = tuple(tuple(param) for param in entry["params"])
            self.entries[entry["name"]] = Entry(**fields)

    def _entry(self, name: str | None) -> Entry:
        if name is None:
            if len(self.entries) != 1:
                raise ValueError(
                    f"entry must be one of {', '.join(self.entries) or 'none'}: the program has several or none"
                )
            return next(iter(self.entries.values()))
        if name not in self.entries:
            raise ValueError(f"entry must be one of {', '.join(self.entries)}; got {name!r}")
        return self.entries[name]

    def launch(
        self,
        entry: str | None = None,
        *,
        grid: Sequence[int],
        block: Sequence[int],
        cluster: Sequence[int] = (1, 1, 1),
        shared_bytes: int = 0,
        params: Sequence[Any] = (),
        check: Checks | None = None,
        schedule: Schedule | None = None,
        trace: str | None = None,
    ) -> Report:
        """Runs a kernel to its end.

        Args:
          entry: its name; None if the program has only one.
          grid, block, cluster: extents in x, y, z; grid in blocks.
          shared_bytes: dynamic shared memory of a block.
          params: one for each parameter: a numpy array (passed as the device address of its first element; read-only if
            the array is), a Pointer, a TensorMap, a numpy scalar, or bytes.
          check: what to check.
          schedule: which order of events to take.
          trace: "role" records rows of time per warp in the report.

        Returns:
          The counts of the run. Arrays hold what the kernel wrote.

        Raises:
          Verdict: the program is wrong, or does not fit the launch. Arrays hold what was written until then.
          ValueError: the arguments do not fit the kernel.
        """
        if trace not in (None, "role"):
            raise ValueError(f'trace must be None or "role"; got {trace!r}')
        kernel = self._entry(entry)
        check, schedule = check or Checks(), schedule or Schedule()
        if len(params) != len(kernel.params):
            raise ValueError(f"{kernel.name} has {len(kernel.params)} parameters; got {len(params)}")
        arrays = []
        for i, param in enumerate(params):
            array = param.array if isinstance(param, TensorMap | Pointer) else param
            if isinstance(array, np.ndarray):
                arrays.append((f"parameter {i}", array))
        memory = _Memory(arrays)
        values = [_encode(i, param, memory) for i, param in enumerate(params)]
        for i, (value, (_, size, _)) in enumerate(zip(values, kernel.params, strict=True)):
            if len(value) != size:
                raise ValueError(
                    f"parameter {i} of {kernel.name} has {size} bytes; got {len(value)} ({type(params[i]).__name__})"
                )
        last = max((offset + size for offset, size, _ in kernel.params), default=0)
        buffer = bytearray(last)
        for value, (offset, size, _) in zip(values, kernel.params, strict=True):
            buffer[offset : offset + size] = value
        for name, extents in (("grid", grid), ("block", block), ("cluster", cluster)):
            if len(extents) != 3 or not all(0 < e < 2**32 for e in extents):
                raise ValueError(f"{name} must be three positive extents; got {tuple(extents)}")
        count = len(memory.begins)
        request = Launch(
            entry=kernel.name.encode(),
            grid=tuple(grid),
            block=tuple(block),
            cluster=tuple(cluster),
            shared_bytes=shared_bytes,
            params=bytes(buffer),
            param_bytes=last,
            range_count=count,
            range_begin=(ctypes.c_uint64 * count)(*memory.begins),
            range_bytes=(ctypes.c_uint64 * count)(*memory.sizes),
            range_writable=(ctypes.c_uint8 * count)(*memory.writable),
            range_name=(ctypes.c_char_p * count)(*(name.encode() for name in memory.names)),
            seed=schedule.seed % 2**64,
            async_mode=_ASYNC.index(schedule.async_),
            spurious_wait=schedule.spurious_wait,
            threads=schedule.threads,
            trace=trace is not None,
            check_leaks=check.leaks,
            spin_limit=check.spin_limit,
            events=check.events,
        )
        error = ctypes.c_void_p()
        try:
            result = library().emu_launch(self._handle, ctypes.byref(request), ctypes.byref(error))
        finally:
            memory.copy_back()
        if error.value:
            raise Verdict.from_json(take_json(error.value))
        return Report.from_json(take_json(result))


def _encode(index: int, param: Any, memory: _Memory) -> bytes:
    if isinstance(param, np.ndarray):
        return struct.pack("<Q", memory.address(param))
    if isinstance(param, Pointer):
        return struct.pack("<Q", memory.address(param.array) + param.offset_bytes)
    if isinstance(param, TensorMap):
        return param.encode(memory.address(param.array))
    if isinstance(param, np.generic):
        return param.tobytes()
    if isinstance(param, bytes | bytearray):
        return bytes(param)
    raise ValueError(
        f"parameter {index} must be a numpy array, Pointer, TensorMap, numpy scalar or bytes; "
        f"got {type(param).__name__} {param!r}"
    )


def load(ptx: str) -> Program:
    """Parses and decodes a PTX module.

    Raises:
      Verdict: "parse" or "unsupported", with the line at fault.
    """
    text = ptx.encode()
    error = ctypes.c_void_p()
    handle = library().emu_load(text, len(text), ctypes.byref(error))
    if error.value:
        raise Verdict.from_json(take_json(error.value))
    return Program(handle)


def aligned_empty(size: int, fill_word: int | None = None) -> np.ndarray:
    """`size` bytes at a multiple of 256, filled with a 32-bit pattern if one is given."""
    memory = np.empty(math.ceil(size / 4) * 4 + ALIGNMENT, np.uint8)
    begin = -memory.ctypes.data % ALIGNMENT
    memory = memory[begin : begin + math.ceil(size / 4) * 4]
    if fill_word is not None:
        memory.view(np.uint32)[:] = fill_word
    return memory[:size]
