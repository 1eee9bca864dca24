"""A persistent kernel with cluster launch control: every cluster takes further work from clusters not yet started.

Work item i (of `grid` clusters): out[i] = 3·in[i] + 1 for its 64 elements a CTA, and visits[i] is incremented by each
CTA. Parameters: pointer in, pointer out, pointer visits (all int32).
"""

from dataclasses import dataclass

THREADS = 64


@dataclass(frozen=True)
class Config:
    """CTAs a cluster; with more than one, the answer is multicast to all of them."""

    cluster: int = 1
