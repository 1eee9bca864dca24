"""delta = rowsum(dO * O) - dLSE: fp32 [B, N, T] and [B, T, N] from 16-bit [B, T, N, H].

One cubin serves every B, T, N and H: the launch plan (``plan/delta.py``) chooses the tile and passes it as numbers.

A tile is ``tile_tokens`` x ``tile_heads`` rows of H elements of O and of dO. One producer warp keeps a ring of
``stages`` tile pairs full; the consumer warps reduce the rows, turn the tile round in shared memory (rows lie head
innermost, the result token innermost) and store runs of tokens. Blocks are persistent and walk the tiles with the
grid's stride, heads first, so that neighbours in time are neighbours in memory.

Bank conflicts: a row is q * 2**k chunks of 16 bytes with q odd. min(8, 2**k) lanes share a row, each taking every
such chunk in turn. Eight lanes, the unit of a 16-byte shared load, then read either 128 consecutive bytes or chunks
that differ modulo 8, so every load is free of conflicts without swizzle, for every H.

Barriers, stage s of the ring:

    barrier   count           arrives                                  waits            phase
    full[s]   1 + box bytes   producer, with expect_tx of two boxes    every consumer   r-th use of s: parity r mod 2
    empty[s]  consumer warps  one lane of each consumer warp, when     producer         r-th use of s: parity (r+1)
                              the warp has read its rows                                mod 2 (first use: at once)
    bar 1     all consumers   every consumer, once a tile, between     same             no second barrier, since
                              writing and reading `turned`                              `turned` has two buffers

Shared memory, from the launch plan's map: the ring (O then dO of each stage), `turned`, full, empty.
"""

# The DSL is found through a .pth file and rewrites what it decorates: neither is visible to a type checker.
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
from __future__ import annotations

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32
from cutlass.cute.runtime import make_ptr

from jax_fa_blackwell.kernels.common import tma

LANES = 32
CHUNK = 8
"""16-bit elements of a 16-byte shared load."""
CONSUMER_BARRIER = 1
RANK = 4
"""Of the tensor maps: words, groups of words, tokens, batch."""


