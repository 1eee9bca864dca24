"""Whether this machine has a GPU that the kernels run on."""

import jax

from jax_fa_blackwell import lowering


def why_not() -> str:
    """Why tests of the kernels on a GPU cannot run here; empty if they can."""
    try:
        devices = jax.local_devices(backend="cuda")
    except RuntimeError:
        return "no CUDA device"
    return "" if lowering.arches() else f"no kernels for {devices[0].device_kind}"
