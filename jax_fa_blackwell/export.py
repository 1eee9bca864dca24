"""Compiles kernels to cubins, without a GPU: ``python -m jax_fa_blackwell.export --arch sm_90a -o DIR``.

Each variant is compiled in a process of its own (the kernel DSL reads its environment when imported), as many at once
as there are processors. What is up to date (same sources, options and toolchain) is skipped.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence

from jax_fa_blackwell import cubins, elf
from jax_fa_blackwell.kernels import abi, registry
from jax_fa_blackwell.kernels.registry import KernelVariant
from jax_fa_blackwell.plan.target import TARGETS

_SECONDS = 600


class CompileError(RuntimeError):
    """A kernel did not compile, or its cubin is not what the kernel declares."""


@dataclasses.dataclass(frozen=True)
class Compiled:
    """One variant compiled for one architecture; ``cubin`` and ``ptx`` come from the same compilation.

    Attributes:
      variant, arch: what was compiled.
      cubin, ptx: the results.
      symbol: entry point.
      params: (offset, size) in bytes of each parameter, read back from the cubin.
      resources: registers, local and static shared memory, and the block size.
      source_hash: from ``KernelVariant.source_hash``.
      toolchain: from ``toolchain``.
      cuda: CUDA version of the assembler, as the cubin has it.
    """

    variant: KernelVariant
    arch: str
    cubin: bytes
    ptx: str
    symbol: str
    params: tuple[tuple[int, int], ...]
    resources: elf.KernelInfo
    source_hash: str
    toolchain: str
    cuda: str

    @property
    def sha256(self) -> str:
        """Digest of the cubin in hexadecimal: its name in a store."""
        return hashlib.sha256(self.cubin).hexdigest()

    def record(self) -> dict:
        """The manifest's entry."""
        names = self.variant.parameters
        return {
            **self.variant.to_json(),
            "arch": self.arch,
            "sha256": self.sha256,
            "bytes": len(self.cubin),
            "symbol": self.symbol,
            "parameters": [
                {"name": declared.name, "kind": declared.kind, "offset": offset, "size": size}
                for declared, (offset, size) in zip(names, self.params, strict=True)
            ],
            "parameter_base": self.resources.parameter_base,
            "registers": self.resources.registers,
            "local_bytes": self.resources.local_bytes,
            "shared_bytes": self.resources.shared_bytes,
            "block": list(self.resources.block) if self.resources.block else None,
            "source_hash": self.source_hash,
            "toolchain": self.toolchain,
            "cuda": self.cuda,
        }


def toolchain() -> str | None:
    """The installed kernel DSL as one line, or None where it is not installed."""
    try:
        if importlib.util.find_spec("cutlass") is None:
            return None
        version = importlib.metadata.version("nvidia-cutlass-dsl")
    except (ImportError, ValueError):  # ValueError: the module is blocked (sys.modules[...] = None)
        return None
    libraries = []
    for cuda in ("cu12", "cu13"):
        try:
            libraries.append(f"{cuda} {importlib.metadata.version(f'nvidia-cutlass-dsl-libs-{cuda}')}")
        except importlib.metadata.PackageNotFoundError:
            continue
    return f"nvidia-cutlass-dsl {version} ({', '.join(libraries) or 'no libraries'})"


def compile_variant(variant: KernelVariant, arch: str) -> Compiled:
    """Compiles one variant for one architecture.

    Raises:
      CompileError: the DSL is missing or failed, or the cubin's parameters differ from the kernel's declaration, or
        the kernel spills to local memory.
    """
    if arch not in variant.arches:
        raise ValueError(f"arch of {variant.name} must be one of {', '.join(variant.arches)}; got {arch!r}")
    tools = toolchain()
    if tools is None:
        raise CompileError("the kernel DSL is not installed: pip install 'jax_fa_blackwell[export]'")
    source_hash = variant.source_hash(arch)
    with tempfile.TemporaryDirectory(prefix="jax_fa_blackwell-") as folder:
        text = json.dumps(variant.to_json())
        command = [sys.executable, "-m", "jax_fa_blackwell.kernels.compile", text, arch, folder]
        package = str(pathlib.Path(__file__).parents[1])
        path = os.pathsep.join(filter(None, (package, os.environ.get("PYTHONPATH"))))
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=_SECONDS,
            env=os.environ | {"PYTHONPATH": path},
            check=False,
        )
        if done.returncode:
            raise CompileError(f"compiling {variant.name} for {arch} failed:\n{(done.stdout + done.stderr).strip()}")
        cubin = pathlib.Path(folder, "cubin").read_bytes()
        ptx = pathlib.Path(folder, "ptx").read_text()
    return checked(variant, arch, cubin, ptx, source_hash, tools)


def checked(variant: KernelVariant, arch: str, cubin: bytes, ptx: str, source_hash: str, tools: str) -> Compiled:
    """Reads the cubin back; CompileError if it is not what the kernel declares."""
    where = f"{variant.name} for {arch}"
    info = elf.read(cubin)
    if info.arch != arch or len(info.kernels) != 1:
        symbols = [kernel.symbol for kernel in info.kernels]
        raise CompileError(f"{where}: the cubin must hold one kernel for {arch}; it holds {symbols} for {info.arch}")
    (kernel,) = info.kernels
    expected = abi.table(variant.parameters, kernel.parameter_base)
    if kernel.parameters != expected:
        raise CompileError(f"{where}: parameters (offset, size) are declared {expected}; got {kernel.parameters}")
    if kernel.local_bytes:
        raise CompileError(f"{where}: {kernel.local_bytes} bytes of local memory a thread; kernels must not spill")
    return Compiled(variant, arch, cubin, ptx, kernel.symbol, kernel.parameters, kernel, source_hash, tools, info.cuda)


