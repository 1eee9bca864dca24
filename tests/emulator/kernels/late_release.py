"""The gradient kernel with its loop in a wrong order: slices of B1 are given back only once all have been multiplied.

The producer cannot bring the last slice of a block while the consumer holds the first ones and waits for it: with
fewer slots than slices this deadlocks, with as many it gives right results.
"""

import dataclasses
import pathlib

PACKAGE = pathlib.Path(__file__).resolve().parents[3] / "jax_fa_blackwell"
SOURCES = tuple(PACKAGE / path for path in ("kernels/sm100/backward.py", "kernels/sm100/slices.py"))
SOURCES += tuple(PACKAGE / path for path in ("kernels/common/ptx.py", "kernels/registry.py", "plan/slices.py"))


@dataclasses.dataclass(frozen=True)
class Config:
    """Which of the two passes."""

    transposed: bool
    dtype: str = "bfloat16"
