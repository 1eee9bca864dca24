"""An independent numpy model of TMA tiles: index arithmetic over boxes, swizzles as the PTX ISA tabulates them."""

from dataclasses import dataclass

import numpy as np

# 16-byte chunks of a 128-byte line, line by line, as the tables of PTX ISA 5.5.7 show them.
PATTERNS = {
    "none": [[0, 1, 2, 3, 4, 5, 6, 7]],
    "32B": [[0, 1, 2, 3, 4, 5, 6, 7], [1, 0, 3, 2, 5, 4, 7, 6]],
    "64B": [[0, 1, 2, 3, 4, 5, 6, 7], [1, 0, 3, 2, 5, 4, 7, 6], [2, 3, 0, 1, 6, 7, 4, 5], [3, 2, 1, 0, 7, 6, 5, 4]],
    "128B": [
        [0, 1, 2, 3, 4, 5, 6, 7],
        [1, 0, 3, 2, 5, 4, 7, 6],
        [2, 3, 0, 1, 6, 7, 4, 5],
        [3, 2, 1, 0, 7, 6, 5, 4],
        [4, 5, 6, 7, 0, 1, 2, 3],
        [5, 4, 7, 6, 1, 0, 3, 2],
        [6, 7, 4, 5, 2, 3, 0, 1],
        [7, 6, 5, 4, 3, 2, 1, 0],
    ],
}


def shared_positions(count: int, swizzle: str, base: int = 0, row: int = 0) -> np.ndarray:
    """For each of `count` bytes of a tile at shared address `base`, the address it really has.

    Rows of `row` bytes (0: as wide as the span) that are narrower than the swizzle's span lie a span apart.
    """
    address = base + np.arange(count)
    span = 0 if swizzle == "none" else int(swizzle[:-1])
    if 0 < row < span:
        address = base + np.arange(count) // row * span + np.arange(count) % row
    pattern = np.array(PATTERNS[swizzle])
    line, chunk = address // 128, address // 16 % 8
    # Cell [line][position] of the table holds the chunk that lies there; find the position that holds ours.
    position = np.argsort(pattern, axis=1)[line % len(pattern), chunk]
    return line * 128 + position * 16 + address % 16


@dataclass(frozen=True)
class Box:
    """A box of a strided tensor; dimension 0 is the contiguous one.

    Attributes:
        item: bytes of an element.
        dims: elements of the tensor.
        strides: bytes between elements of dimensions 1 and up.
        box: elements traversed.
        steps: element strides; dimension 0's is ignored.
    """

    item: int
    dims: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    steps: tuple[int, ...] = ()

    @property
    def shape(self) -> tuple[int, ...]:
        """Elements in shared memory, dimension 0 first."""
        steps = (1, *self.steps[1:]) if self.steps else (1,) * len(self.box)
        return tuple(-(-b // s) for b, s in zip(self.box, steps, strict=True))

    @property
    def nbytes(self) -> int:
        return int(np.prod(self.shape)) * self.item

    @property
    def tensor_bytes(self) -> int:
        """Bytes from the first to the last element, and to the end of its 16 bytes where rows are stored so."""
        rest = sum((d - 1) * s for d, s in zip(self.dims[1:], self.strides, strict=True))
        return self.stored_columns * self.item + rest

    @property
    def stored_columns(self) -> int:
        """Elements of a row that stores reach: up to the next 16 bytes, but exact in one dimension (an H200)."""
        chunk = 16 // self.item if self.strides else 1
        return -(-self.dims[0] // chunk) * chunk

    def elements(self, coords: tuple[int, ...], columns: int | None = None) -> tuple[np.ndarray, np.ndarray]:
        """Byte offset and inside flag of every element of the box at `coords`, in the order of shared memory."""
        dims = (columns or self.dims[0], *self.dims[1:])
        steps = (1, *self.steps[1:]) if self.steps else (1,) * len(self.box)
        index = np.indices(self.shape[::-1])[::-1]
        where = [c + i * s for c, i, s in zip(coords, index, steps, strict=True)]
        inside = np.all([(w >= 0) & (w < d) for w, d in zip(where, dims, strict=True)], axis=0)
        offset = sum(w * s for w, s in zip(where, (self.item, *self.strides), strict=True))
        return np.asarray(offset).ravel(), inside.ravel()

    def load(self, memory: np.ndarray, coords: tuple[int, ...], fill: bytes) -> np.ndarray:
        """The box's bytes in the order of unswizzled shared memory."""
        offset, inside = self.elements(coords)
        out = np.tile(np.frombuffer(fill, np.uint8), len(offset)).reshape(len(offset), self.item)
        for b in range(self.item):
            out[inside, b] = memory[offset[inside] + b]
        return out.ravel()

    def store(self, memory: np.ndarray, coords: tuple[int, ...], data: np.ndarray) -> None:
        """Writes the box's bytes where they lie inside the tensor."""
        offset, inside = self.elements(coords, self.stored_columns)
        data = data.reshape(len(offset), self.item)
        for b in range(self.item):
            memory[offset[inside] + b] = data[inside, b]
