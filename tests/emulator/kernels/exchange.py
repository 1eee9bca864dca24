"""Threads of a cluster pass values round: by st.async with byte counts, and by remote stores with remote arrivals.

Parameter: pointer out, int32 [cluster, 2, 64].
"""

from dataclasses import dataclass

THREADS = 64


@dataclass(frozen=True)
class Config:
    """CTAs of the cluster, and how often values go round."""

    cluster: int = 4
    rounds: int = 3


def expected(config: Config) -> list[list[list[int]]]:
    """What the kernel writes, by its definition: nested lists [cluster][2][thread]."""
    ranks = range(config.cluster)
    asynchronous = [[1000 * r + t for t in range(THREADS)] for r in ranks]
    remote = [[7 * r + 3 * t for t in range(THREADS)] for r in ranks]
    for _ in range(config.rounds):
        asynchronous = [[v + asynchronous[r - 1][t] for t, v in enumerate(asynchronous[r])] for r in ranks]
        # the value of the mirrored thread of the CTA behind
        remote = [[2 * v + remote[r - 1][THREADS - 1 - t] for t, v in enumerate(remote[r])] for r in ranks]
    return [[asynchronous[r], remote[r]] for r in ranks]
