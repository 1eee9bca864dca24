"""Random attention cases over shapes, masks and options, that kernels of every architecture are checked on."""

from __future__ import annotations

from collections.abc import Callable

import ml_dtypes
import numpy as np

import attention_cases
from attention_cases import Arrays, Case, Shape

LENGTHS = (1, 2, 7, 31, 64, 65, 100, 127, 128, 129, 150, 200, 255, 256, 257, 300, 384)
# Those that people come for are frequent; the rest is any multiple of 8.
HEAD_DIMS = ((64, 64), (128, 128), (96, 96), (72, 72), (80, 80), (160, 160), (192, 192), (256, 256), (192, 128))
HEAD_DIMS += ((64, 128), (128, 64), (256, 128), (40, 40), (112, 112), (136, 136), (128, 96), (8, 8), (320, 320))
HEAD_DIMS += ((512, 512), (512, 128), (64, 512))
HEADS = ((1, 1), (2, 2), (2, 1), (3, 1), (4, 2), (4, 1))
WINDOWS = (5, (4, 0), (None, 3), (60, None), (100, 30), (0, 0), (200, 17))


def random_case(seed: int) -> tuple[Case, float]:
    """A case and the magnitude of its queries and keys, 50 for scores beyond 1e4; the seed decides everything."""
    rng = np.random.default_rng([seed, 77])

    def pick(choices):
        return choices[rng.integers(len(choices))]

    H, Hv = pick(HEAD_DIMS) if rng.random() < 0.7 else (8 * int(rng.integers(1, 33)), 8 * int(rng.integers(1, 33)))
    N, K = pick(HEADS)
    T, S = pick(LENGTHS), pick(LENGTHS)
    if rng.random() < 0.4:
        S = T
    if H + Hv > 400:  # big head dims on short sequences, so that a case takes about a second
        N, K, T, S = 1, 1, min(T, 200), min(S, 200)
    shape = Shape(int(rng.integers(1, 3)) if T * S * N < 40000 else 1, T, S, N, K, H, Hv)
    options = {}
    kind = pick(("full", "causal", "causal", "bottom_right", "window", "window causal", "window bottom_right"))
    if "causal" in kind or kind == "bottom_right":
        options["is_causal"] = True
    if "bottom_right" in kind:
        options["causal_alignment"] = "bottom_right"
    if "window" in kind:
        options["local_window_size"] = pick(WINDOWS)
    if rng.random() < 0.2:
        options["logits_soft_cap"] = float(pick((2.0, 15.0, 50.0)))
    if rng.random() < 0.15:
        options["scale"] = float(pick((0.5, -0.2, 0.01)))
    ragged = rng.random()
    case = Case(
        f"random{seed}",
        shape,
        tuple(sorted(options.items())),
        lengths=pick(("query", "key", "both")) if 0.2 < ragged < 0.45 else "",
        segments=bool(ragged < 0.2),
        sinks=bool(rng.random() < 0.2),
    )
    return case, float(pick((1.0, 1.0, 1.0, 4.0, 50.0)))


def check(case: Case, magnitude: float, seed: int, evaluate: Callable[..., dict[str, np.ndarray]]) -> None:
    """Asserts that ``evaluate(case, inputs, cotangents)`` passes, with poison wherever nothing may look."""
    dtype = ml_dtypes.bfloat16 if seed % 3 else np.float16
    inputs = attention_cases.make_inputs(case, seed, dtype, magnitude)
    cotangents = attention_cases.make_cotangents(case, seed, dtype)
    expected = attention_cases.definition(case, inputs, cotangents)
    plain = attention_cases.yardstick(case, inputs, cotangents, tensor_core_einsum)
    poisoned: tuple[Arrays, tuple[np.ndarray, np.ndarray]] = attention_cases.poison(case, inputs, cotangents)
    attention_cases.check_results(case, evaluate(case, *poisoned), expected, plain)


def tensor_core_einsum(equation: str, query: np.ndarray, key: np.ndarray) -> np.ndarray:
    """Scores as a tensor core sums them: exactly within 16 head dims, then truncated to float32.

    Its window has one bit more than float32, so this is the yardstick of any computation on the hardware, not of the
    kernel alone.
    """
    total = np.zeros(())
    for first in range(0, query.shape[-1], 16):
        part = slice(first, first + 16)
        total = total + np.einsum(equation, query[..., part].astype(np.float64), key[..., part].astype(np.float64))
        rounded = total.astype(np.float32)
        total = np.where(np.abs(rounded) > np.abs(total), np.nextafter(rounded, np.float32(0)), rounded)
        total = total.astype(np.float64)
    return total.astype(np.float32)
