"""Finds the cubin of a kernel variant: packaged with the wheel, in the user's cache, or compiled now.

A store is a folder with one ``<sha256>.cubin`` a kernel and ``manifest.json``, which says for each variant and
architecture which cubin it is, its symbol, parameters and resources. Several processes may use one at once: files
appear whole (written aside, then renamed) and the manifest is changed under a lock. A cubin is hashed before it is
used; an entry that is damaged or made from other sources counts as absent and is made again.

Environment: ``JAX_FA_BLACKWELL_CACHE`` names the user's cache; by default it is ``jax_fa_blackwell`` in
``$XDG_CACHE_HOME`` or ``~/.cache``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import hashlib
import json
import os
import pathlib
import stat
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from jax_fa_blackwell.kernels import abi
from jax_fa_blackwell.kernels.registry import KernelVariant

if TYPE_CHECKING:
    from jax_fa_blackwell.export import Compiled

PACKAGED = pathlib.Path(__file__).parent / "cubins"
MANIFEST = "manifest.json"
FORMAT = 1
_PRIVATE = 0o700


class CubinNotFoundError(RuntimeError):
    """No usable cubin, and no means to compile one here; the message has the command that makes it."""


@dataclasses.dataclass(frozen=True)
class Cubin:
    """A verified cubin of a store.

    Attributes:
      variant, arch: what it is.
      sha256: hexadecimal digest, and the file's name in ``folder``.
      symbol: entry point.
      params: (offset, size) in bytes of each parameter.
      block: threads of a block in x, y, z.
      registers, shared_bytes: of a thread, and static of a block.
      toolchain: what compiled it.
      folder: the store.
    """

    variant: KernelVariant
    arch: str
    sha256: str
    symbol: str
    params: tuple[tuple[int, int], ...]
    block: tuple[int, int, int]
    registers: int
    shared_bytes: int
    toolchain: str
    folder: pathlib.Path

    @property
    def path(self) -> pathlib.Path:
        """The file."""
        return self.folder / f"{self.sha256}.cubin"

    def read(self) -> bytes:
        """The file's bytes."""
        return self.path.read_bytes()