class Delta:
    """The kernel for one element type.

    Attributes:
      dtype: cutlass.BFloat16 or cutlass.Float16.
      consumer_warps: warps that reduce; one more warp loads.
      outputs: results of a tile that one consumer thread stores; bounds the rows of a tile.
    """

    def __init__(self, dtype: type, consumer_warps: int, outputs: int):
        self.dtype = dtype
        self.consumer_warps = consumer_warps
        self.outputs = outputs

    @property
    def consumers(self) -> int:
        """Consumer threads."""
        return LANES * self.consumer_warps

    @cute.jit
    def __call__(
        self,
        words: cute.Pointer,
        delta: cute.Pointer,
        grad_lse: cute.Pointer,
        n: Int32,
        stream: cuda.CUstream,
    ):
        """Host side, only there to be compiled: the package launches by its own plan."""
        atom = tma.make_load_atom(words, n, RANK)
        self.kernel(atom, atom, delta, grad_lse, n, n, n, n, n, n, n, n, n, n, n, n, n, n, n, n).launch(
            grid=(n, 1, 1), block=(LANES + self.consumers, 1, 1), smem=n, stream=stream
        )

    @cute.kernel
    def kernel(
        self,
        out_map: cute.CopyAtom,
        grad_out_map: cute.CopyAtom,
        delta: cute.Pointer,
        grad_lse: cute.Pointer,
        has_grad_lse: Int32,
        tokens: Int32,
        heads: Int32,
        chunks: Int32,
        lane_bits: Int32,
        token_bits: Int32,
        tile_heads: Int32,
        tile_groups: Int32,
        tiles: Int32,
        head_tiles: Int32,
        token_tiles: Int32,
        stages: Int32,
        stage_bytes: Int32,
        box_bytes: Int32,
        turned_offset: Int32,
        barrier_offset: Int32,
    ):
        """Sets the barriers up and sends each warp to its role.

        Args:
          out_map: tensor map of O.
          grad_out_map: tensor map of dO.
          delta: fp32 [B, N, T].
          grad_lse: fp32 [B, T, N]; not read unless has_grad_lse.
          has_grad_lse: 0 or 1.
          tokens: T.
          heads: N.
          chunks: 16-byte chunks of a row, H / 8.
          lane_bits: log2 of the lanes that share a row.
          token_bits: log2 of the tokens of a tile.
          tile_heads: heads of a tile.
          tile_groups: extent of a tile in the maps' second dimension.
          tiles: tiles in all.
          head_tiles: tiles along heads.
          token_tiles: tiles along tokens.
          stages: of the ring.
          stage_bytes: of one stage; it holds a tile of O and, from its half, one of dO.
          box_bytes: bytes of one tile.
          turned_offset: where `turned` begins in shared memory.
          barrier_offset: where the barriers begin in shared memory.
        """
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        shared = cute.arch.get_dyn_smem(tma.WORD, alignment=128)
        full = cute.recast_ptr(shared, dtype=Int64) + (barrier_offset >> 3)
        empty = full + stages
        if warp == 0:
            with cute.arch.elect_one():
                for stage in cutlass.range(stages):
                    cute.arch.mbarrier_init(full + stage, 1)
                    cute.arch.mbarrier_init(empty + stage, self.consumer_warps)
            cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()

        if warp == self.consumer_warps:
            self.load(
                out_map, grad_out_map, shared, full, empty, token_bits, tile_groups, tiles, head_tiles, token_tiles,
                stages, stage_bytes, box_bytes,
            )  # fmt: skip
        else:
            self.reduce(
                delta, grad_lse, shared, full, empty, has_grad_lse, tokens, heads, chunks, lane_bits, token_bits,
                tile_heads, tiles, head_tiles, token_tiles, stages, stage_bytes, turned_offset,
            )  # fmt: skip

    @cute.jit
    def load(
        self, out_map, grad_out_map, shared, full, empty, token_bits, tile_groups, tiles, head_tiles, token_tiles,
        stages, stage_bytes, box_bytes,
    ):  # fmt: skip
        """Producer: fills each stage once it is empty."""
        first, _, _ = cute.arch.block_idx()
        step, _, _ = cute.arch.grid_dim()
        stage, phase = Int32(0), Int32(1)
        for tile in cutlass.range(first, tiles, step, unroll=1):
            batch, token_tile, head_tile = self.place(tile, head_tiles, token_tiles)
            cute.arch.mbarrier_wait(empty + stage, phase)
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(full + stage, 2 * box_bytes)
            target = shared + stage * (stage_bytes >> 2)
            coordinates = (0, head_tile * tile_groups, token_tile << token_bits, batch)
            tma.load_tile(out_map, coordinates, target, full + stage)
            tma.load_tile(grad_out_map, coordinates, target + (stage_bytes >> 3), full + stage)
            stage += 1
            if stage == stages:
                stage = Int32(0)
                phase ^= 1

    @cute.jit
    def reduce(
        self, delta, grad_lse, shared, full, empty, has_grad_lse, tokens, heads, chunks, lane_bits, token_bits,
        tile_heads, tiles, head_tiles, token_tiles, stages, stage_bytes, turned_offset,
    ):  # fmt: skip
        """Consumers: reduce the rows of each stage and store them."""
        first, _, _ = cute.arch.block_idx()
        step, _, _ = cute.arch.grid_dim()
        thread, _, _ = cute.arch.thread_idx()
        rows = tile_heads << token_bits
        ring = cute.recast_ptr(shared, dtype=self.dtype)
        ring = cute.make_tensor(ring, cute.make_layout((CHUNK, stages * (stage_bytes >> 4)), stride=(1, CHUNK)))
        buffers = cute.recast_ptr(shared, dtype=Float32) + (turned_offset >> 2)
        # The results of this thread: head and token in the tile. Neighbouring threads have neighbouring tokens.
        in_heads = [(thread + i * self.consumers) >> token_bits for i in range(self.outputs)]
        in_tokens = [(thread + i * self.consumers) & ((1 << token_bits) - 1) for i in range(self.outputs)]
        stage, phase, buffer = Int32(0), Int32(0), Int32(0)
        for tile in cutlass.range(first, tiles, step, unroll=1):
            batch, token_tile, head_tile = self.place(tile, head_tiles, token_tiles)
            head, token = head_tile * tile_heads, token_tile << token_bits
            heads_left, tokens_left = cutlass.min(heads - head, tile_heads), tokens - token

            # Asked for before the wait, so that the two latencies overlap.
            subtrahends = grad_lse + ((Int64(batch) * tokens + token) * heads + head)
            subtrahend = cute.make_rmem_tensor(self.outputs, Float32)
            for i in cutlass.range_constexpr(self.outputs):
                subtrahend[i] = Float32(0.0)
                if has_grad_lse != 0 and in_heads[i] < heads_left and in_tokens[i] < tokens_left:
                    subtrahend[i] = load(subtrahends, in_tokens[i] * heads + in_heads[i])

            cute.arch.mbarrier_wait(full + stage, phase)
            turned = buffers + buffer * rows
            self.reduce_rows(ring, stage * (stage_bytes >> 4), stage_bytes >> 5, chunks, lane_bits, rows, turned)
            cute.arch.sync_warp()
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive(empty + stage)
            cute.arch.barrier(barrier_id=CONSUMER_BARRIER, number_of_threads=self.consumers)

            results = delta + ((Int64(batch) * heads + head) * tokens + token)
            for i in cutlass.range_constexpr(self.outputs):
                if in_heads[i] < heads_left and in_tokens[i] < tokens_left:
                    value = load(turned, in_tokens[i] * tile_heads + in_heads[i]) - subtrahend[i]
                    store(results, Int64(in_heads[i]) * tokens + in_tokens[i], value)
            buffer ^= 1
            stage += 1
            if stage == stages:
                stage = Int32(0)
                phase ^= 1

    @cute.jit
    def place(self, tile, head_tiles, token_tiles):
        """Batch entry, token tile and head tile of a tile. Unsigned, since signed division costs twice as much."""
        tile, head_tiles, token_tiles = Uint32(tile), Uint32(head_tiles), Uint32(token_tiles)
        rest = tile // head_tiles
        batch = rest // token_tiles
        return Int32(batch), Int32(rest - batch * token_tiles), Int32(tile - rest * head_tiles)

    @cute.jit
    def reduce_rows(self, ring, first_chunk, to_grad_out, chunks, lane_bits, rows, turned):
        """One warp's share of a stage: row sums of products into `turned`, in the order of the rows."""
        thread, _, _ = cute.arch.thread_idx()
        lane = cute.arch.lane_idx()
        rows_a_pass = LANES >> lane_bits
        part = lane & ((1 << lane_bits) - 1)
        warp = cute.arch.make_warp_uniform(thread // LANES)
        for row0 in cutlass.range(warp * rows_a_pass, rows, self.consumer_warps * rows_a_pass, unroll=1):
            row = row0 + (lane >> lane_bits)
            # Lanes past the last row repeat it: the warp stays together for the shuffles.
            chunk = first_chunk + cutlass.min(row, rows - 1) * chunks + part
            even, odd = Float32(0.0), Float32(0.0)
            for step in cutlass.range(chunks >> lane_bits, unroll=2):
                at = chunk + (step << lane_bits)
                out, grad_out = self.widened(ring[None, at]), self.widened(ring[None, at + to_grad_out])
                for i in cutlass.range_constexpr(0, CHUNK, 2):
                    even += out[i] * grad_out[i]
                    odd += out[i + 1] * grad_out[i + 1]
            total = even + odd
            for distance in cutlass.range_constexpr(3):
                if lane_bits > distance:
                    total += cute.arch.shuffle_sync_bfly(total, 1 << distance)
            if part == 0 and row < rows:
                store(turned, row, total)

    @cute.jit
    def widened(self, chunk):
        """A 16-byte chunk as eight fp32 values in registers."""
        wide = cute.make_rmem_tensor(CHUNK, Float32)
        if cutlass.const_expr(self.dtype is cutlass.BFloat16):
            # bfloat16 is the upper half of fp32: one operation an element, where the compiler's conversion takes two.
            words, bits = cute.recast_tensor(chunk, Uint32).load(), cute.recast_tensor(wide, Uint32)
            for i in cutlass.range_constexpr(CHUNK // 2):
                bits[2 * i] = words[i] << Uint32(16)
                bits[2 * i + 1] = words[i] & Uint32(0xFFFF0000)
        else:
            wide.store(chunk.load().to(Float32))
        return wide


def build(name: str, options: dict):
    """The host function and its arguments for the DSL's compiler; the entry's symbol begins with ``name``."""
    dtype = {"bfloat16": cutlass.BFloat16, "float16": cutlass.Float16}[options["dtype"]]
    kernel = Delta(dtype, options["consumer_warps"], options["outputs"])
    Delta.kernel.set_name_prefix(name, remove_cutlass_symbol=True, keep_mangled_name=False)
    words, floats = (make_ptr(t, 16, cute.AddressSpace.gmem, assumed_align=4) for t in (tma.WORD, Float32))
    return kernel, (words, floats, floats, Int32(5), cuda.CUstream(0))


def load(pointer, index):
    """The element at ``index``."""
    return cute.make_tensor(pointer + index, cute.make_layout(1))[0]


def store(pointer, index, value):
    """Writes the element at ``index``."""
    cute.make_tensor(pointer + index, cute.make_layout(1))[0] = value
