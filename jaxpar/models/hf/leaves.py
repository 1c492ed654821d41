"""How is a leaf made of a published model's tensors, and those of it?

A leaf is a tensor, maybe transposed, maybe some columns of one that others share, maybe
with rows added so that a mesh divides it; or a stack of such tensors, one a layer. Only
the slice that is asked for is read.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol, runtime_checkable

import numpy as np

from jaxpar.models.hf.copying import copy_into, empty, run_all

Index = tuple[slice, ...]
_ELEMENTS = 1 << 22
"""That are read at once by a core."""


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
      axes: dim i of the piece is this dim of the tensor, as in `numpy.transpose`; None
        for the same dims. `MATRIX` for a kernel that is [out, in].
      part: (number, of): the piece is one of equal parts of one of the tensor's dims.
      part_dim: which dim.
      ones: the tensor begins with so many dims of size 1 that the piece lacks; dims
        are counted behind them.
    """

    name: str
    axes: tuple[int, ...] | None = None
    part: tuple[int, int] = (0, 1)
    part_dim: int = -1
    ones: int = 0

    def shape(self, tensors: Readable) -> tuple[int, ...]:
        """The piece's shape.

        Raises:
          ValueError: if the tensor has other dims.
        """
        shape = self._own_shape(tensors)
        axes = self._axes(len(shape))
        shape[self.part_dim] //= self.part[1]
        return tuple(shape[axis] for axis in axes)

    def read(self, tensors: Readable, index: Index) -> np.ndarray:
        """A slice of the piece, within its shape."""
        axes = self._axes(len(index))
        own = [index[axes.index(dim)] for dim in range(len(index))]
        number, of = self.part
        if of > 1:
            first = number * (self._own_shape(tensors)[self.part_dim] // of)
            cut = own[self.part_dim]
            own[self.part_dim] = slice(first + cut.start, first + cut.stop)
        found = tensors.read(self.name, (*[slice(0, 1)] * self.ones, *own))
        return found.reshape(found.shape[self.ones :]).transpose(axes)

    def copies(
        self, tensors: Readable, index: Index, out: np.ndarray
    ) -> Iterator[Callable[[], None]]:
        """What writes a slice of the piece into an array, some rows each."""
        dim = self._axes(len(index)).index(0)
        start, stop = index[dim].start, index[dim].stop
        rows = max(1, _ELEMENTS * out.shape[dim] // max(1, out.size))
        for first in range(start, stop, rows):
            cut = slice(first, min(first + rows, stop))
            own = (*index[:dim], cut, *index[dim + 1 :])
            there = *[slice(None)] * dim, slice(cut.start - start, cut.stop - start)
            yield functools.partial(self._copy, tensors, own, out[there])

    def _copy(self, tensors: Readable, index: Index, out: np.ndarray) -> None:
        copy_into(out, self.read(tensors, index))

    def split(self, piece: np.ndarray) -> Iterator[tuple["TensorPart", np.ndarray]]:
        """This part, as its tensor has it."""
        own = piece.transpose(np.argsort(self._axes(piece.ndim)))
        yield self, own.reshape((1,) * self.ones + own.shape)

    def parts(self) -> Iterator["TensorPart"]:
        """This part."""
        yield self

    def _own_shape(self, tensors: Readable) -> list[int]:
        """The tensor's shape behind its dims of size 1."""
        shape = tensors.shape(self.name)
        if shape[: self.ones] != (1,) * self.ones:
            raise ValueError(
                f"{self.name}: has the shape {shape}, but should begin with "
                f"{self.ones} dims of size 1."
            )
        return list(shape[self.ones :])

    def _axes(self, ndim: int) -> tuple[int, ...]:
        axes = self.axes or tuple(range(ndim))
        if len(axes) != ndim:
            raise ValueError(
                f"{self.name}: has {ndim} dims, but the model's leaf is made of "
                f"{len(axes)}."
            )
        return axes


@dataclasses.dataclass(frozen=True)
class Stack:
    """Pieces of one shape, one above the other: of layers, or of experts.

    Attributes:
      pieces: in order.
    """

    pieces: tuple["Piece", ...]

    def shape(self, tensors: Readable) -> tuple[int, ...]:
        """The stack's shape.

        Raises:
          ValueError: if a piece has another shape than the first.
        """
        own = self.pieces[0].shape(tensors)
        for piece in self.pieces[1:]:
            if piece.shape(tensors) != own:
                names = (next(each.parts()).name for each in (piece, self.pieces[0]))
                raise ValueError(
                    f"{next(names)}: has the shape {piece.shape(tensors)}, but "
                    f"{next(names)} has {own}."
                )
        return len(self.pieces), *own

    def copies(
        self, tensors: Readable, index: Index, out: np.ndarray
    ) -> Iterator[Callable[[], None]]:
        """What writes a slice of the stack into an array, a part of a tensor each."""
        number, *rest = index
        own = self.pieces[number.start : number.stop]
        for piece, into in zip(own, out, strict=True):
            yield from piece.copies(tensors, tuple(rest), into)

    def split(self, piece: np.ndarray) -> Iterator[tuple[TensorPart, np.ndarray]]:
        """The parts of tensors that a whole stack is.

        Raises:
          ValueError: if there are not as many pieces.
        """
        if len(piece) != len(self.pieces):
            raise ValueError(
                f"{next(self.parts()).name}: the model has {len(self.pieces)} of "
                f"these, but the parameters have {len(piece)}."
            )
        for own, each in zip(self.pieces, piece, strict=True):
            yield from own.split(each)

    def parts(self) -> Iterator[TensorPart]:
        """All parts of tensors."""
        for piece in self.pieces:
            yield from piece.parts()


Piece = TensorPart | Stack


@dataclasses.dataclass(frozen=True)
class Leaf:
    """A leaf: a piece, maybe with rows that the published tensor lacks.

    Attributes:
      piece: what it is made of.
      padded: the dim that may have more rows than the tensor, which are zeros: 0 of a
        table, 1 of a head's kernel; None for none.
    """

    piece: Piece
    padded: int | None = None

    @property
    def name(self) -> str:
        """The name of the first tensor."""
        return next(self.piece.parts()).name

    def shape(self, tensors: Readable) -> tuple[int, ...]:
        """The shape of what the tensors hold of it."""
        return self.piece.shape(tensors)

    def read(self, tensors: Readable, index: Index, dtype: np.dtype) -> np.ndarray:
        """A slice of the leaf.

        Args:
          tensors: of the published model.
          index: a slice of each dim, with its start and stop, of step 1.
          dtype: of the result.

        Returns:
          The slice; zeros beyond the tensors' rows.
        """
        out = empty([cut.stop - cut.start for cut in index], dtype)
        own, there = list(index), out
        if self.padded is not None:
            size, asked = self.shape(tensors)[self.padded], index[self.padded]
            held = slice(min(asked.start, size), min(asked.stop, size))
            own[self.padded], before = held, (slice(None),) * self.padded
            there = out[*before, : held.stop - held.start]
            out[*before, held.stop - held.start :] = 0
        run_all(self.piece.copies(tensors, tuple(own), there))
        return out

    def split(
        self, leaf: np.ndarray, rows: int | None
    ) -> Iterator[tuple[TensorPart, np.ndarray]]:
        """The parts of tensors that a whole leaf is, without the rows that were added.

        Args:
          leaf: the leaf.
          rows: of the published tensor, along `padded`; None for all.

        Raises:
          ValueError: if a stack has another number of layers.
        """
        if self.padded is not None and rows is not None:
            leaf = np.take(leaf, np.arange(rows), axis=self.padded)
        yield from self.piece.split(leaf)


MATRIX = (1, 0)
"""Axes of a kernel [in, out] in a tensor [out, in]."""


def one(
    name: str,
    axes: tuple[int, ...] | None = None,
    *,
    padded: int | None = None,
    ones: int = 0,
) -> Leaf:
    """A leaf of one tensor; arguments as in `TensorPart` and `Leaf`."""
    return Leaf(TensorPart(name, axes, ones=ones), padded)


def per_layer(
    template: str,
    layers: Sequence[int],
    axes: tuple[int, ...] | None = None,
    part: tuple[int, int] = (0, 1),
    part_dim: int = -1,
) -> Leaf:
    """A stacked leaf of one tensor a layer.

    Args:
      template: of the tensors' names, with ``{}`` for the layer.
      layers: the layers of the stack, in order.
      axes: as in `TensorPart`.
      part: as in `TensorPart`.
      part_dim: as in `TensorPart`.
    """
    names = (template.format(layer) for layer in layers)
    pieces = (TensorPart(name, axes, part, part_dim) for name in names)
    return Leaf(Stack(tuple(pieces)))
