"""A kernel's scalar parameters by name, in the order of its declaration in ``registry``."""

from __future__ import annotations

from jax_fa_blackwell.kernels import registry


def integer_names(kernel: str) -> tuple[str, ...]:
    """Names of the kernel's Int32 parameters, which its signature takes as one tuple."""
    return tuple(p.name for p in registry.KERNELS[kernel].parameters if p.kind == "int32")


class Params:
    """The integers of ``integer_names`` and, by keyword, the floats, as attributes."""

    def __init__(self, kernel: str, integers, **floats):
        for name, value in (*zip(integer_names(kernel), integers, strict=True), *floats.items()):
            setattr(self, name, value)
