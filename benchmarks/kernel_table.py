"""What the Blackwell kernels cost, as a Markdown table; no GPU is needed.

MMA FLOP, exponentials and PTX instructions are counted in the emulator on one head; the loop over blocks is counted in
the machine code. All are per score that the mask lets through, so that work on masked scores shows. Registers are those
at launch; setmaxnreg moves them between warps later. The bound is that of the plans' account (``plan/account.py``), or
of issue if that is lower: the counted instructions by four schedulers. Published figures, none of them measured here,
are the best that docs/kernels.md names for the shape, on the part that is nearest.
"""

import argparse
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "tests"))

from emulator import attention_counts as counts
from jax_fa_blackwell.plan import backward, forward
from jax_fa_blackwell.plan.account import combined_tflops
from jax_fa_blackwell.plan.slices import ROWS
from jax_fa_blackwell.plan.spec import AttentionSpec
from jax_fa_blackwell.plan.target import get_target

HEAD_DIMS = (64, 72, 96, 128, 160, 192, 256, 320, 512)
PUBLISHED = {
    ("forward", 64): 1251,
    ("forward", 128): 1783,
    ("forward", 256): 1900,
    ("forward", 512): 1493,
    ("backward", 64): 903,
    ("backward", 128): 1490,
    ("backward", 256): 1132,
    ("backward", 512): 763,
}
SCHEDULERS = 4
HEADER = (
    "pass",
    "head dim",
    "mask",
    "kernel",
    "registers",
    "spills, bytes",
    "shared memory, KiB",
    "Tensor Memory columns",
    "MMA GFLOP",
    "of ideal",
    "PTX instructions a score",
    "loop a score: whole / masked block",
    "ex2 a score",
    "bound, TFLOP/s",
    "best published",
)


def rows(spec: AttentionSpec) -> list[tuple[str, ...]]:
    """The forward's row and the backward's."""
    target = get_target(counts.ARCH)
    plan, passes = forward.plan_forward(spec, target), backward.plan_backward(spec, target)
    H, Hv = spec.head_dim, spec.value_head_dim
    names = [one.kernel for one in passes]
    return [
        row("forward", spec, [plan], [plan.kernel], counts.run_forward(spec), H + Hv),
        row("backward", spec, passes, names, counts.run_backward(spec), 3 * H + 2 * Hv),
    ]


def row(name: str, spec: AttentionSpec, passes, kernels, report, ideal_dims: int) -> tuple[str, ...]:
    """Cells; numbers of several launches stand side by side."""
    scores = counts.scores(spec)
    made = [counts.compiled(kernel) for kernel in kernels]
    loops = [counts.exponential_loop(kernel) for kernel in kernels]
    flop = counts.mma_flop(report)
    accounts = [one.account() for one in passes]
    bound = combined_tflops(accounts)
    whole_scores = sum(counts.scores_of_blocks(spec, one) for one in passes) / len(passes)
    issue = counts.work(report) / SCHEDULERS / (whole_scores / ROWS**2)
    by_issue = bound * sum(account.bound[1] for account in accounts) / issue

    def side_by_side(values) -> str:
        return ", ".join(map(str, values))

    return (
        name,
        str(spec.head_dim),
        "none" if spec.mask_form == "none" else "causal",
        side_by_side(kernel.split("_", 3)[3] for kernel in kernels),
        side_by_side(one.resources.registers for one in made),
        side_by_side(one.resources.local_bytes for one in made),
        side_by_side(one.shared_bytes // 1024 for one in passes),
        side_by_side(max(end for _, _, end in one.tensor_memory_map()) for one in passes),
        f"{flop / 1e9:.2f}",
        f"{flop / (2 * scores * ideal_dims):.2f}",
        f"{counts.LANES * counts.work(report) / scores:.2f}",
        side_by_side(f"{loop.whole / loop.scores:.2f} / {loop.masked / loop.scores:.2f}" for loop in loops),
        f"{counts.exponentials(report) / scores:.2f}",
        f"{min(bound, by_issue):,.0f}",
        str(PUBLISHED.get((name, spec.head_dim), "")),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="What the Blackwell kernels cost, as a Markdown table.")
    parser.add_argument("--length", type=int, default=1024, help="queries and keys")
    arguments = parser.parse_args()
    table = [HEADER, ("---",) * len(HEADER)]
    for causal in (False, True):
        for head_dim in HEAD_DIMS:
            table += rows(counts.make_spec(arguments.length, head_dim, head_dim, causal))
    for cells in table:
        print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