class Store:
    """A folder of cubins and its manifest."""

    def __init__(self, folder: str | os.PathLike[str]):
        self.folder = pathlib.Path(folder)

    def records(self) -> dict[str, dict[str, Any]]:
        """The manifest's entries by ``"variant/arch"``; empty where there is no manifest.

        Raises:
          ValueError: the manifest is damaged or of another format.
        """
        path = self.folder / MANIFEST
        try:
            manifest = json.loads(path.read_bytes())
        except FileNotFoundError:
            return {}
        except ValueError as error:
            raise ValueError(f"{path} is damaged: {error}") from error
        if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
            raise ValueError(f"{path} is not a manifest of format {FORMAT}")
        return manifest["cubins"]

    def get(self, variant: KernelVariant, arch: str) -> Cubin:
        """The verified cubin.

        Raises:
          LookupError: the store has none; the message says whether it is absent, stale or damaged.
        """
        try:
            record = self.records().get(_key(variant, arch))
            if record is None:
                raise LookupError(f"not in {self.folder}")
            if record["source_hash"] != variant.source_hash(arch):
                raise LookupError(f"the one in {self.folder} is stale: made from other sources")
            cubin = Cubin(
                variant=variant,
                arch=arch,
                sha256=record["sha256"],
                symbol=record["symbol"],
                params=tuple((p["offset"], p["size"]) for p in record["parameters"]),
                block=tuple(record["block"]),
                registers=record["registers"],
                shared_bytes=record["shared_bytes"],
                toolchain=record["toolchain"],
                folder=self.folder,
            )
            if cubin.params != abi.table(variant.parameters, record["parameter_base"]):
                raise LookupError(f"the one in {self.folder} has parameters {cubin.params}, not the kernel's")
            found = hashlib.sha256(cubin.read()).hexdigest()
        except (ValueError, KeyError, TypeError, OSError) as error:
            raise LookupError(f"the one in {self.folder} is damaged: {error}") from error
        if found != cubin.sha256:
            raise LookupError(f"{cubin.path} is damaged: its bytes have sha256 {found}")
        return cubin

    def add(self, compiled: Compiled, *, ptx: bool = False) -> Cubin:
        """Writes a compiled variant and its entry; ``ptx`` writes ``<sha256>.ptx`` beside the cubin."""
        self.folder.mkdir(parents=True, exist_ok=True)
        _write(self.folder / f"{compiled.sha256}.cubin", compiled.cubin)
        if ptx:
            _write(self.folder / f"{compiled.sha256}.ptx", compiled.ptx.encode())
        with self.locked(".manifest"):
            try:
                records = self.records()
            except ValueError:  # damaged: begin again; entries whose cubins are gone from it are made again
                records = {}
            records[_key(compiled.variant, compiled.arch)] = compiled.record()
            manifest = {"format": FORMAT, "cubins": dict(sorted(records.items()))}
            _write(self.folder / MANIFEST, json.dumps(manifest, indent=1).encode())
        return self.get(compiled.variant, compiled.arch)

    def prune(self) -> None:
        """Removes cubins and PTX that the manifest does not name. Only for folders that no process loads from."""
        with self.locked(".manifest"):
            named = {record["sha256"] for record in self.records().values()}
            for path in self.folder.iterdir():
                if path.suffix in (".cubin", ".ptx") and path.stem not in named:
                    path.unlink()

    @contextlib.contextmanager
    def locked(self, name: str) -> Iterator[None]:
        """Holds the lock ``name`` of this folder against other processes and threads; a crash releases it."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with open(self.folder / f"{name}.lock", "ab") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield


def _key(variant: KernelVariant, arch: str) -> str:
    return f"{variant.name}/{arch}"


def _write(path: pathlib.Path, data: bytes) -> None:
    """Writes a file that appears whole or not at all."""
    descriptor, temporary = tempfile.mkstemp(prefix=".new-", dir=path.parent)
    try:
        with open(descriptor, "wb") as file:
            file.write(data)
            os.fchmod(file.fileno(), 0o644)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def cache_folder() -> pathlib.Path:
    """The user's cache; see the module's docstring."""
    if folder := os.environ.get("JAX_FA_BLACKWELL_CACHE"):
        return pathlib.Path(folder)
    return pathlib.Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "jax_fa_blackwell"


def _checked_cache() -> Store:
    """The cache's store, private to the user: its cubins run with the user's rights."""
    folder = cache_folder()
    folder.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=_PRIVATE)
    status = folder.stat()
    if status.st_mode & stat.S_IWOTH or (os.getuid() and status.st_uid not in (0, os.getuid())):
        raise PermissionError(
            f"kernel cache {folder} must belong to this user and be closed to writing by others; it has owner "
            f"{status.st_uid} and mode {stat.S_IMODE(status.st_mode):o}"
        )
    return Store(folder)


def add(sha256: str, data: bytes) -> pathlib.Path:
    """Writes a cubin that came from elsewhere into the user's cache, if it is not there, and returns the folder.

    The executor finds it there by its hash; it is no entry of the manifest, so that ``find`` does not see it.

    Raises:
      ValueError: the bytes do not have the hash.
      PermissionError: the cache could be written by others.
    """
    found = hashlib.sha256(data).hexdigest()
    if found != sha256:
        raise ValueError(f"cubin {sha256} is damaged: its {len(data)} bytes have sha256 {found}")
    folder = _checked_cache().folder
    path = folder / f"{sha256}.cubin"
    if not (path.exists() and hashlib.sha256(path.read_bytes()).hexdigest() == sha256):
        _write(path, data)
    return folder


def read(sha256: str) -> bytes | None:
    """The bytes of a cubin by their hash, from the folders of ``folders``; None if it is in none or damaged."""
    for folder in folders():
        with contextlib.suppress(OSError):
            data = (folder / f"{sha256}.cubin").read_bytes()
            if hashlib.sha256(data).hexdigest() == sha256:
                return data
    return None


def folders() -> tuple[pathlib.Path, ...]:
    """Where cubins that ``find`` returned may lie."""
    return PACKAGED, cache_folder()


_found: dict[tuple, Cubin] = {}
_found_lock = threading.Lock()


def find(variant: KernelVariant, arch: str) -> Cubin:
    """The verified cubin of a variant: packaged, else cached, else compiled now if the kernel DSL is installed.

    A packaged cubin is good whatever DSL is installed. One in the cache is made again when another version of the DSL
    has been installed since.

    Raises:
      CubinNotFoundError: there is none and the DSL is not installed; the message has the command that makes it.
      jax_fa_blackwell.export.CompileError: it did not compile.
      PermissionError: the cache could be written by others.
    """
    key = (variant, arch, *folders())
    with _found_lock:
        if key not in _found:
            _found[key] = _find(variant, arch)
        return _found[key]


def _find(variant: KernelVariant, arch: str) -> Cubin:
    if arch not in variant.arches:
        raise ValueError(f"arch of {variant.name} must be one of {', '.join(variant.arches)}; got {arch!r}")
    from jax_fa_blackwell import export  # it imports this module

    tools = export.toolchain()

    def look(store: Store, same_tools: bool) -> Cubin:
        cubin = store.get(variant, arch)
        if same_tools and tools and cubin.toolchain != tools:
            raise LookupError(f"the one in {store.folder} is stale: made by {cubin.toolchain}; installed is {tools}")
        return cubin

    reasons = []
    cache = None
    try:
        return look(Store(PACKAGED), same_tools=False)
    except LookupError as error:
        reasons.append(str(error))
    cache = _checked_cache()
    try:
        return look(cache, same_tools=True)
    except LookupError as error:
        reasons.append(str(error))
    if tools is None:
        raise CubinNotFoundError(
            f"no compiled kernel {variant.name} for {arch}: {'; '.join(reasons)}; and the kernel DSL is not installed. "
            f"To compile it here or on any machine (no GPU needed):\n"
            f"  pip install 'jax_fa_blackwell[export]'\n"
            f"  python -m jax_fa_blackwell.export --arch {arch} --kernel {variant.name} -o {cache.folder}"
        )
    with cache.locked(f".{variant.name}.{arch}"):
        try:
            return look(cache, same_tools=True)  # another process may have made it meanwhile
        except LookupError:
            began = time.monotonic()
            print(f"jax_fa_blackwell: compiling {variant.name} for {arch} ...", end="", file=sys.stderr, flush=True)
            try:
                cubin = cache.add(export.compile_variant(variant, arch))
            except BaseException:
                print(" failed", file=sys.stderr, flush=True)
                raise
            print(f" {time.monotonic() - began:.1f} s", file=sys.stderr, flush=True)
            return cubin
