"""How ``kernels/delta.py`` is launched: tile, ring, shared-memory map, tensor maps, grid."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from jax_fa_blackwell.cubins import Cubin
from jax_fa_blackwell.kernels import abi, registry
from jax_fa_blackwell.kernels.registry import KernelVariant
from jax_fa_blackwell.plan.launch import Int32, Launch, LaunchPlan, Pointer, Program, TensorMap
from jax_fa_blackwell.plan.target import Target, get_target

DTYPES = ("bfloat16", "float16")
MAX_HEAD_DIM = 512
_ELEMENT_BYTES = 2
_WORD_BYTES = 4
_CHUNK = 8
"""16-bit elements of a 16-byte shared load."""
_MAX_BOX = 256
_MAX_INT32 = 2**31 - 1
_TILE_ALIGNMENT = 128
_LINE_BYTES, _SECTOR_BYTES = 128, 32
"""Of global memory, as its caches see it."""
_RESULT_BYTES = 4
_BARRIER_BYTES = 8
_MAX_STAGES = 32
_RESERVED_SHARED_BYTES = 1024
"""What the system takes of each block's shared memory."""


@dataclasses.dataclass(frozen=True)
class DeltaSpec:
    """One call: the extents B, T, N, H, the dtype of O and dO, and whether dLSE is subtracted."""

    batch: int
    tokens: int
    heads: int
    head_dim: int
    dtype: str
    has_grad_lse: bool

    def limit(self) -> str | None:
        """The rule: None if the kernel takes the call, else the limit in words."""
        if self.dtype not in DTYPES:
            return f"dtype must be one of {', '.join(DTYPES)}; got {self.dtype}"
        if self.head_dim % _CHUNK or not 0 < self.head_dim <= MAX_HEAD_DIM:
            return f"head dim must be a multiple of {_CHUNK} from {_CHUNK} to {MAX_HEAD_DIM}; got {self.head_dim}"
        if min(self.batch, self.tokens, self.heads) < 1:
            return f"batch, tokens and heads must be at least 1; got {(self.batch, self.tokens, self.heads)}"
        if self.batch * self.tokens * self.heads > _MAX_INT32:
            return f"batch * tokens * heads must be below 2**31; got {(self.batch, self.tokens, self.heads)}"
        return None

    @property
    def variant(self) -> KernelVariant:
        """The kernel that takes the call."""
        return registry.get_variant(f"delta_{self.dtype}")

    @property
    def rows(self) -> int:
        """B * T * N."""
        return self.batch * self.tokens * self.heads

    @property
    def argument_bytes(self) -> tuple[int, ...]:
        """Of O, dO, and dLSE where there is one."""
        inputs = self.rows * self.head_dim * _ELEMENT_BYTES
        return (inputs, inputs) + (self.rows * 4,) * self.has_grad_lse

    @property
    def result_bytes(self) -> tuple[int, ...]:
        """Of delta."""
        return (self.rows * 4,)


@dataclasses.dataclass(frozen=True)
class DeltaConfig:
    """What may be tuned.

    Attributes:
      tile_bytes: upper bound of one tile; a stage holds two. A tile has at least one row, whatever it takes.
      ring_bytes: upper bound of a block's ring, which has as many stages as fit; at least 2 must.
      blocks_per_sm: blocks that share an SM, and the factor of the persistent grid.
    """

    tile_bytes: int = 8192
    ring_bytes: int = 65536
    blocks_per_sm: int = 3

    def __post_init__(self):
        for name, value in dataclasses.asdict(self).items():
            if value < 1:
                raise ValueError(f"{name} must be at least 1; got {value}")


DEFAULT_CONFIG = DeltaConfig()


def _power_of_two(at_most: int) -> int:
    return 1 << (at_most.bit_length() - 1)


@dataclasses.dataclass(frozen=True)
class DeltaTile:
    """A tile and how TMA sees it: runs of ``group_words`` words, ``groups`` of them for the heads of one token.

    With the heads of a token regrouped so, the box's rows are as long as TMA allows, and the order of the bytes in
    shared memory stays that of the rows: tokens, then heads.
    """

    tokens: int
    heads: int
    group_words: int
    groups: int
    head_dim: int

    @property
    def rows(self) -> int:
        """Rows of H elements."""
        return self.tokens * self.heads

    @property
    def box_bytes(self) -> int:
        """Bytes of one tile."""
        return self.rows * self.head_dim * _ELEMENT_BYTES