def up_to_date(store: cubins.Store, variant: KernelVariant, arch: str, ptx: bool = False) -> bool:
    """Whether the store has this cubin, whole, of these sources and by the installed toolchain, with PTX if asked."""
    try:
        cubin = store.get(variant, arch)
    except LookupError:
        return False
    return cubin.toolchain == toolchain() and (not ptx or cubin.path.with_suffix(".ptx").exists())


def export(
    variants: Sequence[KernelVariant],
    arches: Sequence[str],
    folder: str | os.PathLike[str],
    *,
    ptx: bool = False,
    jobs: int | None = None,
    progress: Callable[[int, int, str], None] = lambda done, total, what: None,
) -> list[cubins.Cubin]:
    """Compiles what is not up to date into a store and returns every cubin asked for.

    Args:
      variants: what to compile,
      arches: for which architectures; pairs that a variant does not support are left out.
      folder: the store; made if need be.
      ptx: also write the PTX of each compilation (and compile again where it is missing).
      jobs: processes at once; all processors by default.
      progress: called with the number done, the number in all, and what was done last.

    Raises:
      CompileError: something did not compile; what did is in the store.
    """
    store = cubins.Store(folder)
    pairs = [(variant, arch) for arch in arches for variant in variants if arch in variant.arches]

    def make(variant: KernelVariant, arch: str) -> str:
        if up_to_date(store, variant, arch, ptx):
            return f"{variant.name} {arch} is up to date"
        store.add(compile_variant(variant, arch), ptx=ptx)
        return f"{variant.name} {arch} compiled"

    errors = []
    with concurrent.futures.ThreadPoolExecutor(jobs or os.cpu_count() or 1) as pool:
        futures = {pool.submit(make, *pair): pair for pair in pairs}
        for done, future in enumerate(concurrent.futures.as_completed(futures), 1):
            error = future.exception()
            if error is None:
                what = future.result()
            else:
                variant, arch = futures[future]
                what = f"{variant.name} {arch} failed"
                errors.append(error)
            progress(done, len(pairs), what)
    if errors:
        raise CompileError(f"{len(errors)} of {len(pairs)} failed:\n" + "\n".join(map(str, errors)))
    return [store.get(*pair) for pair in pairs]


def show_progress(done: int, total: int, what: str) -> None:
    """A bar on a terminal, else a line for each step."""
    if not sys.stderr.isatty():
        print(f"[{done}/{total}] {what}", file=sys.stderr, flush=True)
        return
    width = 24
    bar = "#" * (width * done // total)
    end = "\n" if done == total else ""
    print(f"\r\033[K[{bar:<{width}}] {done}/{total} {what}", end=end, file=sys.stderr, flush=True)


def listing(variants: Sequence[KernelVariant], arches: Sequence[str], folder: pathlib.Path) -> str:
    """A table of variants and what the store has of them."""
    store = cubins.Store(folder)
    rows: list[tuple[str, ...]] = [("variant", "arch", "sets", "options", "store", "registers", "bytes", "CUDA")]
    for variant in variants:
        sets = ",".join(name for name, names in registry.SETS.items() if variant.name in names)
        options = " ".join(f"{name}={value}" for name, value in variant.options)
        for arch in arches:
            if arch not in variant.arches:
                continue
            record = {}
            try:
                cubin = store.get(variant, arch)
                record = store.records()[f"{variant.name}/{arch}"]
                state = "good" if cubin.toolchain == toolchain() or toolchain() is None else "other toolchain"
            except LookupError as error:
                state = next((word for word in ("stale", "damaged") if word in str(error)), "absent")
            figures = (str(record.get(name, "-")) for name in ("registers", "bytes", "CUDA"))
            rows.append((variant.name, arch, sets, options, state, *figures))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m jax_fa_blackwell.export", description="Compiles kernels to cubins, without a GPU."
    )
    parser.add_argument("--arch", nargs="+", choices=list(TARGETS), default=list(TARGETS), help="default: all")
    parser.add_argument("--set", choices=list(registry.SETS), default="core", help="which variants; default: core")
    parser.add_argument("--kernel", nargs="+", choices=list(registry.VARIANTS), help="these variants instead of a set")
    parser.add_argument("-o", "--output", type=pathlib.Path, help="folder to write to; default: the user's cache")
    parser.add_argument("--ptx", action="store_true", help="keep the PTX of each compilation beside its cubin")
    parser.add_argument("--prune", action="store_true", help="remove cubins that the manifest does not name")
    parser.add_argument("--jobs", type=int, help="processes at once; default: all processors")
    parser.add_argument("--list", action="store_true", help="print a table of the variants and end")
    args = parser.parse_args(arguments)
    variants = tuple(map(registry.get_variant, args.kernel)) if args.kernel else registry.get_set(args.set)
    folder = args.output or cubins.cache_folder()
    if args.list:
        print(listing(variants, args.arch, folder))
        return 0
    began = time.monotonic()
    try:
        made = export(variants, args.arch, folder, ptx=args.ptx, jobs=args.jobs, progress=show_progress)
    except CompileError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if args.prune:
        cubins.Store(folder).prune()
    size = sum(cubin.path.stat().st_size for cubin in made)
    print(f"{len(made)} cubins, {size / 1e6:.2f} MB, in {folder} ({time.monotonic() - began:.1f} s)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
