"""The kernels and their variants: what can be compiled, under which name, and how. Needs no kernel DSL.

A kernel is a module of this package with ``build(options) -> (host function, arguments)`` for the DSL's compiler. A
variant is a kernel with compile-time options; its name is stable and names the cubin's symbol.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import pathlib

from jax_fa_blackwell.kernels import abi
from jax_fa_blackwell.plan.target import TARGETS

ROOT = pathlib.Path(__file__).parent
Option = str | int | bool


@dataclasses.dataclass(frozen=True)
class Kernel:
    """A kernel's sources and its parameters.

    Attributes:
      name: the kernel's.
      sources: files of this folder whose text decides what is compiled: the kernel's module, then what it imports.
      parameters: in the order of the kernel's signature.
    """

    name: str
    sources: tuple[str, ...]
    parameters: tuple[abi.Parameter, ...]

    @property
    def module(self) -> str:
        """Name of the kernel's module."""
        return f"{__package__}.{self.sources[0].removesuffix('.py').replace('/', '.')}"


@dataclasses.dataclass(frozen=True)
class KernelVariant:
    """A kernel with its compile-time options, as (name, value) pairs in the order of their names."""

    name: str
    kernel: str
    options: tuple[tuple[str, Option], ...]
    arches: tuple[str, ...] = tuple(TARGETS)

    def to_json(self) -> dict:
        """As JSON types."""
        return {"name": self.name, "kernel": self.kernel, "options": dict(self.options)}

    @property
    def parameters(self) -> tuple[abi.Parameter, ...]:
        """The kernel's parameters."""
        return KERNELS[self.kernel].parameters

    def source_hash(self, arch: str) -> str:
        """Hexadecimal digest of everything of ours that decides the cubin: sources, parameters, options, ``arch``.

        The toolchain is not in it: a packaged cubin stays good whatever compiler is installed beside it.
        """
        digest = hashlib.sha256()
        kernel = KERNELS[self.kernel]
        declared = [[parameter.name, parameter.kind] for parameter in kernel.parameters]
        digest.update(json.dumps([self.to_json(), declared, arch], sort_keys=True).encode())
        for source in kernel.sources:
            digest.update(f"\n{source}\n".encode())
            digest.update((ROOT / source).read_bytes())
        return digest.hexdigest()


KERNELS: dict[str, Kernel] = {
    kernel.name: kernel
    for kernel in (
        Kernel(
            "delta",
            ("delta.py", "common/tma.py"),
            abi.parameters(
                out_map="tensor_map",
                grad_out_map="tensor_map",
                delta="pointer",
                grad_lse="pointer",
                has_grad_lse="int32",
                tokens="int32",
                heads="int32",
                chunks="int32",
                lane_bits="int32",
                token_bits="int32",
                tile_heads="int32",
                tile_groups="int32",
                tiles="int32",
                head_tiles="int32",
                token_tiles="int32",
                stages="int32",
                stage_bytes="int32",
                box_bytes="int32",
                turned_offset="int32",
                barrier_offset="int32",
            ),
        ),
    )
}

DELTA_CONSUMER_WARPS = 8
DELTA_OUTPUTS = 2


def _variants() -> list[KernelVariant]:
    delta = [
        KernelVariant(
            f"delta_{dtype}",
            "delta",
            (("consumer_warps", DELTA_CONSUMER_WARPS), ("dtype", dtype), ("outputs", DELTA_OUTPUTS)),
        )
        for dtype in ("bfloat16", "float16")
    ]
    return delta


VARIANTS: dict[str, KernelVariant] = {variant.name: variant for variant in _variants()}

SETS: dict[str, tuple[str, ...]] = {"core": tuple(VARIANTS)}
"""Named lists of variants; "core" is what the wheel carries."""


def get_variant(name: str) -> KernelVariant:
    """The variant of this name; ValueError lists the known ones."""
    if name not in VARIANTS:
        raise ValueError(f"kernel variant must be one of {', '.join(VARIANTS)}; got {name!r}")
    return VARIANTS[name]


def get_set(name: str) -> tuple[KernelVariant, ...]:
    """The variants of a set; ValueError lists the known sets."""
    if name not in SETS:
        raise ValueError(f"kernel set must be one of {', '.join(SETS)}; got {name!r}")
    return tuple(VARIANTS[variant] for variant in SETS[name])
