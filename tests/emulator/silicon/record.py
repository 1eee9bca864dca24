"""Runs every micro kernel on the GPU of this machine and writes the results to one file.

    python3 tests/emulator/silicon/record.py --out h200.npz

Needs Linux, numpy, an NVIDIA driver and a GPU of compute capability 9.0; nothing else. The PTX is compiled by the
driver. Every kernel is on its own: a child process runs them one after another, and when one hangs or breaks the
context, the parent ends the child, notes the error and starts another child with the rest.
"""

import argparse
import ctypes
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time

import numpy as np

# As a script this file is in no package; its neighbours are imported as the package `silicon`, which needs numpy only.
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
from silicon import all_cases
from silicon.micro import MAP_DTYPES, SWIZZLES, Map, Micro, Pointer

SECONDS_PER_KERNEL = 6.0


class CudaError(RuntimeError):
    pass


class _Value(ctypes.Union):
    _fields_ = [("pad", ctypes.c_char * 64), ("dim", ctypes.c_uint * 3)]


class _Attribute(ctypes.Structure):
    _fields_ = [("id", ctypes.c_uint), ("pad", ctypes.c_char * 4), ("value", _Value)]


class _Config(ctypes.Structure):
    _fields_ = [
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("count", ctypes.c_uint),
    ]


_CLUSTER_DIMENSION = 4
_JIT_ERROR_LOG, _JIT_ERROR_LOG_BYTES = 5, 6
_CAPABILITY_MAJOR, _CAPABILITY_MINOR = 75, 76


