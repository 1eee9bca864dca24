import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attention_cases import interval_mask
from jax_fa_blackwell import reference
from jax_fa_blackwell.masks import KvIntervals, MaskArguments, block_spans, kv_intervals, query_intervals

# Few shapes, so that few programs are compiled.
SHAPES = ((1, 1), (8, 8), (5, 11), (11, 5))
BATCH = 2


@st.composite
def segment_ids(draw, length):
    """One row of ids in contiguous runs, in any order, with padding anywhere."""
    ids = draw(st.permutations([0, 1, 3, 7, 2**31 - 1]))
    cuts = sorted(draw(st.lists(st.integers(0, length), min_size=9, max_size=9)))
    parts = [part for pair in zip(ids, [-1, -5, -1, -(2**31), -1], strict=True) for part in pair]
    return np.repeat(parts, np.diff([0, *cuts, length])).astype(np.int32)


@st.composite
def mask_keywords(draw):
    """Any combination of mask arguments of flash_attention, as keywords of interval_mask, with B, T, S."""
    T, S = draw(st.sampled_from(SHAPES))
    side = st.one_of(st.none(), st.integers(0, 12), st.just(2**40))
    keywords = {
        "is_causal": draw(st.booleans()),
        "causal_alignment": draw(st.sampled_from(["top_left", "bottom_right"])),
        "local_window_size": draw(st.one_of(st.none(), st.tuples(side, side))),
    }
    for name, limit in (("query_seq_lengths", T), ("key_value_seq_lengths", S)):
        if draw(st.booleans()):
            lengths = draw(st.lists(st.integers(0, limit), min_size=BATCH, max_size=BATCH))
            keywords[name] = np.array(lengths, np.int32)
    if draw(st.booleans()):
        for name, limit in (("query_segment_ids", T), ("key_value_segment_ids", S)):
            keywords[name] = np.stack([draw(segment_ids(limit)) for _ in range(BATCH)])
    return T, S, keywords


def make_arguments(T, S, keywords, batch=BATCH):
    window = keywords.get("local_window_size")
    left, right = (None, None) if window is None else window
    if keywords.get("is_causal"):
        right = 0
    arrays = {
        name: jnp.asarray(array) for name, array in keywords.items() if name.endswith(("_seq_lengths", "_segment_ids"))
    }
    bottom_right = keywords.get("causal_alignment") == "bottom_right"
    return MaskArguments(batch, T, S, left, right, bottom_right, **arrays)


def to_dense(intervals: KvIntervals, batch=BATCH):
    lo, hi = (np.asarray(bound)[:, :, None] for bound in intervals.rows(batch))
    keys = np.arange(intervals.key_value_length)
    return (lo <= keys) & (keys < hi)


@settings(max_examples=80, deadline=None)
@given(mask_keywords())
def test_intervals_are_the_mask_of_the_definition(drawn):
    T, S, keywords = drawn
    expected = interval_mask(BATCH, T, S, **keywords)
    intervals = kv_intervals(make_arguments(T, S, keywords))
    np.testing.assert_array_equal(to_dense(intervals), expected)
    if intervals.form == "none":
        assert expected.all()
    if intervals.form == "affine":
        row = np.arange(T)[:, None]
        lo, hi = np.maximum(0, row + intervals.lower), np.minimum(S, row + intervals.upper)
        key = np.arange(S)
        np.testing.assert_array_equal(np.broadcast_to((lo <= key) & (key < hi), expected.shape), expected)


@settings(max_examples=40, deadline=None)
@given(mask_keywords())
def test_query_intervals_are_the_transposed_mask(drawn):
    T, S, keywords = drawn
    expected = interval_mask(BATCH, T, S, **keywords).swapaxes(1, 2)
    np.testing.assert_array_equal(to_dense(query_intervals(make_arguments(T, S, keywords))), expected)


@settings(max_examples=40, deadline=None)
@given(mask_keywords())
def test_reference_builds_the_mask_of_the_definition(drawn):
    T, S, keywords = drawn
    dense = np.asarray(reference.dense_mask(make_arguments(T, S, keywords)))
    np.testing.assert_array_equal(np.broadcast_to(dense, (BATCH, T, S)), interval_mask(BATCH, T, S, **keywords))


