"""In which order are examples read, and which rows of a batch are this process's?

The order depends only on (seed, epoch), not on the number of processes or the size of a
batch, so a run resumes exactly where it stopped, also on other machines or with other
batches. The position of a loader is one integer, a row of the stream.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import grain
import jax
import numpy as np

from jaxpar.data.batch_sizes import BatchSizes, BatchWarmup, as_sizes
from jaxpar.data.left_out import LeftOut
from jaxpar.data.position import row_to_go_on_at
from jaxpar.data.rows import RowSource, batched
from jaxpar.data.tokens import Tokens
from jaxpar.data.windows import Windows

_THREADS = 2
_BATCHES_AHEAD = 4


class Loader:
    """Batches of rows, in an order that is independent of the process count.

    Of a corpus, rows are windows of ``seq_len + 1`` tokens (see
    `jaxpar.data.Windows`). Rows are shuffled over the whole corpus, again for each
    epoch, and form an endless stream: batch k is rows ``[k B, (k + 1) B)`` of that
    stream, across the ends of epochs, and process p of P takes its rows
    ``[p B / P, (p + 1) B / P)``. Threads read ahead.

    A loader is its own iterator. With ``repeat=False`` it makes one pass over the full
    batches; looping over it again after the end restarts it, looping after a ``break``
    continues.

    Example:
      >>> tokens = Tokens((np.arange(9, dtype=np.uint8),), files=("digits",))
      >>> for batch in Loader(tokens, batch_size=2, seq_len=2, repeat=False):
      ...     print(batch["tokens"].tolist())
      [[0, 1, 2], [2, 3, 4]]
      [[4, 5, 6], [6, 7, 8]]
    """

    def __init__(
        self,
        source: Tokens | RowSource,
        *,
        batch_size: int | BatchWarmup,
        seq_len: int | None = None,
        seed: int = 0,
        shuffle: bool | None = None,
        repeat: bool = True,
        num_batches: int | None = None,
        process_index: int | None = None,
        process_count: int | None = None,
    ):
        """Set up the order; nothing is read before the first batch is requested.

        Args:
          source: a corpus, or rows: `jaxpar.data.PackedDocuments`,
            `jaxpar.data.Mixture`, `jaxpar.data.ImageFolder` or your own
            (`jaxpar.data.RowSource`).
          batch_size: rows of the global batch, over all processes; or how they grow,
            for an endless stream.
          seq_len: of a corpus: targets per row; a row has one token more.
          seed: of the order, a non-negative integer.
          shuffle: False for the order of the files; None to shuffle if `repeat`.
          repeat: continue with another epoch; False for one pass, as in evaluation.
          num_batches: end the pass after this many batches; None for no limit.
          process_index: of this process; None to ask JAX.
          process_count: processes that share a batch; None to ask JAX.

        Raises:
          ValueError: if a number is out of its range, `batch_size` doesn't divide by
            `process_count`, the source has fewer rows than a batch, or `batch_size`
            grows in a stream that ends.
        """
        index = jax.process_index() if process_index is None else process_index
        count = jax.process_count() if process_count is None else process_count
        self._sizes = as_sizes(batch_size)
        for size in self._sizes.sizes:
            _check_sizes(size, seed, num_batches)
            _check_process(index, count, size)
        _check_endless(batch_size, repeat=repeat and num_batches is None)
        self.source = _as_rows(source, seq_len)
        self.batch_size: int = self._sizes.sizes[-1]
        self._seed, self._repeat = seed, repeat
        self._shuffle = repeat if shuffle is None else shuffle
        _check_rows(self.source, self.batch_size)
        self._order = self.source.order(seed=seed, shuffle=self._shuffle, repeat=repeat)
        self._process = index, count
        self._num_batches = num_batches
        self._left_out = LeftOut()
        self._iterator: grain.DatasetIterator | None = None
        self._rows = 0
        self._ended = False

    @property
    def _last(self) -> int:
        """Rows of a pass that are not left out."""
        kept = self._left_out.num_kept(len(self._order))
        limit = self._num_batches
        return kept if limit is None else min(kept, limit * self.batch_size)

    @property
    def _batches_left(self) -> int:
        """Batches of a pass from here on."""
        kept = self._left_out.num_kept(self._rows)
        return max(self._last - kept, 0) // self.batch_size

    @property
    def rows(self) -> int:
        """Rows of the stream before the next batch: those drawn, and those left out."""
        return self._rows

    @property
    def sample_batch(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Shapes of a global batch, for ``jaxpar.initialize``."""
        return batched(self.source.shapes, self.batch_size)

    @property
    def padding(self) -> float:
        """Fraction of the rows' tokens that are padding; 0 unless they are packed."""
        return self.source.padding

    def __len__(self) -> int:
        """Count the batches of a pass; TypeError for a loader that never ends."""
        if self._repeat and self._num_batches is None:
            raise TypeError(
                "a Loader with repeat=True never ends and has no length; give "
                "repeat=False or num_batches=."
            )
        return self._last // self.batch_size

    def __iter__(self) -> "Loader":
        """Return the loader itself, at the start again if its pass had ended."""
        if self._ended:
            self._move_to(0)
        return self

    def __next__(self) -> dict[str, np.ndarray]:
        """Take this process's rows of the next batch."""
        iterator, self._iterator = self._iterator, None
        if iterator is None:
            iterator = self._start()
        try:
            batch = next(iterator)
        except StopIteration:
            self._ended = True
            raise
        # Stored only now: a batch that failed (a lost disk, Ctrl-C in a notebook) has
        # left Grain's queue, and a retry must read it again.
        self._iterator = iterator
        kept = self._left_out.num_kept(self._rows)
        first, size = self._sizes.place(kept, 0)
        self._rows = self._left_out.row(first + size - 1) + 1
        return batch

    def _start(self) -> grain.DatasetIterator:
        batches = _Batches(
            self.source,
            order=self._order,
            left_out=self._left_out,
            kept=self._left_out.num_kept(self._rows),
            sizes=self._sizes,
            process=self._process,
            length=self._batches_left,
        )
        options = grain.ReadOptions(
            num_threads=_THREADS, prefetch_buffer_size=_BATCHES_AHEAD
        )
        return iter(grain.MapDataset.source(batches).to_iter_dataset(options))

    def _move_to(self, rows: int) -> None:
        if self._iterator is not None:
            self._iterator.close()
        self._iterator, self._rows, self._ended = None, rows, False

    def leave_out(self, intervals: Iterable[tuple[int, int]]) -> None:
        """Set which rows of the stream no batch contains, from the next batch on.

        The next batch is the next `batch_size` rows that are not left out. If the
        intervals are whole batches, the others stay as they were.

        Args:
          intervals: (start, stop) pairs of rows, counted from the start of the stream;
            stop is the first row after them. They replace those of an earlier call.

        Raises:
          ValueError: if a start is negative, or a stop is below its start.
        """
        self._left_out, ended = LeftOut(intervals), self._ended
        self._move_to(self._rows)
        # A pass that had ended goes on only if this frees another batch.
        self._ended = ended and not self._batches_left

    def get_state(self) -> dict[str, Any]:
        """Return the loader's position and its stream, as JSON's types.

        The first call reads the whole corpus once, for its hash.

        Returns:
          ``rows`` and what the batches depend on: ``seed``, ``shuffle``,
          ``batch_size`` and the source's identity, such as ``seq_len``,
          ``num_tokens`` and ``sha256``. The same on every process. Rows left out are
          not a part of it.
        """
        return {"rows": self._rows, **self._stream()}

    def _stream(self) -> dict[str, Any]:
        return {
            "seed": self._seed,
            "shuffle": self._shuffle,
            "batch_size": self._sizes.identity(),
            **self.source.identity(),
        }

    def set_state(self, state: Mapping[str, Any], *, change: bool = False) -> None:
        """Move to the position of a state; the next batch is the one that followed it.

        Args:
          state: from `get_state`, of a loader over any number of processes.
          change: accept a state of other batches. With another batch_size this loader
            goes on at the same row; where the stream itself is another (its seed,
            shuffle or source), it starts from the beginning.

        Raises:
          ValueError: if the state lacks an entry, belongs to another stream and
            `change` is False, or is beyond the end of the pass.
        """
        rows = row_to_go_on_at(state, self._stream(), change=change)
        if not 0 <= self._left_out.num_kept(rows) <= self._last:
            raise ValueError(
                f"state has rows={rows}, but a pass of this Loader has {self._last} "
                "rows; use the repeat= and num_batches= that it was saved with."
            )
        self._move_to(rows)