class Device:
    """The first GPU, through the driver's C interface."""

    def __init__(self):
        self.cuda = ctypes.CDLL("libcuda.so.1")
        self.call("cuInit", 0)
        device = ctypes.c_int()
        self.call("cuDeviceGet", ctypes.byref(device), 0)
        context = ctypes.c_void_p()
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self.call("cuCtxSetCurrent", context)
        name = ctypes.create_string_buffer(128)
        self.call("cuDeviceGetName", name, 128, device)
        version = ctypes.c_int()
        self.call("cuDriverGetVersion", ctypes.byref(version))
        capability = []
        for attribute in (_CAPABILITY_MAJOR, _CAPABILITY_MINOR):
            value = ctypes.c_int()
            self.call("cuDeviceGetAttribute", ctypes.byref(value), attribute, device)
            capability.append(value.value)
        self.description = {"name": name.value.decode(), "driver": version.value, "capability": capability}

    def call(self, function: str, *arguments):
        status = getattr(self.cuda, function)(*arguments)
        if status:
            text = ctypes.c_char_p()
            self.cuda.cuGetErrorName(status, ctypes.byref(text))
            raise CudaError(f"{function}: {(text.value or b'?').decode()} ({status})")

    def load(self, ptx: str) -> ctypes.c_void_p:
        log = ctypes.create_string_buffer(8192)
        options = (ctypes.c_int * 2)(_JIT_ERROR_LOG, _JIT_ERROR_LOG_BYTES)
        values = (ctypes.c_void_p * 2)(ctypes.addressof(log), 8192)
        module = ctypes.c_void_p()
        try:
            self.call("cuModuleLoadDataEx", ctypes.byref(module), ptx.encode() + b"\0", 2, options, values)
        except CudaError as error:
            raise CudaError(f"{error}: {log.value.decode(errors='replace')}") from None
        return module

    def tensor_map(self, parameter: Map, address: int) -> ctypes.Array:
        rank = len(parameter.dims)
        storage = ctypes.create_string_buffer(192)
        start = -ctypes.addressof(storage) % 64
        aligned = (ctypes.c_char * 128).from_buffer(storage, start)
        steps = parameter.element_strides or (1,) * rank
        self.call(
            "cuTensorMapEncodeTiled",
            ctypes.byref(aligned),
            MAP_DTYPES[parameter.dtype][0],
            ctypes.c_uint(rank),
            ctypes.c_void_p(address + parameter.offset_bytes),
            (ctypes.c_uint64 * rank)(*parameter.dims),
            (ctypes.c_uint64 * max(rank - 1, 1))(*parameter.strides_bytes),
            (ctypes.c_uint32 * rank)(*parameter.box),
            (ctypes.c_uint32 * rank)(*steps),
            0,  # no interleave
            SWIZZLES.index(parameter.swizzle),
            0,  # no L2 promotion
            ("zero", "nan").index(parameter.fill),
        )
        return aligned

    def run(self, case: Micro) -> dict[str, np.ndarray]:
        """Results by buffer name. Raises CudaError."""
        module = self.load(case.ptx)
        function = ctypes.c_void_p()
        self.call("cuModuleGetFunction", ctypes.byref(function), module, b"kernel")
        memory: dict[str, int] = {}
        for name, array in case.buffers.items():
            pointer = ctypes.c_uint64()
            self.call("cuMemAlloc_v2", ctypes.byref(pointer), ctypes.c_size_t(array.nbytes))
            source = np.ascontiguousarray(array)
            self.call("cuMemcpyHtoD_v2", pointer, ctypes.c_void_p(source.ctypes.data), ctypes.c_size_t(source.nbytes))
            memory[name] = pointer.value or 0
        values = []
        for parameter in case.params:
            if isinstance(parameter, Map):
                values.append(self.tensor_map(parameter, memory[parameter.buffer]))
            elif isinstance(parameter, Pointer):
                values.append(ctypes.c_uint64(memory[parameter.buffer] + parameter.offset))
            else:
                values.append(ctypes.create_string_buffer(parameter.tobytes(), parameter.nbytes))
        pointers = (ctypes.c_void_p * len(values))(*[ctypes.addressof(v) for v in values])
        attribute = _Attribute(id=_CLUSTER_DIMENSION)
        attribute.value.dim = (ctypes.c_uint * 3)(*case.cluster)
        config = _Config((ctypes.c_uint * 3)(*case.grid), (ctypes.c_uint * 3)(*case.block), 0, None)
        config.attributes = ctypes.pointer(attribute)
        config.count = 1 if case.cluster != (1, 1, 1) else 0
        self.call("cuLaunchKernelEx", ctypes.byref(config), function, pointers, None)
        self.call("cuCtxSynchronize")
        results = {}
        for name in case.outputs:
            out = np.empty_like(case.buffers[name])
            self.call(
                "cuMemcpyDtoH_v2",
                ctypes.c_void_p(out.ctypes.data),
                ctypes.c_uint64(memory[name]),
                ctypes.c_size_t(out.nbytes),
            )
            results[name] = out
        for address in memory.values():
            self.call("cuMemFree_v2", ctypes.c_uint64(address))
        self.call("cuModuleUnload", module)
        return results


def child(folder: pathlib.Path, names: list[str]):
    """Runs the named kernels; for each writes NAME.npz, or NAME.error and stops, as the context may be broken."""
    cases = {case.name: case for case in all_cases()}
    device = Device()
    (folder / "device.json").write_text(json.dumps(device.description))
    for name in names:
        (folder / "now").write_text(name)
        try:
            results = device.run(cases[name])
        except Exception as error:  # a broken kernel must not lose the others
            (folder / f"{name}.error").write_text(f"{type(error).__name__}: {error}")
            return
        partial = folder / f"{name}.tmp.npz"
        np.savez(partial, **results)  # pyright: ignore[reportArgumentType]
        partial.rename(folder / f"{name}.npz")


def _wait(process: subprocess.Popen, folder: pathlib.Path, seconds: float) -> bool:
    """False if nothing new appeared in `folder` for that long."""
    seen, since = -1, time.monotonic()
    while process.poll() is None:
        time.sleep(0.05)
        count = sum(1 for _ in folder.iterdir())
        if count != seen:
            seen, since = count, time.monotonic()
        elif time.monotonic() - since > seconds:
            process.kill()
            process.wait()
            return False
    return True


