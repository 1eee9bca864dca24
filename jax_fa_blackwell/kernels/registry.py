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
from jax_fa_blackwell.plan import hopper
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
        Kernel(
            "forward_sm100",
            (
                "sm100/forward.py",
                "sm100/slices.py",
                "common/intervals.py",
                "common/params.py",
                "common/ptx.py",
                "common/soft_cap.py",
                "common/softmax.py",
                "../plan/slices.py",
            ),
            abi.parameters(
                query_map="tensor_map",
                key_map="tensor_map",
                value_map="tensor_map",
                out_map="tensor_map",
                lse="pointer",
                low="pointer",
                high="pointer",
                blocks="pointer",
                key_low="pointer",
                key_high="pointer",
                sinks="pointer",
                scale="float32",
                cap="float32",
                query_length="int32",
                key_value_length="int32",
                heads="int32",
                group="int32",
                k_steps="int32",
                v_columns="int32",
                v_chunks="int32",
                chunk_columns="int32",
                query_slices="int32",
                slots="int32",
                rows_form="int32",
                mask_low="int32",
                mask_high="int32",
                cleaned="int32",
                seen_low="int32",
                seen_high="int32",
                items="int32",
                row_groups="int32",
                head_groups="int32",
                group_rows="int32",
                row_step="int32",
                head_step="int32",
                has_sinks="int32",
                score_instruction="int32",
                value_instruction="int32",
            ),
        ),
        Kernel(
            "forward_sm90",
            (
                "sm90/forward.py",
                "sm90/fragments.py",
                "sm90/instructions.py",
                "sm90/work.py",
                "common/intervals.py",
                "common/params.py",
                "common/ptx.py",
                "common/soft_cap.py",
                "common/softmax.py",
                "../plan/hopper.py",
                "../plan/slices.py",
            ),
            abi.parameters(
                query_map="tensor_map",
                key_map="tensor_map",
                value_map="tensor_map",
                out="pointer",
                lse="pointer",
                low="pointer",
                high="pointer",
                blocks="pointer",
                key_low="pointer",
                key_high="pointer",
                sinks="pointer",
                scale="float32",
                cap="float32",
                rows="int32",
                columns="int32",
                row_heads="int32",
                group="int32",
                value_dim="int32",
                rows_form="int32",
                mask_low="int32",
                mask_high="int32",
                cleaned="int32",
                seen_low="int32",
                seen_high="int32",
                items="int32",
                row_groups="int32",
                section="int32",
                heavy_last="int32",
                has_sinks="int32",
                has_cap="int32",
                negated="int32",
            ),
        ),
        Kernel(
            "backward_sm90",
            (
                "sm90/backward.py",
                "sm90/fragments.py",
                "sm90/instructions.py",
                "sm90/work.py",
                "common/intervals.py",
                "common/params.py",
                "common/ptx.py",
                "common/soft_cap.py",
                "../plan/hopper.py",
                "../plan/slices.py",
            ),
            abi.parameters(
                a1_map="tensor_map",
                a2_map="tensor_map",
                b1_map="tensor_map",
                b2_map="tensor_map",
                c1="pointer",
                c2="pointer",
                dq="pointer",
                lse="pointer",
                delta="pointer",
                low="pointer",
                high="pointer",
                blocks="pointer",
                column_low="pointer",
                column_high="pointer",
                scale="float32",
                cap="float32",
                out_scale="float32",
                rows="int32",
                columns="int32",
                row_heads="int32",
                column_heads="int32",
                group="int32",
                head_dim="int32",
                value_dim="int32",
                rows_form="int32",
                mask_low="int32",
                mask_high="int32",
                cleaned="int32",
                seen_low="int32",
                seen_high="int32",
                items="int32",
                row_groups="int32",
                section="int32",
                heavy_last="int32",
                paired="int32",
                has_cap="int32",
            ),
        ),
        Kernel(
            "query_gradient_sm90",
            (
                "sm90/query_gradient.py",
                "sm90/fragments.py",
                "sm90/instructions.py",
                "common/params.py",
                "common/ptx.py",
                "../plan/hopper.py",
            ),
            abi.parameters(sums="pointer", query_gradient="pointer", scale="float32", rows="int32", head_dim="int32"),
        ),
        Kernel(
            "backward_sm100",
            (
                "sm100/backward.py",
                "sm100/slices.py",
                "common/intervals.py",
                "common/params.py",
                "common/ptx.py",
                "common/soft_cap.py",
                "../plan/slices.py",
            ),
            abi.parameters(
                a1_map="tensor_map",
                a2_map="tensor_map",
                b1_map="tensor_map",
                b2_map="tensor_map",
                c1_map="tensor_map",
                c2_map="tensor_map",
                lse="pointer",
                delta="pointer",
                low="pointer",
                high="pointer",
                blocks="pointer",
                column_low="pointer",
                column_high="pointer",
                scale="float32",
                cap="float32",
                out_scale="float32",
                rows="int32",
                columns="int32",
                row_heads="int32",
                column_heads="int32",
                group="int32",
                a1_steps="int32",
                a1_columns="int32",
                a2_steps="int32",
                a2_columns="int32",
                a2_resident="int32",
                c1_part="int32",
                c2_part="int32",
                parts="int32",
                slots="int32",
                rows_form="int32",
                mask_low="int32",
                mask_high="int32",
                cleaned="int32",
                seen_low="int32",
                seen_high="int32",
                items="int32",
                row_groups="int32",
                heavy_last="int32",
                score_instruction="int32",
                gradient_instruction="int32",
                row_instruction="int32",
            ),
        ),
    )
}

