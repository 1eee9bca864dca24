"""Draws the loss of a small model trained through the emulated Blackwell kernels beside that of the XLA path.

    python benchmarks/emulated_training.py [FILE]

The model has two layers of grouped attention; 20 steps at head dims 192 and 256. No GPU is needed; it takes a minute.
"""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "tests"))

import matplotlib.pyplot as plt

from emulator import emulated_gpu

HEAD_DIMS = (192, 256)
PLOT = pathlib.Path(__file__).resolve().parents[1] / "docs" / "emulated_training.png"


def main(path: str) -> None:
    """Trains and writes the plot."""
    xla = {head_dim: emulated_gpu.train(head_dim, "xla") for head_dim in HEAD_DIMS}
    emulated_gpu.install(setattr)
    figure, axes = plt.subplots(1, len(HEAD_DIMS), figsize=(9, 3.2), sharey=True, layout="constrained")
    for axis, head_dim in zip(axes, HEAD_DIMS, strict=True):
        kernels = emulated_gpu.train(head_dim, "cuda")
        difference = abs(kernels - xla[head_dim]).max()
        axis.plot(xla[head_dim], color="0.6", linewidth=4, label="xla")
        axis.plot(kernels, color="C0", linewidth=1.5, label="Blackwell kernels, emulated")
        axis.set(title=f"head dim {head_dim}: differ by at most {difference:.4f}", xlabel="step")
        axis.xaxis.get_major_locator().set_params(integer=True)
        axis.grid(alpha=0.3)
        print(f"head dim {head_dim}: loss {kernels[0]:.3f} -> {kernels[-1]:.3f}, greatest difference {difference:.4f}")
    axes[0].set_ylabel("loss, nats a token")
    axes[0].legend()
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main(*(sys.argv[1:] or [str(PLOT)]))