def record(out: pathlib.Path, names: list[str] | None, budget: float, merge: pathlib.Path | None):
    """Runs the named kernels, or all, and writes `out`; what `merge` holds of other kernels is kept."""
    start = time.monotonic()
    todo = names or [case.name for case in all_cases()]
    with tempfile.TemporaryDirectory() as temporary:
        folder = pathlib.Path(temporary)
        errors: dict[str, str] = {}
        left = list(todo)
        failures_to_start = 0
        while left and time.monotonic() - start < budget and failures_to_start < 3:
            command = [sys.executable, os.path.abspath(__file__), "--child", str(folder), *left]
            process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
            alive = _wait(process, folder, SECONDS_PER_KERNEL)
            output = (process.stdout.read() if process.stdout else b"").decode(errors="replace")
            now = (folder / "now").read_text() if (folder / "now").exists() else ""
            before = len(left)
            for name in left:
                if (folder / f"{name}.error").exists():
                    errors[name] = (folder / f"{name}.error").read_text()
            if not alive and now in left and not (folder / f"{now}.npz").exists():
                errors[now] = f"no result within {SECONDS_PER_KERNEL} s"
            left = [n for n in left if not (folder / f"{n}.npz").exists() and n not in errors]
            if len(left) == before:
                failures_to_start += 1
                print(f"child made no progress (exit {process.returncode}): {output[-2000:]}", flush=True)
        for name in left:
            errors.setdefault(name, "not run")
        arrays: dict[str, np.ndarray] = {}
        for name in todo:
            path = folder / f"{name}.npz"
            if path.exists():
                with np.load(path) as data:
                    arrays |= {f"{name}/{key}": data[key] for key in data.files}
        description = json.loads((folder / "device.json").read_text()) if (folder / "device.json").exists() else {}
    ran = len(todo) - len(errors)
    digests = {case.name: case.digest() for case in all_cases() if case.name in todo}
    if merge:
        known = {case.name for case in all_cases()} - set(todo)
        with np.load(merge) as old:
            arrays = {k: old[k] for k in old.files if k.split("/")[0] in known} | arrays
            before = json.loads(old["about"].tobytes())
        errors = {name: text for name, text in before["errors"].items() if name in known} | errors
        digests = {name: text for name, text in before["digests"].items() if name in known} | digests
        description = description or before["device"]
    about = {"device": description, "errors": errors, "digests": digests}
    arrays["about"] = np.frombuffer(json.dumps(about).encode(), np.uint8)
    np.savez_compressed(out, **arrays)  # pyright: ignore[reportArgumentType]
    seconds = time.monotonic() - start
    print(f"{ran} of {len(todo)} micro kernels ran on {description}, {seconds:.1f} s, {out.stat().st_size} bytes")
    for name, error in errors.items():
        print(f"  {name}: {error}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path(__file__).with_name("h200.npz"))
    parser.add_argument("--only", nargs="*", help="names of micro kernels; all if not given")
    parser.add_argument("--match", help="instead of --only: all micro kernels whose names begin with this")
    parser.add_argument("--merge", type=pathlib.Path, help="an earlier file, whose other results are kept")
    parser.add_argument("--budget", type=float, default=85.0, help="seconds after which no further child is started")
    parser.add_argument("--child", nargs="+", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        child(pathlib.Path(arguments.child[0]), arguments.child[1:])
        return
    names = arguments.only
    if arguments.match:
        names = [case.name for case in all_cases() if case.name.startswith(arguments.match)]
        if names == [] or arguments.only:
            parser.error(f"--match {arguments.match!r} names no micro kernel, or stands beside --only")
    record(arguments.out, names, arguments.budget, arguments.merge)


if __name__ == "__main__":
    main()
