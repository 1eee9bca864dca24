"""Cycle accounts: what a tile of 128 x 128 scores costs each unit of an SM, from the rates in ``target.py``.

The formulas are those of the FlashAttention-4 paper: MMA is 2 M N K FLOP a product at the dense rate, exp2 one result a
score, shared memory the operands that MMAs read there and what TMA writes there. The greatest is a lower bound of the
time, because the units work side by side; instruction issue is counted in the emulator instead (docs/kernels.md).
"""

from __future__ import annotations

import dataclasses

from jax_fa_blackwell.plan.slices import ROWS
from jax_fa_blackwell.plan.target import Target

_ELEMENT_BYTES = 2


@dataclasses.dataclass(frozen=True)
class Account:
    """Cycles of one SM for one tile of scores.

    Attributes:
      target: whose rates.
      ideal_dims: head dims that the products of the definition sum over, e.g. H + Hv for the forward.
      mma_dims: those of the products that are computed.
      exp2: exponentials by the special function unit, of 128 x 128.
      read_dims, written_dims: head dims of 128 rows that MMAs read from shared memory, and that TMA writes there.
    """

    target: Target
    ideal_dims: int
    mma_dims: int
    exp2: float
    read_dims: float
    written_dims: float

    @property
    def cycles(self) -> dict[str, float]:
        """By unit."""
        moved = (self.read_dims + self.written_dims) * ROWS * _ELEMENT_BYTES
        return {
            "MMA": 2 * ROWS * ROWS * self.mma_dims / self.target.mma_flops,
            "exp2": ROWS * ROWS * self.exp2 / self.target.exp2_results,
            "shared memory": moved / self.target.shared_memory_bytes,
        }

    @property
    def bound(self) -> tuple[str, float]:
        """The unit that takes longest, and its cycles."""
        return max(self.cycles.items(), key=lambda item: item[1])

    @property
    def tflops(self) -> float:
        """TFLOP/s, counting the ideal FLOP, of a GPU whose SMs all work at the bound."""
        ideal = 2 * ROWS * ROWS * self.ideal_dims / self.target.mma_flops
        return self.target.dense_tflops * ideal / self.bound[1]


def format_accounts(accounts: list[Account]) -> str:
    """The cycles of passes that follow one another, and the bound."""
    cycles = {unit: sum(account.cycles[unit] for account in accounts) for unit in accounts[0].cycles}
    text = ", ".join(f"{unit} {number:,.0f}" for unit, number in cycles.items())
    return f"{text}; at most {combined_tflops(accounts):,.0f} TFLOP/s of {accounts[0].target.dense_tflops:,.0f}"


def combined_tflops(accounts: list[Account]) -> float:
    """TFLOP/s of passes that follow one another, each at its bound."""
    target = accounts[0].target
    ideal = sum(2 * ROWS * ROWS * account.ideal_dims / target.mma_flops for account in accounts)
    return target.dense_tflops * ideal / sum(account.bound[1] for account in accounts)
