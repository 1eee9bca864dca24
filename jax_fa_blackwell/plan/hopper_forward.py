"""The forward kernel's plan on Hopper: the class of head dims, the order of the work, and the launch."""

from __future__ import annotations

import dataclasses

from jax_fa_blackwell.kernels import abi, registry
from jax_fa_blackwell.plan import hopper, launch
from jax_fa_blackwell.plan.account import Account
from jax_fa_blackwell.plan.limits import common_limit
from jax_fa_blackwell.plan.slices import LOG2_E, ROWS, WORK_ENTRY_BYTES, mask_scalars
from jax_fa_blackwell.plan.spec import KERNELS, AttentionSpec
from jax_fa_blackwell.plan.target import Target

CACHED_BYTES = 24 << 20
"""Keys and values that a section of heads may have, so that they stay in the L2 cache (50 MiB) beside other data."""


@dataclasses.dataclass(frozen=True)
class ForwardPlan:
    """How one call runs."""

    spec: AttentionSpec
    target: Target
    tile: hopper.ForwardTile

    @property
    def group_rows(self) -> int:
        """Query rows of a work item."""
        return self.tile.rows

    @property
    def block_keys(self) -> int:
        """Keys of a KV block."""
        return self.tile.columns

    @property
    def row_groups(self) -> int:
        """Work items along the query axis."""
        return -(-self.spec.query_length // self.group_rows)

    @property
    def items(self) -> int:
        """Work items in all."""
        return self.row_groups * self.spec.query_heads * self.spec.batch

    @property
    def section(self) -> int:
        """Heads whose items come before those of the next heads; whole groups, which share their keys.

        All heads where a mask makes items unequal: only with the heaviest of all first do blocks end together.
        """
        spec = self.spec
        if spec.mask_form != "none":
            return spec.batch * spec.query_heads
        per_head = 2 * spec.key_value_length * (spec.head_dim + spec.value_head_dim)
        kv_heads = max(CACHED_BYTES // max(per_head, 1), 1)
        return min(kv_heads * spec.group_size, spec.batch * spec.query_heads)

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block."""
        return self.tile.shared_bytes

    def account(self) -> Account:
        """Cycles of 128 query rows and 128 keys."""
        H, Hv = self.tile.head_dim, self.tile.value_dim
        # S reads 64 rows of Q for each warpgroup, whose products read K and V anew; TMA writes both once a tile.
        read = H * ROWS // self.tile.columns + (H + Hv) * ROWS // hopper.TILE_ROWS
        written = (H + Hv) * ROWS / self.tile.rows
        return Account(self.target, self.spec.head_dim + self.spec.value_head_dim, H + Hv, 1, read, written)

    @property
    def kernel(self) -> str:
        """Name of the kernel's variant."""
        return registry.hopper_forward_name(self.spec.dtype, self.tile)


def supports(spec: AttentionSpec, target: Target) -> str | None:
    """None if the kernel runs the call's forward, else the limit."""
    if target.arch != hopper.ARCH:
        return f"{target.arch} has no wgmma"
    return common_limit(spec, hopper.MAX_DIM)


KERNELS["sm90"] = supports  # the backward takes what the forward takes


def plan_forward(spec: AttentionSpec, target: Target) -> ForwardPlan:
    """Chooses the class of head dims; ValueError where ``supports`` names a limit."""
    limit = supports(spec, target)
    if limit is not None:
        raise ValueError(f"no forward plan: {limit}")
    return ForwardPlan(spec, target, next(tile for tile in hopper.FORWARD_TILES if hopper.holds(tile, spec)))


def launch_forward(plan: ForwardPlan, kernel: str, sha256: str, symbol: str) -> launch.LaunchPlan:
    """The custom call of a plan; ``kernel`` is ``plan.kernel``, with its cubin's digest and symbol.

    Arguments: query, key, value, then (low, high, blocks, key_low, key_high) for row intervals, then fp32
    sinks [B, N] if any. Blocks are of ``plan.block_keys`` keys, for groups of ``plan.group_rows`` rows.
    Results: output, fp32 LSE [B, T, N].
    """
    spec, tile = plan.spec, plan.tile
    B, T, S, N, K = spec.batch, spec.query_length, spec.key_value_length, spec.query_heads, spec.key_value_heads
    H, Hv = spec.head_dim, spec.value_head_dim
    sizes = {"query": 2 * B * T * N * H, "key": 2 * B * S * K * H, "value": 2 * B * S * K * Hv}
    if spec.mask_form == "rows":
        sizes |= {"low": 4 * B * T, "high": 4 * B * T, "blocks": WORK_ENTRY_BYTES * B * plan.row_groups}
        sizes |= {"key_low": 4 * B * S, "key_high": 4 * B * S}
    if spec.has_sinks:
        sizes["sinks"] = 4 * B * N
    arguments = len(sizes)
    sizes |= {"out": 2 * B * T * N * Hv, "lse": 4 * B * T * N}
    operand = {name: index for index, name in enumerate(sizes)}

    def tensor_map(name: str, rows: int, heads: int, dim: int, box_rows: int) -> launch.TensorMap:
        strides = (heads * dim * 2, dim * 2, rows * heads * dim * 2)
        box = (hopper.SLICE, box_rows, 1, 1)
        return launch.TensorMap(operand[name], spec.dtype, (dim, rows, heads, B), strides, box, swizzle="128B")

    def pointer(name: str) -> launch.Pointer:
        return launch.Pointer(operand.get(name, operand["lse"]))

    scale, cap = abs(spec.scale), 1.0
    if spec.logits_soft_cap is not None:
        scale, cap = spec.logits_soft_cap, spec.scale / spec.logits_soft_cap
    scalars = {
        "rows": T,
        "columns": S,
        "row_heads": N,
        "group": spec.group_size,
        "value_dim": Hv,
        **mask_scalars(spec, transposed=False),
        "items": plan.items,
        "row_groups": plan.row_groups,
        "section": plan.section,
        "heavy_last": 1,
        "has_sinks": int(spec.has_sinks),
        "has_cap": int(spec.logits_soft_cap is not None),
        "negated": int(spec.scale < 0 and spec.logits_soft_cap is None),
    }
    names = ("out", "lse", "low", "high", "blocks", "key_low", "key_high", "sinks")
    values = {
        "query_map": tensor_map("query", T, N, H, hopper.TILE_ROWS),
        "key_map": tensor_map("key", S, K, H, tile.columns),
        "value_map": tensor_map("value", S, K, Hv, tile.columns),
        **{name: pointer(name) for name in names},
        "scale": launch.Float32(scale * LOG2_E),
        "cap": launch.Float32(cap),
        **{name: launch.Int32(value) for name, value in scalars.items()},
    }
    step = launch.Launch(
        kernel,
        sha256,
        symbol,
        (min(plan.items, plan.target.sm_count), 1, 1),
        (tile.threads, 1, 1),
        abi.bind(registry.KERNELS["forward_sm90"].parameters, values),
        shared_bytes=plan.shared_bytes,
    )
    program = launch.Program(plan.target.arch, (step,))
    sizes = tuple(sizes.values())
    return launch.LaunchPlan("forward", sizes[:arguments], sizes[arguments:], (program,))
