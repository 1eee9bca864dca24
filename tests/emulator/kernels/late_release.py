"""The gradient kernel with its loop in a wrong order: slots of B1 are given back only once all have been multiplied.

The producer cannot bring the last slot of a block while the consumer holds the first ones and waits for it: with
a ring smaller than B1 this deadlocks, with one as large it gives right results.
"""

import dataclasses
import pathlib

PACKAGE = pathlib.Path(__file__).resolve().parents[3] / "jax_fa_blackwell"
SOURCES = tuple(PACKAGE / path for path in ("kernels/sm100/backward.py", "kernels/sm100/slices.py"))
COMMON = ("intervals", "params", "ptx", "soft_cap")
SOURCES += tuple(PACKAGE / f"kernels/common/{name}.py" for name in COMMON)
SOURCES += (PACKAGE / "kernels/registry.py",)
SOURCES += (PACKAGE / "plan/slices.py",)


@dataclasses.dataclass(frozen=True)
class Config:
    """Which of the two passes, and whether by pairs of blocks."""

    transposed: bool
    group: int
    dtype: str = "bfloat16"
