"""The parameter list of a kernel, as data that needs no kernel DSL.

The kernel's signature, the launch plan and the cubin's own parameter table must agree. A kernel declares its list once
(in ``registry``); the exporter checks the cubin against it, and plans pass their parameters by name through ``bind``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from jax_fa_blackwell.plan import launch

KINDS: dict[str, type] = {
    "tensor_map": launch.TensorMap,
    "pointer": launch.Pointer,
    "int32": launch.Int32,
    "float32": launch.Float32,
}


@dataclasses.dataclass(frozen=True)
class Parameter:
    """One parameter of a kernel; ``kind`` is one of KINDS."""

    name: str
    kind: str

    def __post_init__(self):
        if self.kind not in KINDS:
            raise ValueError(f"kind of parameter {self.name!r} must be one of {', '.join(KINDS)}; got {self.kind!r}")

    @property
    def size(self) -> int:
        """Bytes that the parameter takes."""
        return KINDS[self.kind].size

    @property
    def alignment(self) -> int:
        """Alignment of the parameter in bytes."""
        return KINDS[self.kind].alignment


def parameters(**kinds: str) -> tuple[Parameter, ...]:
    """Parameters in order, each as ``name="kind"``."""
    return tuple(Parameter(name, kind) for name, kind in kinds.items())


def table(declared: Sequence[Parameter], base: int) -> tuple[tuple[int, int], ...]:
    """(offset, size) in bytes of each parameter.

    The rule is C's for a struct, save that it is addresses that are aligned: ``base`` is where the parameters begin in
    the constant bank. On sm_90 that is no multiple of 64, so a leading tensor map does not have offset 0.
    """
    out = []
    end = base
    for parameter in declared:
        address = -(-end // parameter.alignment) * parameter.alignment
        out.append((address - base, parameter.size))
        end = address + parameter.size
    return tuple(out)


def bind(declared: Sequence[Parameter], values: Mapping[str, launch.Param]) -> tuple[launch.Param, ...]:
    """The values in the declared order.

    Raises:
      ValueError: a name is missing, unknown, or its value is of another kind than declared.
    """
    names = [parameter.name for parameter in declared]
    if set(names) != set(values):
        missing, unknown = sorted(set(names) - set(values)), sorted(set(values) - set(names))
        raise ValueError(f"kernel parameters: missing {missing}, unknown {unknown}")
    for parameter in declared:
        value = values[parameter.name]
        if not isinstance(value, KINDS[parameter.kind]):
            raise ValueError(f"kernel parameter {parameter.name!r} must be a {parameter.kind}; got {value!r}")
    return tuple(values[name] for name in names)