def choose_tile(spec: DeltaSpec, config: DeltaConfig) -> DeltaTile:
    """The tile for a call: the largest that the limits allow.

    Of equal ones that with the most tokens, because the result is stored in runs of 4 bytes a token, if what it reads
    of a token is whole memory lines; else that with the most heads, because every token's ends are partial lines.
    """
    options = dict(spec.variant.options)
    max_rows = registry.LANES * int(options["consumer_warps"]) * int(options["outputs"])
    row_bytes = spec.head_dim * _ELEMENT_BYTES
    rows = max(1, min(max_rows, config.tile_bytes // row_bytes))
    most_tokens = min(_MAX_BOX, 1 << (spec.tokens - 1).bit_length())

    def shape(run: int) -> tuple[int, int]:
        heads = -(-spec.heads // -(-spec.heads // (rows // run)))
        return min(most_tokens, _power_of_two(rows // heads)), heads

    def preference(shape: tuple[int, int]) -> tuple[int, bool, int]:
        tokens, heads = shape
        whole_lines = heads * row_bytes % _LINE_BYTES == 0
        return tokens * heads, whole_lines, tokens if whole_lines else heads

    longest = _power_of_two(min(most_tokens, rows))
    shortest = min(_SECTOR_BYTES // _RESULT_BYTES, longest)
    runs = [1 << bits for bits in range(shortest.bit_length() - 1, longest.bit_length())]
    tokens, heads = max(map(shape, runs), key=preference)
    # One view serves every head tile, so its groups must divide both the tile's heads and all of them.
    shared_words = math.gcd(heads, spec.heads) * spec.head_dim * _ELEMENT_BYTES // _WORD_BYTES
    fits = (words for words in range(_MAX_BOX, 0, -1) if shared_words % words == 0 and words * _WORD_BYTES % 16 == 0)
    group_words = next(fits)
    groups = heads * spec.head_dim * _ELEMENT_BYTES // _WORD_BYTES // group_words
    return DeltaTile(tokens, heads, group_words, groups, spec.head_dim)


@dataclasses.dataclass(frozen=True)
class SharedMap:
    """Dynamic shared memory of a block: number of stages; offsets and sizes in bytes."""

    stages: int
    stage_bytes: int
    turned_offset: int
    barrier_offset: int
    total: int


def shared_map(tile: DeltaTile, config: DeltaConfig, target: Target) -> SharedMap:
    """Lays the ring, the two buffers of turned results and the barriers out.

    Raises:
      ValueError: two stages do not fit the ring, or ``config.blocks_per_sm`` such blocks an SM of the target.
    """
    stage_bytes = 2 * (-(-tile.box_bytes // _TILE_ALIGNMENT) * _TILE_ALIGNMENT)
    stages = min(_MAX_STAGES, config.ring_bytes // stage_bytes)
    if stages < 2:
        raise ValueError(f"{config} with {tile} has no room for two stages of {stage_bytes} bytes")
    turned = stages * stage_bytes
    barriers = turned + -(-2 * tile.rows * 4 // _BARRIER_BYTES) * _BARRIER_BYTES
    total = barriers + 2 * stages * _BARRIER_BYTES
    limit = (target.shared_bytes + _RESERVED_SHARED_BYTES) // config.blocks_per_sm - _RESERVED_SHARED_BYTES
    if total > limit:
        raise ValueError(
            f"{config} with {tile} needs {total} bytes of shared memory a block; {target.arch} has {limit}"
        )
    return SharedMap(stages, stage_bytes, turned, barriers, total)


def lane_bits(head_dim: int) -> int:
    """log2 of the lanes that share a row: a row is q * 2**k chunks with q odd, and min(8, 2**k) lanes take it."""
    chunks = head_dim // _CHUNK
    return min(3, (chunks & -chunks).bit_length() - 1)


def launch(spec: DeltaSpec, cubin: Cubin, config: DeltaConfig) -> Launch:
    """The launch on ``cubin``'s architecture; operands are O, dO, dLSE if any, then delta."""
    target = get_target(cubin.arch)
    tile = choose_tile(spec, config)
    memory = shared_map(tile, config, target)
    head_tiles = -(-spec.heads // tile.heads)
    token_tiles = -(-spec.tokens // tile.tokens)
    tiles = head_tiles * token_tiles * spec.batch
    token_bytes = spec.heads * spec.head_dim * _ELEMENT_BYTES
    group_bytes = tile.group_words * _WORD_BYTES

    def tensor_map(operand: int) -> TensorMap:
        return TensorMap(
            operand,
            "uint32",
            dims=(tile.group_words, token_bytes // group_bytes, spec.tokens, spec.batch),
            strides_bytes=(group_bytes, token_bytes, token_bytes * spec.tokens),
            box=(tile.group_words, tile.groups, tile.tokens, 1),
        )

    values = {
        "out_map": tensor_map(0),
        "grad_out_map": tensor_map(1),
        "delta": Pointer(3 if spec.has_grad_lse else 2),
        "grad_lse": Pointer(2),  # without dLSE some address; the kernel does not read it
        "has_grad_lse": Int32(int(spec.has_grad_lse)),
        "tokens": Int32(spec.tokens),
        "heads": Int32(spec.heads),
        "chunks": Int32(spec.head_dim // _CHUNK),
        "lane_bits": Int32(lane_bits(spec.head_dim)),
        "token_bits": Int32(tile.tokens.bit_length() - 1),
        "tile_heads": Int32(tile.heads),
        "tile_groups": Int32(tile.groups),
        "tiles": Int32(tiles),
        "head_tiles": Int32(head_tiles),
        "token_tiles": Int32(token_tiles),
        "stages": Int32(memory.stages),
        "stage_bytes": Int32(memory.stage_bytes),
        "box_bytes": Int32(tile.box_bytes),
        "turned_offset": Int32(memory.turned_offset),
        "barrier_offset": Int32(memory.barrier_offset),
    }
    return Launch(
        kernel=spec.variant.name,
        sha256=cubin.sha256,
        symbol=cubin.symbol,
        grid=(min(tiles, target.sm_count * config.blocks_per_sm), 1, 1),
        block=cubin.block,
        params=abi.bind(spec.variant.parameters, values),
        shared_bytes=memory.total,
    )


def make_plan(spec: DeltaSpec, cubins: Sequence[Cubin], config: DeltaConfig = DEFAULT_CONFIG) -> LaunchPlan:
    """The plan for one call.

    Args:
      spec: the call.
      cubins: ``spec.variant`` for each architecture that the plan is to run on.
      config: what may be tuned.

    Raises:
      ValueError: the kernel does not take the call, or the configuration does not fit; the message names the limit.
    """
    if limit := spec.limit():
        raise ValueError(f"delta kernel: {limit}")
    programs = tuple(Program(cubin.arch, (launch(spec, cubin, config),)) for cubin in cubins)
    return LaunchPlan("delta", spec.argument_bytes, spec.result_bytes, programs)
