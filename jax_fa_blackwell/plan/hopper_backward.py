"""The backward's plan on Hopper: which passes of the gradient kernel, the order of their work, and the launches."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from jax_fa_blackwell.kernels import abi, registry
from jax_fa_blackwell.plan import hopper, hopper_forward, launch
from jax_fa_blackwell.plan.account import Account
from jax_fa_blackwell.plan.slices import LOG2_E, ROWS, WORK_ENTRY_BYTES, mask_scalars, round_up
from jax_fa_blackwell.plan.spec import AttentionSpec
from jax_fa_blackwell.plan.target import Target


@dataclasses.dataclass(frozen=True)
class Pass:
    """One launch of the gradient kernel: rows are keys where ``tile.transposed``, else queries."""

    spec: AttentionSpec
    target: Target
    tile: hopper.BackwardTile

    @property
    def rows(self) -> int:
        """Length of the rows' axis."""
        return self.spec.key_value_length if self.tile.transposed else self.spec.query_length

    @property
    def columns(self) -> int:
        """Length of the columns' axis."""
        return self.spec.query_length if self.tile.transposed else self.spec.key_value_length

    @property
    def row_heads(self) -> int:
        """Heads of the rows."""
        return self.spec.key_value_heads if self.tile.transposed else self.spec.query_heads

    @property
    def row_groups(self) -> int:
        """Work items along the rows' axis; where they are paired an even number, the last perhaps without rows."""
        return round_up(-(-self.rows // self.tile.rows), 1 + self.is_paired)

    @property
    def items(self) -> int:
        """Work items in all."""
        return self.row_groups * self.row_heads * self.spec.batch

    @property
    def is_paired(self) -> bool:
        """Whether a block does two items of a head one after the other, of which a mask leaves one the more."""
        spec = self.spec
        pairs = -(-self.rows // self.tile.rows) * self.row_heads * spec.batch // 2
        return self.tile.adds_dq and spec.mask_form == "affine" and pairs >= self.target.sm_count

    @property
    def section(self) -> int:
        """Heads whose items come before those of the next heads, as in the forward; one where dQ is added."""
        spec, group = self.spec, self.spec.group_size
        if self.tile.adds_dq:
            return 1
        if spec.mask_form != "none":
            return spec.batch * self.row_heads
        per_head = 2 * self.columns * (spec.head_dim + spec.value_head_dim)
        if self.tile.transposed:
            heads = hopper_forward.CACHED_BYTES // max(per_head * group, 1)
        else:
            heads = hopper_forward.CACHED_BYTES // max(per_head, 1) * group
        return min(max(heads, 1), spec.batch * self.row_heads)

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block."""
        return self.tile.shared_bytes

    @property
    def kernel(self) -> str:
        """Name of the kernel's variant."""
        return registry.hopper_backward_name(self.spec.dtype, self.tile)

    @property
    def gemms(self) -> float:
        """Matrix products of T x S x head dim for each part of it, classes of head dims taken as they are."""
        return self._dims() / ((self.spec.head_dim + self.spec.value_head_dim) / 2)

    def account(self) -> Account:
        """Cycles of 128 rows and 128 columns."""
        spec, tile = self.spec, self.tile
        # Of the five products dQ's pass owns dQ's alone: the others are those of dK and dV.
        ideal = 0 if tile.transposed and not tile.adds_dq else spec.head_dim
        if tile.transposed:
            ideal += (2 * spec.head_dim + spec.value_head_dim if tile.has_c2 else 0) + (
                spec.value_head_dim if tile.has_c1 else 0
            )
        left = (tile.head_dim + (tile.value_dim if tile.has_c2 else 0)) * ROWS // tile.columns
        written = (tile.head_dim + tile.value_dim) * ROWS / tile.rows
        read = left + self._dims() * ROWS // hopper.TILE_ROWS
        if tile.adds_dq:  # dS is written once and read once
            read, written = read + ROWS, written + ROWS
        return Account(self.target, ideal, self._dims(), 1, read, written)

    def _dims(self) -> int:
        """Head dims that the products sum over or make."""
        tile = self.tile
        return (1 + tile.has_c2 + tile.adds_dq) * tile.head_dim + (tile.has_c1 + tile.has_c2) * tile.value_dim


def plan_backward(spec: AttentionSpec, target: Target) -> tuple[Pass, ...]:
    """The passes of the class of head dims; ValueError where ``hopper_forward.supports`` names a limit."""
    limit = hopper_forward.supports(spec, target)
    if limit is not None:
        raise ValueError(f"no backward plan: {limit}")
    passes = next(passes for passes in hopper.BACKWARD_PASSES if hopper.holds(passes[0], spec))
    if not spec.deterministic and spec.logits_soft_cap is None:
        passes = next(((tile,) for tile in hopper.ONE_PASS if hopper.holds(tile, spec)), passes)
    return tuple(Pass(spec, target, tile) for tile in passes)


def launch_backward(passes: tuple[Pass, ...], find: Callable[[str], tuple[str, str, str]]) -> launch.LaunchPlan:
    """The custom call: the passes one after the other, or one that adds dQ to a workspace and what rounds the sums.

    Arguments: query, key, value, dO, fp32 LSE [B, N, T], fp32 delta [B, N, T], then for row intervals (low, high) of
    the queries and of the keys, and for each pass its list of blocks (``blocks.py``). Results: dQ, dK, dV, and the
    workspace if any.

    Args:
      passes: from ``plan_backward``.
      find: from a variant's name to (kernel name, sha256, symbol) of its cubin.
    """
    spec, target = passes[0].spec, passes[0].target
    B, T, S, N, K = spec.batch, spec.query_length, spec.key_value_length, spec.query_heads, spec.key_value_heads
    H, Hv = spec.head_dim, spec.value_head_dim
    shapes = {"query": (T, N, H), "key": (S, K, H), "value": (S, K, Hv), "grad_out": (T, N, Hv)}
    results = {"grad_query": (T, N, H), "grad_key": (S, K, H), "grad_value": (S, K, Hv)}
    sizes = {name: 2 * B * rows * heads * dim for name, (rows, heads, dim) in shapes.items()}
    sizes |= {"lse": 4 * B * N * T, "delta": 4 * B * N * T}
    if spec.mask_form == "rows":
        sizes |= {f"{side}_{end}": 4 * B * rows for side, rows in (("query", T), ("key", S)) for end in ("low", "high")}
        sizes |= {f"blocks{i}": WORK_ENTRY_BYTES * B * one.row_groups for i, one in enumerate(passes)}
    arguments = len(sizes)
    sizes |= {name: 2 * B * rows * heads * dim for name, (rows, heads, dim) in results.items()}
    if passes[0].tile.adds_dq:
        sizes["sums"] = 4 * B * N * round_up(T, passes[0].tile.columns) * passes[0].tile.head_dim
    operand = {name: index for index, name in enumerate(sizes)}

    def tensor_map(name: str, box_rows: int) -> launch.TensorMap:
        rows, heads, dim = shapes[name]
        strides = (heads * dim * 2, dim * 2, rows * heads * dim * 2)
        box = (hopper.SLICE, box_rows, 1, 1)
        return launch.TensorMap(operand[name], spec.dtype, (dim, rows, heads, B), strides, box, swizzle="128B")

    def pointer(name: str) -> launch.Pointer:
        return launch.Pointer(operand.get(name, operand["lse"]))

    steps = []
    if "sums" in sizes:
        steps.append(launch.Fill(operand["sums"], sizes["sums"] // 4))
    for index, one in enumerate(passes):
        values = _parameters(one, tensor_map, pointer) | {"blocks": pointer(f"blocks{index}")}
        step = launch.Launch(
            *find(one.kernel),
            (min(one.items >> one.is_paired, target.sm_count), 1, 1),
            (one.tile.threads, 1, 1),
            abi.bind(registry.KERNELS["backward_sm90"].parameters, values),
            shared_bytes=one.shared_bytes,
        )
        steps.append(step)
    if "sums" in sizes:
        kernel = registry.hopper_query_gradient_name(spec.dtype, passes[0].tile)
        values = {
            "sums": pointer("sums"),
            "query_gradient": pointer("grad_query"),
            "scale": launch.Float32(spec.scale),
            "rows": launch.Int32(T),
            "head_dim": launch.Int32(H),
        }
        step = launch.Launch(
            *find(kernel),
            (round_up(T, passes[0].tile.columns) // hopper.TILE_ROWS, N, B),
            (hopper.WARPGROUP_THREADS, 1, 1),
            abi.bind(registry.KERNELS["query_gradient_sm90"].parameters, values),
        )
        steps.append(step)
    program = launch.Program(target.arch, tuple(steps))
    counts = tuple(sizes.values())
    return launch.LaunchPlan("backward", counts[:arguments], counts[arguments:], (program,))


def _parameters(one: Pass, tensor_map, pointer) -> dict[str, launch.Param]:
    """A pass's parameters by name, but for its list of blocks."""
    spec, tile = one.spec, one.tile
    if tile.transposed:
        side, other, operands, results = "key", "query", ("key", "value", "query", "grad_out"), ("value", "key")
    else:
        side, other, operands, results = "query", "key", ("query", "grad_out", "key", "value"), ("query", "query")
    scale, cap = spec.scale, 1.0
    if spec.logits_soft_cap is not None:
        scale, cap = spec.logits_soft_cap, spec.scale / spec.logits_soft_cap
    scalars = {
        "rows": one.rows,
        "columns": one.columns,
        "row_heads": one.row_heads,
        "column_heads": spec.group_size if tile.transposed else 1,
        "group": spec.group_size,
        "head_dim": spec.head_dim,
        "value_dim": spec.value_head_dim,
        **mask_scalars(spec, tile.transposed),
        "items": one.items,
        "row_groups": one.row_groups,
        "section": one.section,
        "heavy_last": int(not tile.transposed),
        "paired": int(one.is_paired),
        "has_cap": int(spec.logits_soft_cap is not None),
    }
    boxes = (hopper.TILE_ROWS, hopper.TILE_ROWS, tile.part_columns, tile.part_columns)
    names = ("a1", "a2", "b1", "b2")
    return {
        **{f"{name}_map": tensor_map(of, box) for name, of, box in zip(names, operands, boxes, strict=True)},
        "c1": pointer(f"grad_{results[0]}"),
        "c2": pointer(f"grad_{results[1]}"),
        "dq": pointer("sums"),
        "lse": pointer("lse"),
        "delta": pointer("delta"),
        "low": pointer(f"{side}_low"),
        "high": pointer(f"{side}_high"),
        "column_low": pointer(f"{other}_low"),
        "column_high": pointer(f"{other}_high"),
        "scale": launch.Float32(scale * LOG2_E),
        "cap": launch.Float32(cap),
        "out_scale": launch.Float32(spec.scale),
        **{name: launch.Int32(value) for name, value in scalars.items()},
    }
