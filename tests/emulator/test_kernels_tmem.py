"""TMEM loads and stores of every shape and repetition, plain and packed: each register at its lane and column."""

import numpy as np
import pytest

import emulator
from emulator.kernels import tmem

ACCESSES = tmem.all_accesses()


@pytest.mark.emulator
@pytest.mark.parametrize("access", ACCESSES, ids=lambda a: a.name)
def test_round_trip(access: tmem.Access):
    loaded = np.zeros((128, access.registers), np.uint32)
    stored = np.zeros((128, access.allocated), np.uint32)
    schedule = emulator.Schedule(seed=access.num, async_="random")
    emulator.load(tmem.ptx(access)).launch(
        grid=(1, 1, 1), block=(128, 1, 1), params=[loaded, stored], schedule=schedule
    )
    want_loaded, want_stored = tmem.expected(access)
    np.testing.assert_array_equal(loaded, want_loaded)
    # an unpacked store says nothing about the upper halves of its columns
    mask = np.uint32(0xFFFF if access.packed else 0xFFFFFFFF)
    np.testing.assert_array_equal(stored & mask, want_stored & mask)


def test_places_cover_lanes_and_columns_once():
    """The map of registers to lanes and columns is a bijection for every shape: nothing is read or written twice."""
    for access in ACCESSES:
        lane, _ = access.places()
        low, high = access.columns_of()
        cells = set(zip(lane.ravel().tolist(), low.ravel().tolist(), strict=True))
        if access.packed:
            cells |= set(zip(lane.ravel().tolist(), high.ravel().tolist(), strict=True))
        assert len(cells) == lane.size * (2 if access.packed else 1), access.name
