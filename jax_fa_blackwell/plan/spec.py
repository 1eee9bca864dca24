"""AttentionSpec, one call as static data; and the one place that decides which implementation runs it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from jax_fa_blackwell.plan.target import Target, get_target

IMPLEMENTATIONS = ("cuda", "xla", "reference")
MASK_FORMS = ("none", "affine", "rows")


@dataclasses.dataclass(frozen=True)
class AttentionSpec:
    """The static description of one attention call: shapes, dtype and options, no arrays. Hashable.

    Attributes:
      batch, query_length, key_value_length, query_heads, key_value_heads, head_dim, value_head_dim: the extents
        B, T, S, N, K, H, Hv.
      dtype: name of the dtype of query, key and value.
      scale: factor of the scores.
      mask_form: "none", every row sees every key; "affine", row i sees ``max(0, i + lower) <= j < min(S, i + upper)``;
        "rows", two int32 arrays [B, T] give each row's first key and the one past its last.
      lower, upper: the two integers of the affine form, else 0.
      bias_shape, mask_shape: 4-D shapes that broadcast to [B, N, T, S], or None.
      logits_soft_cap: the cap c of ``c * tanh(s / c)``, or None.
      has_sinks: whether each head's softmax denominator has a sink.
      deterministic: whether gradients must not depend on the order in which blocks finish.
    """

    batch: int
    query_length: int
    key_value_length: int
    query_heads: int
    key_value_heads: int
    head_dim: int
    value_head_dim: int
    dtype: str
    scale: float
    mask_form: str = "none"
    lower: int = 0
    upper: int = 0
    bias_shape: tuple[int, ...] | None = None
    mask_shape: tuple[int, ...] | None = None
    logits_soft_cap: float | None = None
    has_sinks: bool = False
    deterministic: bool = False

    def __post_init__(self):
        if self.mask_form not in MASK_FORMS:
            raise ValueError(f"mask_form must be one of {MASK_FORMS}; got {self.mask_form!r}")
        if self.key_value_heads < 1 or self.query_heads % self.key_value_heads:
            heads = f"{self.query_heads} and {self.key_value_heads}"
            raise ValueError(f"query_heads must be a multiple of key_value_heads; got {heads}")

    @property
    def group_size(self) -> int:
        """Query heads that share one key and value head."""
        return self.query_heads // self.key_value_heads

    @property
    def accumulator_dtype(self) -> str:
        """The dtype of scores, softmax and LSE: float64 for float64 inputs, else float32."""
        return "float64" if self.dtype == "float64" else "float32"

    @property
    def is_empty(self) -> bool:
        """Whether no score exists, so that the result is known without any work."""
        return not (self.batch and self.query_length and self.key_value_length and self.query_heads)

    def describe(self) -> str:
        """One line for messages."""
        heads = f"{self.query_heads}/{self.key_value_heads} heads"
        dims = f"head dims {self.head_dim}/{self.value_head_dim}"
        mask = {"none": "no mask", "affine": f"diagonal mask [{self.lower}, {self.upper})", "rows": "row intervals"}
        parts = [f"{self.dtype} {self.batch}x{self.query_length}x{self.key_value_length}", heads, dims]
        parts.append(mask[self.mask_form])
        parts += ["bias"] * (self.bias_shape is not None) + ["mask array"] * (self.mask_shape is not None)
        parts += [f"soft cap {self.logits_soft_cap:g}"] if self.logits_soft_cap is not None else []
        parts += ["sinks"] * self.has_sinks + ["deterministic"] * self.deterministic
        return ", ".join(parts)


SupportRule = Callable[[AttentionSpec, Target], str | None]
"""A kernel's rule: None if it runs the spec on the target, forward and backward, else the limit in words."""

KERNELS: dict[str, SupportRule] = {}
"""The attention kernels of this version by name. A kernel's plan module adds its rule; nothing else decides."""


@dataclasses.dataclass(frozen=True)
class Choice:
    """Which implementation runs a call, and why."""

    name: str
    reason: str


def choose_implementation(spec: AttentionSpec, requested: str | None, arch: str | None) -> Choice:
    """Decides which implementation runs a call.

    Args:
      spec: the call.
      requested: "cuda", "xla", "reference", or None for the best available one.
      arch: the GPU architecture that will run it, e.g. ``sm_100a``; None where there is no supported GPU.

    Returns:
      The choice; for requested=None it is "cuda" where a kernel takes the call, else "xla" and the reason says why.

    Raises:
      ValueError: requested is none of the above.
      NotImplementedError: "cuda" was requested and no kernel takes the call; the message names the limit.
    """
    if requested is not None and requested not in IMPLEMENTATIONS:
        raise ValueError(f"implementation must be None or one of {IMPLEMENTATIONS}; got {requested!r}")
    if requested in ("xla", "reference"):
        return Choice(requested, "requested")
    kernel, limit = _find_kernel(spec, arch)
    if kernel is not None:
        return Choice("cuda", f"kernel {kernel} on {arch}")
    if requested == "cuda":
        raise NotImplementedError(f"implementation='cuda': {limit}; the call: {spec.describe()}")
    return Choice("xla", limit)


def _find_kernel(spec: AttentionSpec, arch: str | None) -> tuple[str | None, str]:
    """The first kernel that takes the call, or None and the limits met."""
    if not KERNELS:
        return None, "no forward kernel for attention in this version"
    if arch is None:
        return None, "no GPU of a supported architecture"
    target = get_target(arch)
    limits = []
    for name, supports in KERNELS.items():
        limit = supports(spec, target)
        if limit is None:
            return name, ""
        limits.append(f"{name}: {limit}")
    return None, f"no kernel takes the call on {arch} ({'; '.join(limits)})"
