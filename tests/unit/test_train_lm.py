import importlib
import os
import pathlib
import re

import jax
import numpy as np
import pytest

ROOT = pathlib.Path(__file__).parents[2]
TINY = "--batch 2 --length 48 --layers 1 --width 32 --heads 2 --kv-heads 1 --head-dim 16"


@pytest.fixture(scope="module")
def train_lm():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "examples"))
        yield importlib.import_module("train_lm")


def test_training_beside_another_attention(train_lm, monkeypatch):
    """The benchmark's stand-in for cuDNN, here by XLA, trains the same model: same start, same mask, same curve."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    training = importlib.import_module("training")
    monkeypatch.setitem(training.ATTENTIONS, "cuDNN", (training.JaxAttention, "xla"))
    monkeypatch.setitem(training.ATTENTIONS, "ours", (training.MultiHeadAttention, "reference"))
    content = np.random.default_rng(0).integers(97, 123, 5000).repeat(3).astype(np.uint8)
    text = content, np.arange(content.size, dtype=np.int32) // 10
    unpacked = training.compare("tiny", 20, ["cuDNN"], text)
    monkeypatch.setitem(training.MODELS, "tiny", f"{training.MODELS['tiny']} --packed")
    packed = training.compare("tiny", 20, ["ours", "cuDNN"], text)
    apart = packed["ours from cuDNN"]["greatest"]
    assert apart < 0.01
    assert training.distance(packed["cuDNN"], unpacked["cuDNN"])["greatest"] > 10 * apart


def test_demo(train_lm, tmp_path, capsys):
    train_lm.main([*TINY.split(), *f"--steps 30 --learning-rate 0.02 --out {tmp_path / 'plots'}".split()])
    printed = capsys.readouterr()
    held_out = re.search(r"Held-out files: (\d\.\d+) bits/byte", printed.out)
    assert held_out is not None
    assert float(held_out[1]) < 6.5  # eight bits a byte before the first step
    assert (tmp_path / "plots" / "train_lm.png").read_bytes().startswith(b"\x89PNG")
    assert re.search(r"^Attention ran as '(xla|cuda)': \w+", printed.out, re.MULTILINE)
    assert "training step compiled in" in printed.out
    assert "\ndef " in printed.out
    assert "bits/byte" in printed.err
    assert "tokens/s" in printed.err


def test_options_reach_attention(train_lm, tmp_path, capsys):
    options = f"--packed --window 8 --head-dim 24 --implementation reference --steps 2 --out {tmp_path}"
    train_lm.main([*TINY.split(), *options.split()])
    assert "Attention ran as 'reference': requested" in capsys.readouterr().out
    args = train_lm.parse_arguments(options.split())
    files = np.zeros((2, 48), np.int32)
    assert train_lm.attention_options(args, files) == {
        "is_causal": True,
        "local_window_size": 8,
        "implementation": "reference",
        "query_segment_ids": files,
        "key_value_segment_ids": files,
    }


def test_library_is_split_by_file(train_lm):
    (train, train_files), (held_out, held_out_files) = train_lm.read_library()
    assert train.dtype == held_out.dtype == np.uint8
    assert train.size == train_files.size > 10 * held_out.size
    assert held_out.size == held_out_files.size > 100_000
    assert np.all(np.diff(train_files) >= 0)
    source = pathlib.Path(os.__file__).read_bytes()
    assert (source in train.tobytes()) != (source in held_out.tobytes())


def test_rows(train_lm):
    content, files = np.arange(20, dtype=np.uint8), np.repeat(np.arange(4, dtype=np.int32), 5)
    rows = train_lm.cut_rows((content, files), np.array([0, 7]), 4)
    np.testing.assert_array_equal(rows["bytes"], [[0, 1, 2, 3, 4], [7, 8, 9, 10, 11]])
    np.testing.assert_array_equal(rows["files"], [[0, 0, 0, 0], [1, 1, 1, 2]])


def test_rotary_is_relative_and_keeps_odd_features(train_lm):
    rng = np.random.default_rng(0)
    query, key = (np.broadcast_to(rng.standard_normal(7), (1, 6, 1, 7)) for _ in range(2))
    rotated_query, rotated_key = jax.jit(train_lm.rotary)(query, key)
    scores = np.einsum("btnh,bsnh->ts", rotated_query, rotated_key)
    for offset in range(-5, 6):
        diagonal = np.diagonal(scores, offset)
        np.testing.assert_allclose(diagonal, diagonal[0], rtol=1e-4, atol=1e-4)
    assert np.ptp(scores) > 0.1
    np.testing.assert_array_equal(rotated_query[..., 6:], query[..., 6:].astype(np.float32))
