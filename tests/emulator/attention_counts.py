"""What the attention kernels execute: MMA FLOP and exponentials in the emulator, instructions in the machine code."""

from __future__ import annotations

import dataclasses
import functools
import math
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

import ml_dtypes
import numpy as np

import emulator
from attention_cases import Case, Shape
from emulator import attention_kernels
from jax_fa_blackwell import cuda, export
from jax_fa_blackwell.kernels import registry
from jax_fa_blackwell.plan import backward, forward
from jax_fa_blackwell.plan.slices import ROWS
from jax_fa_blackwell.plan.spec import AttentionSpec

ARCH = "sm_100a"
LANES = 32
# Moves between registers, which the assembler removes, and what polls barriers, which depends on the schedule.
NOT_WORK = re.compile(r"(mov|bra|mbarrier\.(try|test)_wait)\b")


def make_spec(length: int, head_dim: int, value_head_dim: int, causal: bool) -> AttentionSpec:
    """One sequence and head, with as many keys as queries."""
    shape = Shape(1, length, length, 1, 1, head_dim, value_head_dim)
    options = (("is_causal", True),) if causal else ()
    return attention_kernels.make_spec(Case("counts", shape, options), ml_dtypes.bfloat16)


def run_forward(spec: AttentionSpec, seed: int = 0) -> emulator.Report:
    """The forward on random numbers; ``seed`` is that of the order of warps."""
    return _run(cuda.make_forward_plan, spec, _inputs(spec)[:3], seed)


def run_backward(spec: AttentionSpec, seed: int = 0) -> emulator.Report:
    """All passes of the backward on random numbers, with an LSE near the true one, so that nothing overflows."""
    lse = np.full((1, 1, spec.query_length), math.log(spec.key_value_length), np.float32)
    return _run(cuda.make_backward_plan, spec, [*_inputs(spec), lse, np.zeros_like(lse)], seed)


def _run(make_plan: cuda.MakePlan, spec: AttentionSpec, operands: list[np.ndarray], seed: int) -> emulator.Report:
    schedule = emulator.Schedule(seed=seed, async_="eager")
    return attention_kernels.run(make_plan, spec, operands, ARCH, schedule=schedule)[1]


def _inputs(spec: AttentionSpec) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    T, S, H, Hv = spec.query_length, spec.key_value_length, spec.head_dim, spec.value_head_dim
    shapes = ((1, T, 1, H), (1, S, 1, H), (1, S, 1, Hv), (1, T, 1, Hv))
    # Small scores: the kernels take more care, and exponentials, with great ones.
    return [(0.5 * rng.standard_normal(shape)).astype(ml_dtypes.bfloat16) for shape in shapes]


def scores(spec: AttentionSpec) -> int:
    """Scores that the mask lets through."""
    rows = np.arange(spec.query_length)
    if spec.mask_form == "none":
        return rows.size * spec.key_value_length
    first = np.maximum(rows + spec.lower, 0)
    end = np.minimum(rows + spec.upper, spec.key_value_length)
    return int(np.maximum(end - first, 0).sum())


def scores_of_blocks(spec: AttentionSpec, plan: forward.ForwardPlan | backward.Pass) -> int:
    """Scores of the blocks that a launch computes: for all rows of an item where one of them sees one of the block."""
    if spec.mask_form == "none":
        return spec.query_length * spec.key_value_length
    return ROWS * ROWS * causal_blocks(spec.query_length, plan.group_rows)


