import jax
import pytest

from jax_fa_blackwell import xla


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch):
    """Several blocks along both axes at test sizes, the last ones overlapping; different sizes show swapped axes."""
    monkeypatch.setattr(xla, "QUERY_BLOCK", 16)
    monkeypatch.setattr(xla, "KV_BLOCK", 12)


@pytest.fixture(autouse=True)
def _float64():
    """The oracle and finite differences are float64."""
    jax.config.update("jax_enable_x64", True)
    yield
    jax.config.update("jax_enable_x64", False)