@settings(max_examples=40, deadline=None)
@given(mask_keywords(), st.sampled_from([1, 3, 4]), st.sampled_from([1, 4, 5]))
def test_block_spans_hold_every_visible_block_and_affine_ones_no_other(drawn, rows, block):
    T, S, keywords = drawn
    rows, block = min(rows, T), min(block, S)
    intervals = kv_intervals(make_arguments(T, S, keywords))
    first_rows = np.minimum(np.arange(-(-T // rows)) * rows, T - rows)
    begin, end, span = block_spans(intervals, first_rows, rows, block)
    visible = interval_mask(BATCH, T, S, **keywords).any(0)
    for index, first in enumerate(first_rows):
        needed = np.flatnonzero(np.any(np.asarray(visible)[first : first + rows], axis=0)) // block
        inside = range(int(begin[index]), int(end[index]))
        assert set(needed) <= set(inside)
        assert len(inside) <= span
        if intervals.form == "affine" and needed.size:
            assert set(inside) == set(needed)


def test_empty_intervals_are_canonical_so_that_extremes_over_rows_ignore_them():
    keywords = {"query_seq_lengths": np.array([2, 0], np.int32), "local_window_size": (1, 0)}
    lo, hi = kv_intervals(make_arguments(8, 8, keywords)).rows(BATCH)
    np.testing.assert_array_equal(lo, [[0, 0] + [8] * 6, [8] * 8])
    np.testing.assert_array_equal(hi, [[1, 2] + [0] * 6, [0] * 8])


def test_windows_wider_than_int32_do_not_overflow():
    keywords = {"local_window_size": (2**40, 2**40), "query_seq_lengths": np.array([8, 3], np.int32)}
    assert to_dense(kv_intervals(make_arguments(8, 8, keywords)))[0].all()


@pytest.mark.parametrize(("T", "S", "batch"), [(0, 4, 2), (4, 0, 2), (0, 0, 2), (4, 4, 0)])
def test_empty_shapes(T, S, batch):
    ids = {
        "query_segment_ids": np.zeros((batch, T), np.int32),
        "key_value_segment_ids": np.zeros((batch, S), np.int32),
    }
    for keywords in ({}, ids, {"is_causal": True}, {"key_value_seq_lengths": np.zeros(batch, np.int32)}):
        for intervals in (kv_intervals, query_intervals):
            lo, hi = intervals(make_arguments(T, S, keywords, batch)).rows(batch)
            assert lo.shape == hi.shape == (batch, T if intervals is kv_intervals else S)
            assert not np.any(np.asarray(hi) > np.asarray(lo))


@pytest.mark.parametrize("name", ["kv", "query"])
def test_segments_need_no_quadratic_memory(name):
    build = {"kv": kv_intervals, "query": query_intervals}[name]

    def bounds(query_ids, key_ids):
        T = query_ids.shape[1]
        arguments = MaskArguments(1, T, T, 5, 0, True, None, None, query_ids, key_ids)
        return build(arguments).rows(1)

    sizes = []
    for T in (1 << 10, 1 << 12):
        ids = jax.ShapeDtypeStruct((1, T), jnp.int32)
        memory = jax.jit(bounds).lower(ids, ids).compile().memory_analysis()
        assert memory is not None
        sizes.append(memory.temp_size_in_bytes)
    assert sizes[1] <= 4.5 * sizes[0]


def test_lengths_and_segments_work_under_jit_and_vmap():
    keywords = {"query_seq_lengths": np.array([5, 2], np.int32), "causal_alignment": "bottom_right", "is_causal": True}
    expected = interval_mask(BATCH, 8, 8, **keywords)

    @jax.jit
    @jax.vmap
    def rows(length):
        return kv_intervals(MaskArguments(1, 8, 8, None, 0, True, length[None])).rows(1)

    lo, hi = (np.asarray(bound)[:, 0, :, None] for bound in rows(keywords["query_seq_lengths"]))
    key = np.arange(8)
    np.testing.assert_array_equal((lo <= key) & (key < hi), expected)