class _Batches:
    """One process's rows of the k-th batch from a row on; read by Grain's threads."""

    def __init__(
        self,
        source: RowSource,
        *,
        order: grain.MapDataset,
        left_out: LeftOut,
        kept: int,
        sizes: BatchSizes,
        process: tuple[int, int],
        length: int,
    ):
        self._source, self._order, self._left_out = source, order, left_out
        self._kept, self._sizes = kept, sizes
        self._process, self._length = process, length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        first, size = self._sizes.place(self._kept, index)
        process, count = self._process
        own = range(process * size // count, (process + 1) * size // count)
        rows = [self._left_out.row(first + kept) for kept in own]
        numbers = np.array([self._order[row] for row in rows])
        return self._source.read(numbers.tolist())


def _as_rows(source: Tokens | RowSource, seq_len: int | None) -> RowSource:
    if isinstance(source, Tokens):
        if seq_len is None:
            raise ValueError(
                "seq_len=None, but a corpus needs it: give the targets per row, such "
                "as seq_len=256."
            )
        return Windows(source, seq_len=seq_len)
    if seq_len is not None:
        raise ValueError(
            f"seq_len={seq_len} is for a corpus, but the source is "
            f"{type(source).__name__}, whose rows have a length already; omit it here."
        )
    return source


def _check_sizes(batch_size: int, seed: int, num_batches: int | None) -> None:
    sizes = {"batch_size": batch_size, "num_batches": num_batches}
    for name, size in sizes.items():
        if size is not None and size < 1:
            raise ValueError(f"{name}={size} must be at least 1; give a positive one.")
    if seed < 0:
        raise ValueError(f"seed={seed} must not be negative; give 0 or more.")


def _check_process(index: int, count: int, batch_size: int) -> None:
    if not 0 <= index < count:
        raise ValueError(
            f"process_index={index} must be at least 0 and below "
            f"process_count={count}; give both, or neither to ask JAX."
        )
    if batch_size % count:
        raise ValueError(
            f"batch_size={batch_size} must be a multiple of process_count={count}: all "
            f"processes give as many rows; take {batch_size // count * count or count} "
            f"or {(batch_size // count + 1) * count}."
        )


def _check_endless(batch_size: int | BatchWarmup, *, repeat: bool) -> None:
    if isinstance(batch_size, BatchWarmup) and not repeat:
        raise ValueError(
            f"batch_size={batch_size} grows, which is for an endless stream; give a "
            "number, or repeat=True and no num_batches."
        )


def _check_rows(source: RowSource, batch_size: int) -> None:
    if len(source) < batch_size:
        raise ValueError(
            f"source: it has {source.description}, fewer than the {batch_size:,} rows "
            f"of batch_size={batch_size}; give more data, or a smaller batch or "
            "seq_len."
        )
