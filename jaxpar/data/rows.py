"""What does a `Loader` make batches of? Rows by number, in an order by epochs.

`Windows`, `PackedDocuments`, `Mixture` and `ImageFolder` are rows; users may write
their own.
"""

from collections.abc import Collection, Mapping
from typing import Any, Protocol, runtime_checkable

import grain
import jax
import numpy as np

_MOST_ROWS = 2**32
"""Grain's shuffle counts rows in 32 bits, and wraps silently beyond."""


@runtime_checkable
class RowSource(Protocol):
    """Rows that a `Loader` makes batches of.

    Attributes:
      shapes: name -> shape and dtype of one row.
      padding: fraction of the rows' tokens that are padding.
      description: what the rows are made of, with numbers, for messages.
    """

    @property
    def shapes(self) -> dict[str, jax.ShapeDtypeStruct]: ...  # noqa: D102

    @property
    def padding(self) -> float: ...  # noqa: D102

    @property
    def description(self) -> str: ...  # noqa: D102

    def __len__(self) -> int:
        """Count the rows of an epoch."""
        ...

    # To check a Sequence, beartype would draw from `random` in Grain's threads, beneath
    # the strategies of hypothesis.
    def read(self, numbers: Collection[int]) -> dict[str, np.ndarray]:
        """Read rows; several threads call it at once.

        Args:
          numbers: of the rows, as `order` gives them: from 0 to ``len(self) - 1``.
            Rows that differ by epoch have ``len(self)`` more for each epoch before.

        Returns:
          name -> array [len(numbers), ...].
        """
        ...

    def identity(self) -> dict[str, Any]:
        """What the rows depend on, as JSON's types; saved with a loader's state."""
        ...

    def order(self, *, seed: int, shuffle: bool, repeat: bool) -> grain.MapDataset[int]:
        """The stream of the rows' numbers, epoch after epoch."""
        ...


def batched(
    row: Mapping[str, jax.ShapeDtypeStruct], batch_size: int
) -> dict[str, jax.ShapeDtypeStruct]:
    """Shapes of a batch of rows."""
    return {
        name: jax.ShapeDtypeStruct((batch_size, *each.shape), each.dtype)
        for name, each in row.items()
    }


def ordered(
    num_rows: int, *, seed: int, shuffle: bool, repeat: bool
) -> grain.MapDataset[int]:
    """Put the numbers of rows in the order of a stream that can be entered anywhere.

    Args:
      num_rows: of an epoch.
      seed: of the order, a non-negative integer.
      shuffle: shuffle each epoch; False for the order given.
      repeat: begin another epoch after each; False for one.

    Raises:
      ValueError: if there are more rows than can be shuffled.
    """
    if num_rows > _MOST_ROWS:
        raise ValueError(
            f"the data has {num_rows:,} rows, but at most {_MOST_ROWS:,} can be "
            "shuffled; make the rows longer (seq_len), or split the data."
        )
    order = grain.MapDataset.range(num_rows).seed(seed)
    if shuffle:
        order = order.shuffle()
    if repeat:
        order = order.repeat()
    # Grain builds its index on the first access, which two reading threads must not
    # do at once.
    order[0]
    return order
