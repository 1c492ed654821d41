"""How do a run's batches grow: short rows at first, later whole ones?

Every length is a shape of its own, and a program to compile
(``jaxpar.initialize(other_shapes=)``), so lengths grow in few steps. What is cut off a
row is not seen in this pass over the data.

Source: Li et al., "The Stability-Efficiency Dilemma: Investigating Sequence Length
Warmup for Training GPT Models" (2022).
"""

from collections.abc import Iterable, Mapping
from typing import Any

import jax
import numpy as np

from jaxpar.data.batch_sizes import BatchSizes
from jaxpar.data.growth import Growing, value_at
from jaxpar.data.loader import Loader
from jaxpar.types import Batch

_STEPS = "steps"


class Curriculum:
    """A loader whose rows are cut to a length that grows by step.

    Of each row, the first ``length + 1`` tokens stay, and of what has an entry for each
    target (weights) `length`. It is its own iterator, with a position as the loader's,
    for `jaxpar.train` and `jaxpar.Engine.save`.

    Args:
      loader: of whole rows, endless.
      lengths: targets of a row, by batches taken before; the last one is that of whole
        rows.

    Raises:
      ValueError: if no rows are as long as that.

    Example:
      >>> from jaxpar.data import Growth, Tokens
      >>> tokens = Tokens((np.arange(99, dtype=np.uint8),), files=("numbers",))
      >>> loader = Loader(tokens, batch_size=2, seq_len=8)
      >>> rows = Curriculum(loader, Growth(2, 8, steps=3, multiple=2))
      >>> [next(rows)["tokens"].shape for _ in range(5)]
      [(2, 3), (2, 5), (2, 7), (2, 9), (2, 9)]
    """

    def __init__(self, loader: Loader, lengths: Growing):
        self.loader, self.lengths = loader, lengths
        self._steps = 0
        cut(loader.sample_batch, lengths.values[0], lengths.values[-1])

    @property
    def steps(self) -> int:
        """Batches taken before the next one."""
        return self._steps

    @property
    def rows(self) -> int:
        """See `Loader.rows`."""
        return self.loader.rows

    @property
    def source(self) -> Any:
        """The loader's."""
        return self.loader.source

    @property
    def batch_size(self) -> int:
        """The loader's."""
        return self.loader.batch_size

    @property
    def sample_batch(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Shapes of a batch in the end."""
        return self.loader.sample_batch

    @property
    def padding(self) -> float:
        """Fraction of whole rows' tokens that are padding."""
        return self.loader.padding

    def __iter__(self) -> "Curriculum":
        """Return itself."""
        return self

    def __next__(self) -> dict[str, np.ndarray]:
        """Take this process's rows of the next batch, at its length."""
        length = value_at(self.lengths, self._steps)
        batch = cut(next(self.loader), length, self.lengths.values[-1])
        self._steps += 1
        return batch

    def leave_out(self, intervals: Iterable[tuple[int, int]]) -> None:
        """See `Loader.leave_out`."""
        self.loader.leave_out(intervals)

    def get_state(self) -> dict[str, Any]:
        """The loader's position and stream, and the batches taken; see `Loader`."""
        return {_STEPS: self._steps, **self._lengths(), **self.loader.get_state()}

    def set_state(self, state: Mapping[str, Any], *, change: bool = False) -> None:
        """Move to the position of a state.

        Args:
          state: from `get_state`.
          change: accept a state of another stream, as `Loader.set_state`, or of other
            lengths or none, which go on at the same step; without it, at step 0.

        Raises:
          ValueError: if the state has other lengths, or none, and `change` is False; as
            `Loader.set_state`.
        """
        own = self._lengths()
        rest = {name: x for name, x in state.items() if name not in (_STEPS, *own)}
        known = {name: state.get(name) for name in own}
        if (known != own or _STEPS not in state) and not change:
            raise ValueError(
                f"state is of rows with lengths={known['lengths']}, but the Curriculum "
                f"has {own['lengths']}. Make it with the former ones, or call "
                "set_state(state, change=True), which goes on at the same step."
            )
        self.loader.set_state(rest, change=change)
        self._steps = state.get(_STEPS, 0)

    def _lengths(self) -> dict[str, Any]:
        """What the lengths are, as JSON's types."""
        own = self.lengths
        return {"lengths": [list(own.values), list(own.starts)]}


def cut(batch: Mapping[str, Any], length: int, whole: int) -> dict[str, Any]:
    """Cut rows to a length.

    Args:
      batch: arrays or shapes, [B, whole + 1, ...] or [B, whole, ...]; others stay.
      length: targets of a row that are left.
      whole: targets of a row.

    Raises:
      ValueError: if there is nothing to cut.
    """
    sizes = {whole: length, whole + 1: length + 1}
    found = {
        name: sizes.get(leaf.shape[1] if len(leaf.shape) > 1 else -1)
        for name, leaf in batch.items()
    }
    if not any(found.values()):
        shapes = {name: list(leaf.shape) for name, leaf in batch.items()}
        raise ValueError(
            f"lengths: they end at {whole}, but no rows have {whole} or {whole + 1} "
            f"entries ({shapes}); let them end at the rows' seq_len."
        )
    return {
        name: leaf if size is None else _first(leaf, size)
        for (name, leaf), size in zip(batch.items(), found.values(), strict=True)
    }


def _first(leaf: Any, size: int) -> Any:
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct((leaf.shape[0], size, *leaf.shape[2:]), leaf.dtype)
    return np.ascontiguousarray(leaf[:, :size])


def other_shapes(
    sample_batch: Mapping[str, Any], lengths: Growing | None, sizes: BatchSizes
) -> tuple[Batch, ...]:
    """All shapes of a run's batches but the last ones'.

    Args:
      sample_batch: shapes of the last ones.
      lengths: of rows; None for whole ones.
      sizes: of batches.

    Returns:
      For ``jaxpar.initialize(other_shapes=)``, in the order in which they come.
    """
    whole = None if lengths is None else lengths.values[-1]
    last = max(lengths.starts) if lengths is not None else 0
    seen: dict[tuple[int | None, int], None] = {}
    rows = step = size = 0
    while step <= last or size < sizes.sizes[-1]:
        _, size = sizes.place(rows, 0)
        length = None if lengths is None else value_at(lengths, step)
        seen[length, size] = None
        rows, step = rows + size, step + 1
    seen.pop((whole, sizes.sizes[-1]), None)
    return tuple(_shaped(sample_batch, *each, whole) for each in seen)


def _shaped(
    sample_batch: Mapping[str, Any], length: int | None, rows: int, whole: int | None
) -> Batch:
    """A batch of another length and number of rows, as shapes."""
    own = dict(sample_batch)
    if length is not None and whole is not None:
        own = cut(own, length, whole)
    return {
        name: jax.ShapeDtypeStruct((rows, *x.shape[1:]), x.dtype)
        for name, x in own.items()
    }