LANES = 32
"""Threads of a warp."""


def _variants() -> list[KernelVariant]:
    delta = [
        KernelVariant(
            f"delta_{dtype}",
            "delta",
            (("consumer_warps", 8), ("dtype", dtype), ("outputs", 2)),
        )
        for dtype in ("bfloat16", "float16")
    ]
    forward = [
        KernelVariant(
            forward_name(dtype, query_tiles, group, soft_cap, every),
            "forward_sm100",
            (
                ("dtype", dtype),
                ("group", group),
                ("polynomial_every", every),
                ("query_tiles", query_tiles),
                ("soft_cap", soft_cap),
            ),
            arches,
        )
        for dtype in ("bfloat16", "float16")
        for query_tiles, group, every, arches in (
            (1, 1, 0, ("sm_100a", "sm_103a")),
            (1, 2, 0, ("sm_100a", "sm_103a")),
            (2, 1, 0, ("sm_103a",)),
            (2, 1, 4, ("sm_100a",)),
            (2, 1, 8, ("sm_100a",)),
        )
        for soft_cap in (False, True)
    ]
    backward = [
        KernelVariant(
            backward_name(dtype, transposed, group, columns, soft_cap),
            "backward_sm100",
            (
                ("columns", columns),
                ("dtype", dtype),
                ("group", group),
                ("soft_cap", soft_cap),
                ("transposed", transposed),
            ),
            ("sm_100a", "sm_103a"),
        )
        for dtype in ("bfloat16", "float16")
        for transposed, group, columns in (
            (False, 1, 128),
            (False, 2, 128),
            (True, 1, 128),
            (True, 2, 128),
            (True, 2, 64),
        )
        for soft_cap in (False, True)
    ]
    return delta + forward + backward + _hopper_variants()


def _hopper_variants() -> list[KernelVariant]:
    def variant(name: str, kernel: str, tile: hopper.ForwardTile | hopper.BackwardTile, dtype: str) -> KernelVariant:
        options = {**dataclasses.asdict(tile), "dtype": dtype}
        return KernelVariant(name, kernel, tuple(sorted(options.items())), (hopper.ARCH,))

    out = []
    for dtype in ("bfloat16", "float16"):
        for tile in hopper.FORWARD_TILES:
            out.append(variant(hopper_forward_name(dtype, tile), "forward_sm90", tile, dtype))
        for tile in (*(tile for passes in hopper.BACKWARD_PASSES for tile in passes), *hopper.ONE_PASS):
            out.append(variant(hopper_backward_name(dtype, tile), "backward_sm90", tile, dtype))
        for tile in hopper.ONE_PASS:
            options = ("columns", tile.dq_columns), ("dtype", dtype), ("head_dim", tile.head_dim)
            name = hopper_query_gradient_name(dtype, tile)
            out.append(KernelVariant(name, "query_gradient_sm90", options, (hopper.ARCH,)))
    return out


def forward_name(dtype: str, query_tiles: int, group: int, soft_cap: bool, polynomial_every: int) -> str:
    """Name of a variant of the Blackwell forward kernel; ``group`` is the number of blocks that work together."""
    share = f"_poly{polynomial_every}" if polynomial_every else ""
    tiles = "pair" if group == 2 else f"{query_tiles}tile"
    return f"forward_sm100_{dtype}_{tiles}{share}" + ("_cap" if soft_cap else "")


def backward_name(dtype: str, transposed: bool, group: int, columns: int, soft_cap: bool) -> str:
    """Name of a variant of the Blackwell backward kernel: for dK and dV (transposed) or for dQ.

    ``group`` is the number of blocks that work together, ``columns`` the queries (transposed) or keys of a block.
    """
    form = ("_pair" if group == 2 else "") + ("_narrow" if columns == 64 else "")
    return f"backward_sm100_{dtype}_{'dkdv' if transposed else 'dq'}{form}" + ("_cap" if soft_cap else "")


def hopper_forward_name(dtype: str, tile: hopper.ForwardTile) -> str:
    """Name of a variant of the Hopper forward kernel."""
    return f"forward_sm90_{dtype}_{tile.head_dim}x{tile.value_dim}"


def hopper_backward_name(dtype: str, tile: hopper.BackwardTile) -> str:
    """Name of a variant of the Hopper backward kernel, after the gradients that it computes."""
    gradients = ("dk" if tile.has_c2 else "") + ("dv" if tile.has_c1 else "") if tile.transposed else "dq"
    gradients = ("dq" if tile.adds_dq else "") + gradients
    return f"backward_sm90_{dtype}_{gradients}_{tile.head_dim}x{tile.value_dim}"


def hopper_query_gradient_name(dtype: str, tile: hopper.BackwardTile) -> str:
    """Name of the variant that rounds dQ to 16 bits where ``tile`` adds it in memory."""
    return f"query_gradient_sm90_{dtype}_{tile.head_dim}"


VARIANTS: dict[str, KernelVariant] = {variant.name: variant for variant in _variants()}

SETS: dict[str, tuple[str, ...]] = {
    "core": tuple(VARIANTS),
    "hopper": tuple(name for name, variant in VARIANTS.items() if variant.kernel.endswith("sm90")),
    "forward": tuple(name for name, variant in VARIANTS.items() if variant.kernel == "forward_sm100"),
    "backward": tuple(name for name, variant in VARIANTS.items() if variant.kernel == "backward_sm100"),
}
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
