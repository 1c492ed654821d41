"""How many rows has each batch of a stream: always the same, or more and more?"""

import dataclasses
from typing import Protocol, runtime_checkable


@runtime_checkable
class BatchSizes(Protocol):
    """How a stream of rows is divided into batches."""

    @property
    def sizes(self) -> tuple[int, ...]:
        """All that occur, in order; the last one is that of batches in the end."""
        ...

    def identity(self) -> int | dict[str, int]:
        """What batches depend on, as JSON's types."""
        ...

    def place(self, rows: int, index: int) -> tuple[int, int]:
        """Where the index-th batch after some rows is.

        Args:
          rows: of the stream before it, at the end of a batch.
          index: of the batch among those after it, from 0.

        Returns:
          Its first row and how many it has.
        """
        ...


@dataclasses.dataclass(frozen=True)
class OneSize:
    """Batches of the same number of rows.

    Attributes:
      rows: of each.
    """

    rows: int

    @property
    def sizes(self) -> tuple[int, ...]:
        """See `BatchSizes`."""
        return (self.rows,)

    def identity(self) -> int:
        """See `BatchSizes`."""
        return self.rows

    def place(self, rows: int, index: int) -> tuple[int, int]:
        """See `BatchSizes`."""
        return rows + index * self.rows, self.rows


@dataclasses.dataclass(frozen=True)
class BatchWarmup:
    """Batches of few rows at first, and of more the more have been read.

    The size grows from `start` to `end` by `increment`, at equal parts of the first
    `samples` rows; a batch has the size that its first row's place says.

    Attributes:
      start: rows of the first batch.
      increment: by which the size grows.
      samples: rows until it is whole.
      end: rows of a batch from there on; the `batch_size` of the run.

    Raises:
      ValueError: if a number is not positive, or increments don't lead to `end`.

    Source: Megatron-LM's ``--rampup-batch-size START INCREMENT SAMPLES``; McCandlish et
    al., "An Empirical Model of Large-Batch Training" (2018).

    Example:
      >>> warmup = BatchWarmup(start=2, increment=2, samples=8, end=6)
      >>> [warmup.place(0, batch) for batch in range(6)]
      [(0, 2), (2, 2), (4, 4), (8, 6), (14, 6), (20, 6)]
    """

    start: int
    increment: int
    samples: int
    end: int

    def __post_init__(self):
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value < 1:
                raise ValueError(
                    f"BatchWarmup: {field.name}={value} must be at least 1 row."
                )
        if self.start >= self.end or (self.end - self.start) % self.increment:
            raise ValueError(
                f"BatchWarmup: start={self.start} must be below end={self.end} by a "
                f"multiple of increment={self.increment}; end is the run's batch size."
            )

    @property
    def sizes(self) -> tuple[int, ...]:
        """See `BatchSizes`."""
        return tuple(range(self.start, self.end + 1, self.increment))

    def identity(self) -> dict[str, int]:
        """See `BatchSizes`."""
        return dataclasses.asdict(self)

    def place(self, rows: int, index: int) -> tuple[int, int]:
        """See `BatchSizes`."""
        parts = len(self.sizes) - 1
        for part, size in enumerate(self.sizes[:-1], start=1):
            # From here on batches are larger: samples * part / parts, rounded up.
            until = -(-self.samples * part // parts)
            batches = max(-(-(until - rows) // size), 0)
            if index < batches:
                return rows + index * size, size
            rows, index = rows + batches * size, index - batches
        return rows + index * self.end, self.end


def as_sizes(batch_size: int | BatchWarmup) -> BatchSizes:
    """The sizes that a loader is given."""
    return batch_size if isinstance(batch_size, BatchWarmup) else OneSize(batch_size)
