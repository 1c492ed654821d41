"""From which of several sources is each row of a stream? By exact weights."""

import functools
import itertools
import sys
from collections.abc import Collection, Sequence
from fractions import Fraction
from math import lcm
from typing import Any

import grain
import jax
import numpy as np

from jaxpar.data.masking import MaskedRows
from jaxpar.data.rows import RowSource


class Mixture:
    """Rows of several sources, each with the share of its weight.

    The source of each row depends only on the row's number and the weights: after n
    rows, each source has given its share of n, up to one row for each source. Every
    source is shuffled by itself, and begins its epochs when it is through.

    A row has the names that its source has, and "source", the source's place in the
    list. Where only some sources have "weights", the others' are 1.

    Args:
      sources: (rows, weight) pairs; weights are positive, with any sum.

    Raises:
      ValueError: if there is no source, one is a Mixture or MaskedRows, a weight is not
        positive, or rows of two sources differ in names, shapes or dtypes.

    Example:
      >>> from jaxpar.data import Loader, Tokens, Windows
      >>> code = Tokens((np.zeros(99, np.uint8),), files=("code",))
      >>> prose = Tokens((np.ones(99, np.uint8),), files=("prose",))
      >>> rows = [Windows(tokens, seq_len=4) for tokens in (code, prose)]
      >>> mixture = Mixture([(rows[0], 3), (rows[1], 1)])
      >>> next(Loader(mixture, batch_size=8))["source"].tolist()
      [0, 0, 0, 1, 0, 0, 0, 1]
    """

    def __init__(self, sources: Sequence[tuple[RowSource, float | int]]):
        if not sources:
            raise ValueError("sources: none given; give (rows, weight) pairs.")
        for index, (rows, weight) in enumerate(sources):
            if isinstance(rows, Mixture):
                raise ValueError(
                    f"sources[{index}] is a Mixture itself; list its sources here, "
                    "each with the product of its weights."
                )
            if isinstance(rows, MaskedRows):
                raise ValueError(
                    f"sources[{index}] is MaskedRows, whose masks are of places in its "
                    "own stream; mix what it reads, and mask the Mixture."
                )
            if not 0 < weight < float("inf"):
                raise ValueError(
                    f"sources[{index}] has weight {weight}, which must be positive and "
                    "finite; leave out a source that should give no rows."
                )
        self.sources = tuple(rows for rows, _ in sources)
        self.weights = tuple(float(weight) for _, weight in sources)
        self._shapes = _common_shapes(self.sources)
        lengths = [len(rows) for rows in self.sources]
        self._firsts = [0, *itertools.accumulate(lengths)]
        """The number of each source's first row, and the number of all rows."""

    @property
    def shapes(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Shapes of one row."""
        return {**self._shapes, "source": jax.ShapeDtypeStruct((), np.int32)}

    @property
    def padding(self) -> float:
        """Mean fraction of padding over the stream."""
        paddings = [rows.padding for rows in self.sources]
        return float(np.average(paddings, weights=self.weights))

    @property
    def description(self) -> str:
        """What each source has."""
        parts = zip(self.weights, self.sources, strict=True)
        return "; ".join(f"{weight:g} of {rows.description}" for weight, rows in parts)

    def __len__(self) -> int:
        return self._firsts[-1]

    def only(self, index: int) -> "OneSource":
        """The rows of one source, as they are in the mixture, to evaluate on.

        Args:
          index: the source's place in the list.

        Raises:
          ValueError: if there is no such source.
        """
        if not 0 <= index < len(self.sources):
            raise ValueError(
                f"index={index} must be the place of a source, from 0 to "
                f"{len(self.sources) - 1}."
            )
        return OneSource(self, index)

    def read(self, numbers: Collection[int]) -> dict[str, np.ndarray]:
        """Read rows, of which a source's follow those of the sources before it."""
        epochs, at = np.divmod(np.array(list(numbers)), len(self))
        of = np.searchsorted(self._firsts, at, side="right") - 1
        batch: dict[str, np.ndarray] = {
            name: np.empty((len(numbers), *row.shape), row.dtype)
            for name, row in self._shapes.items()
        }
        batch["source"] = of.astype(np.int32)
        for index in np.unique(of).tolist():
            places = of == index
            own = at[places] - self._firsts[index]
            own += epochs[places] * len(self.sources[index])
            found = self.sources[index].read(own.tolist())
            for name, row in self._shapes.items():
                batch[name][places] = found.get(name, np.ones((), row.dtype))
        return batch

    def identity(self) -> dict[str, Any]:
        """The weights, and what the sources are."""
        parts = zip(self.weights, self.sources, strict=True)
        return {
            "sources": [{"weight": weight, **rows.identity()} for weight, rows in parts]
        }

    def order(self, *, seed: int, shuffle: bool, repeat: bool) -> grain.MapDataset[int]:
        """The stream of rows; it has no end.

        Raises:
          ValueError: if `repeat` is False.
        """
        if not repeat:
            raise ValueError(
                "repeat=False, but a Mixture has no end, as its sources have different "
                "ones: evaluate each source by a Loader of its own (Mixture.only), or "
                "give repeat=True with num_batches=."
            )
        orders = [
            rows.order(seed=seed + index, shuffle=shuffle, repeat=True).map(
                functools.partial(self.number, index)
            )
            for index, rows in enumerate(self.sources)
        ]
        return grain.MapDataset.select_from_datasets(orders, _Turns(self.weights))

    def number(self, index: int, number: int) -> int:
        """The number here of a source's row.

        Args:
          index: the source's place in the list.
          number: of the row there.
        """
        epoch, row = divmod(number, len(self.sources[index]))
        return epoch * len(self) + self._firsts[index] + row


class OneSource:
    """The rows of one source of a `Mixture`, which may have an end.

    They have the mixture's names, "source" among them, so that an engine that is
    trained on the mixture evaluates on them.

    Args:
      mixture: the mixture.
      index: the source's place in its list.

    Example:
      >>> from jaxpar.data import Loader, Tokens, Windows
      >>> parts = [Tokens((np.full(9, k, np.uint8),), files=("a",)) for k in (6, 7)]
      >>> mixture = Mixture([(Windows(each, seq_len=2), 1) for each in parts])
      >>> batch = next(Loader(mixture.only(1), batch_size=2, repeat=False))
      >>> batch["tokens"][:, 0].tolist(), batch["source"].tolist()
      ([7, 7], [1, 1])
    """

    def __init__(self, mixture: Mixture, index: int):
        self._mixture, self._index = mixture, index
        self._rows = mixture.sources[index]

    @property
    def shapes(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Shapes of one row, as the mixture's."""
        return self._mixture.shapes

    @property
    def padding(self) -> float:
        """Fraction of padding."""
        return self._rows.padding

    @property
    def description(self) -> str:
        """What the source has."""
        return self._rows.description

    def __len__(self) -> int:
        return len(self._rows)

    def read(self, numbers: Collection[int]) -> dict[str, np.ndarray]:
        """Read rows by their numbers in the source."""
        return self._mixture.read(
            [self._mixture.number(self._index, each) for each in numbers]
        )

    def identity(self) -> dict[str, Any]:
        """What the source is."""
        return {"source": self._index, **self._rows.identity()}

    def order(self, *, seed: int, shuffle: bool, repeat: bool) -> grain.MapDataset[int]:
        """The source's own order."""
        return self._rows.order(seed=seed, shuffle=shuffle, repeat=repeat)


class _Turns(grain.transforms.DatasetSelectionMap):
    """Whose turn is row k? Grain's own rounds weights to hundredths of the smallest."""

    def __init__(self, weights: Sequence[float]):
        exact = [Fraction(repr(weight)) for weight in weights]
        scale = lcm(*(weight.denominator for weight in exact))
        self._shares = [int(weight * scale) for weight in exact]

    def __len__(self) -> int:
        return sys.maxsize

    def __getitem__(self, index: int) -> tuple[int, int]:
        """The source of a row, and how many rows it gave before.

        Of n rows, the sources from i on have those that the ones before leave over.
        Source i takes its share of these, rounded up; its turn is where that grows.
        """
        rest = sum(self._shares)
        before, after = index, index + 1
        for source, share in enumerate(self._shares):
            left_before = before * (rest - share) // rest
            left_after = after * (rest - share) // rest
            if left_after == left_before:
                return source, before - left_before
            rest -= share
            before, after = left_before, left_after
        raise AssertionError("the last source takes what is left")


def _common_shapes(sources: Sequence[RowSource]) -> dict[str, jax.ShapeDtypeStruct]:
    """The shapes of all sources; "weights" may be of some only."""
    found = [dict(rows.shapes) for rows in sources]
    weights = [shapes["weights"] for shapes in found if "weights" in shapes]
    for index, shapes in enumerate(found):
        if weights:
            shapes.setdefault("weights", weights[0])
        if shapes != found[0]:
            raise ValueError(
                f"sources[{index}] has rows of {_listed(shapes)}, but sources[0] of "
                f"{_listed(found[0])}; give all sources one seq_len (or size), and "
                "pack all or none."
            )
    return found[0]


def _listed(shapes: dict[str, jax.ShapeDtypeStruct]) -> str:
    return ", ".join(
        f"{name} {x.dtype}{list(x.shape)}" for name, x in sorted(shapes.items())
    )
