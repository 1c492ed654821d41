"""How is a leaf made of a published model's tensors, and those of it?

A leaf is a tensor, maybe transposed, maybe some columns of one that others share, maybe
with rows added so that a mesh divides it; or a stack of such tensors, one a layer. Only
the slice that is asked for is read.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Protocol, runtime_checkable

import numpy as np

Index = tuple[slice, ...]


@runtime_checkable
class Readable(Protocol):
    """Tensors by name, such as a `jaxpar.models.hf.tensors.Tensors`."""

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor."""
        ...

    def read(self, name: str, index: Index) -> np.ndarray:
        """A slice of a tensor."""
        ...


@dataclasses.dataclass(frozen=True)
class TensorPart:
    """A matrix or a vector of a leaf, as a part of a tensor.

    Attributes:
      name: of the tensor.
      transposed: whether the tensor is [out, in], and the piece [in, out].
      part: (number, of): the piece is one of equal parts of the tensor's last dim.
    """

    name: str
    transposed: bool = False
    part: tuple[int, int] = (0, 1)

    def shape(self, tensors: Readable) -> tuple[int, ...]:
        """The piece's shape."""
        shape = list(tensors.shape(self.name))
        shape[-1] //= self.part[1]
        return tuple(shape[::-1] if self.transposed else shape)

    def read(self, tensors: Readable, index: Index) -> np.ndarray:
        """A slice of the piece, within its shape."""
        own = list(index[::-1] if self.transposed else index)
        number, of = self.part
        if of > 1:
            first = number * (tensors.shape(self.name)[-1] // of)
            own[-1] = slice(first + own[-1].start, first + own[-1].stop)
        found = tensors.read(self.name, tuple(own))
        return found.T if self.transposed else found


@dataclasses.dataclass(frozen=True)
class Leaf:
    """A leaf, as pieces.

    Attributes:
      pieces: a layer each, if it is stacked; otherwise one.
      stacked: whether the first dim counts pieces.
      padded: whether dim 0 (of a head's kernel: dim 1) may have more rows than the
        tensor, which are zeros; the dim, or None.
    """

    pieces: tuple[TensorPart, ...]
    stacked: bool = False
    padded: int | None = None

    def shape(self, tensors: Readable) -> tuple[int, ...]:
        """The shape of what the tensors hold of it.

        Raises:
          ValueError: if a layer's tensor has another shape than the first layer's.
        """
        one = self.pieces[0].shape(tensors)
        for piece in self.pieces[1:]:
            if piece.shape(tensors) != one:
                raise ValueError(
                    f"{piece.name}: has the shape {piece.shape(tensors)}, but "
                    f"{self.pieces[0].name} has {one}."
                )
        return (len(self.pieces), *one) if self.stacked else one

    def read(self, tensors: Readable, index: Index) -> np.ndarray:
        """A slice of the leaf.

        Args:
          tensors: of the published model.
          index: a slice of each dim, with its start and stop, of step 1.

        Returns:
          The slice, in the tensors' dtype; zeros beyond their rows.
        """
        if not self.stacked:
            return self._padded(self.pieces[0], tensors, index)
        layers, *rest = index
        own = [
            self._padded(piece, tensors, tuple(rest))
            for piece in self.pieces[layers.start : layers.stop]
        ]
        return np.stack(own)

    def _padded(self, piece: TensorPart, tensors: Readable, index: Index) -> np.ndarray:
        if self.padded is None:
            return piece.read(tensors, index)
        size, dim = piece.shape(tensors)[self.padded], self.padded
        asked, own = index[dim], list(index)
        own[dim] = slice(min(asked.start, size), min(asked.stop, size))
        found = piece.read(tensors, tuple(own))
        missing = (asked.stop - asked.start) - found.shape[dim]
        pads = [(0, missing if i == dim else 0) for i in range(found.ndim)]
        return np.pad(found, pads) if missing else found

    def split(
        self, leaf: np.ndarray, rows: int | None
    ) -> Iterator[tuple[TensorPart, np.ndarray]]:
        """The pieces of a whole leaf, without the rows that were added.

        Args:
          leaf: the leaf.
          rows: of the published tensor, along `padded`; None for all.

        Raises:
          ValueError: if a stack has another number of layers.
        """
        if self.stacked and len(leaf) != len(self.pieces):
            raise ValueError(
                f"{self.pieces[0].name}: the model has {len(self.pieces)} of these "
                f"layers, but the parameters have {len(leaf)}."
            )
        for number, piece in enumerate(self.pieces):
            own = leaf[number] if self.stacked else leaf
            if self.padded is not None and rows is not None:
                own = np.take(own, np.arange(rows), axis=self.padded)
            yield piece, own.T if piece.transposed else own


def per_layer(
    template: str, layers: Sequence[int], *, transposed: bool = False, part=(0, 1)
) -> Leaf:
    """A stacked leaf of one tensor a layer.

    Args:
      template: of the tensors' names, with ``{}`` for the layer.
      layers: the layers of the stack, in order.
      transposed: as in `TensorPart`.
      part: as in `TensorPart`.
    """
    pieces = (TensorPart(template.format(i), transposed, part) for i in layers)
    return Leaf(tuple(pieces), stacked=True)