def causal_blocks(length: int, group_rows: int) -> int:
    """Blocks of 128 x 128 scores that items of ``group_rows`` rows compute under a causal mask of whole blocks."""
    ends = range(group_rows, length + 1, group_rows)
    return sum(end // ROWS * (group_rows // ROWS) for end in ends)


def mma_flop(report: emulator.Report) -> int:
    """FLOP of the tensor-core operations."""
    total = 0
    for name, count in report.mma.items():
        shape = re.search(r"(\d+)x(\d+)x(\d+)", name)
        assert shape, name
        total += 2 * count * math.prod(map(int, shape.groups()))
    return total


def exponentials(report: emulator.Report) -> int:
    """Results of ex2, of all lanes; more where the order of warps left one split while it computed them."""
    return LANES * sum(count for name, count in report.by_opcode.items() if name.startswith("ex2."))


def work(report: emulator.Report) -> int:
    """PTX instructions of all warps that are work: no moves, branches or polls."""
    return sum(count for name, count in report.by_opcode.items() if not NOT_WORK.match(name))


@dataclasses.dataclass(frozen=True)
class Loop:
    """Machine instructions that one turn of the loop over blocks takes a softmax or compute warp.

    Attributes:
      scores: that a thread handles in a turn.
      whole: instructions on a block that all rows of the warp see whole.
      masked: on any other block.
    """

    scores: int
    whole: int
    masked: int


@functools.cache
def compiled(name: str) -> export.Compiled:
    """A variant's cubin and what is known of it."""
    return export.compile_variant(registry.get_variant(name), ARCH)


def disassembler() -> str | None:
    """The path of nvdisasm, or None."""
    found = next(pathlib.Path(sys.prefix).glob("**/nvidia/*/bin/nvdisasm"), None)
    return str(found) if found else shutil.which("nvdisasm")


def exponential_loop(name: str) -> Loop:
    """The loop over blocks of a variant's machine code."""
    tool = disassembler()
    assert tool, "nvdisasm is not installed"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled(name).cubin)
        file.flush()
        text = subprocess.run([tool, "-c", file.name], capture_output=True, text=True, check=True).stdout
    options = dict(registry.get_variant(name).options)
    columns = options.get("columns")  # of a block of the backward, which two warps share
    return find_loop(text, ROWS if columns is None else int(columns) // 2)


def find_loop(listing: str, per_thread: int) -> Loop:
    """The innermost loop with exponentials for at least half of ``per_thread`` scores in a listing of nvdisasm.

    A turn takes the shortest way that passes every load, store and barrier of its work, and where it masks, every
    select too: masks, and the care that great scores take, are branches that a turn need not enter.
    """
    code, labels = _instructions(listing)
    branches = {at: labels[m[1]] for at, line in enumerate(code) if (m := re.search(r"\bBRA\b.*?(\.L_x_\d+)", line))}
    exponential = [line.find("MUFU.EX2") >= 0 for line in code]
    loops = [(at + 1 - to, to, at + 1) for at, to in branches.items() if to <= at]
    _, begin, end = min(loop for loop in loops if sum(exponential[slice(*loop[1:])]) >= per_thread // 2)

    def turn(wanted: str) -> int:
        ways = {end: (0, 0)}  # from an instruction to the end: minus the wanted that it passes, then its length
        for at in reversed(range(begin, end)):
            is_jump = re.match(r"BRA(\.\w+)* `", code[at]) is not None
            next_ones = [branches[at]] if at in branches and at < branches[at] <= end else []
            next_ones += [] if is_jump and at + 1 < end else [at + 1]
            passed, length = min(ways[to] for to in next_ones if to in ways)
            ways[at] = passed - (re.search(wanted, code[at]) is not None), length + 1
        return ways[begin][1]

    work = r"\b(LDTM|STTM|LDG|SYNCS)\b"
    return Loop(per_thread, turn(work), turn(rf"{work}|\bF?SEL\b"))


def _instructions(text: str) -> tuple[list[str], dict[str, int]]:
    """Instructions of a listing, and the index of the one that each label stands before."""
    code: list[str] = []
    labels: dict[str, int] = {}
    for line in text.splitlines():
        if label := re.match(r"\s*(\.L_x_\d+):", line):
            labels[label[1]] = len(code)
        elif instruction := re.match(r"\s*/\*[0-9a-f]{4,}\*/\s+(.*?)\s*;", line):
            code.append(instruction[1])
    return code, labels
