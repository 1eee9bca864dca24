"""The native library: where it is, and its C interface (native/capi.cc)."""

from __future__ import annotations

import ctypes
import functools
import json
import os
import pathlib

ROOT = pathlib.Path(__file__).resolve().parents[2]
BUILD = "cmake -S tests/emulator/native -B build/emulator -DCMAKE_BUILD_TYPE=Release && cmake --build build/emulator"


class Launch(ctypes.Structure):
    """Mirror of EmuLaunch."""

    _fields_ = (
        ("entry", ctypes.c_char_p),
        ("grid", ctypes.c_uint32 * 3),
        ("block", ctypes.c_uint32 * 3),
        ("cluster", ctypes.c_uint32 * 3),
        ("shared_bytes", ctypes.c_uint32),
        ("params", ctypes.c_char_p),
        ("param_bytes", ctypes.c_uint64),
        ("range_count", ctypes.c_uint64),
        ("range_begin", ctypes.POINTER(ctypes.c_uint64)),
        ("range_bytes", ctypes.POINTER(ctypes.c_uint64)),
        ("range_writable", ctypes.POINTER(ctypes.c_uint8)),
        ("range_name", ctypes.POINTER(ctypes.c_char_p)),
        ("seed", ctypes.c_uint64),
        ("async_mode", ctypes.c_uint32),
        ("spurious_wait", ctypes.c_double),
        ("threads", ctypes.c_uint32),
        ("trace", ctypes.c_uint32),
        ("check_leaks", ctypes.c_uint32),
        ("spin_limit", ctypes.c_uint64),
        ("events", ctypes.c_uint32),
    )


@functools.cache
def library() -> ctypes.CDLL:
    """Loads build/emulator/libptx_emulator.so, or the file that EMULATOR_LIBRARY names.

    Raises:
      FileNotFoundError: it has not been built; the message is the command that builds it.
    """
    path = pathlib.Path(os.environ.get("EMULATOR_LIBRARY", ROOT / "build/emulator/libptx_emulator.so"))
    if not path.exists():
        raise FileNotFoundError(f"{path} is missing; build it in {ROOT} with: {BUILD}")
    lib = ctypes.CDLL(str(path))
    error = ctypes.POINTER(ctypes.c_void_p)
    lib.emu_load.restype = ctypes.c_void_p
    lib.emu_load.argtypes = (ctypes.c_char_p, ctypes.c_uint64, error)
    lib.emu_free.argtypes = (ctypes.c_void_p,)
    lib.emu_free_string.argtypes = (ctypes.c_void_p,)
    lib.emu_describe.restype = ctypes.c_void_p
    lib.emu_describe.argtypes = (ctypes.c_void_p,)
    u32s, u64s = ctypes.POINTER(ctypes.c_uint32), ctypes.POINTER(ctypes.c_uint64)
    lib.emu_tensor_map.argtypes = (
        *(ctypes.c_char_p, ctypes.c_int, ctypes.c_int, ctypes.c_uint64, u64s, u64s, u32s, u32s),
        *(ctypes.c_int, ctypes.c_int, ctypes.c_char_p, ctypes.c_uint64),
    )
    lib.emu_launch.restype = ctypes.c_void_p
    lib.emu_launch.argtypes = (ctypes.c_void_p, ctypes.POINTER(Launch), error)
    return lib


def take_json(address: int):
    """Reads and frees a JSON string that the library made."""
    try:
        return json.loads(ctypes.string_at(address))
    finally:
        library().emu_free_string(address)
