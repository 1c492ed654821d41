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
from jaxtyping import Int32

from jaxpar.data.left_out import LeftOut
from jaxpar.data.position import row_to_go_on_at
from jaxpar.data.tokens import Tokens

_THREADS = 2
_BATCHES_AHEAD = 4
_MOST_EXAMPLES = 2**32
"""Grain's shuffle counts examples in 32 bits, and wraps silently beyond."""

_MAX_ID = np.iinfo(np.int32).max


class Loader:
    """Batches of token windows, in an order that is independent of the process count.

    The corpus is cut into windows of ``seq_len + 1`` tokens that start ``seq_len``
    apart, so that every token but the first is a target once. Windows are shuffled
    over the whole corpus, again for each epoch, and form an endless stream: batch k
    is windows ``[k B, (k + 1) B)`` of that stream, across the ends of epochs, and
    process p of P takes its rows ``[p B / P, (p + 1) B / P)``. Threads read ahead.

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
        tokens: Tokens,
        *,
        batch_size: int,
        seq_len: int,
        seed: int = 0,
        shuffle: bool | None = None,
        repeat: bool = True,
        num_batches: int | None = None,
        process_index: int | None = None,
        process_count: int | None = None,
    ):
        """Set up the order; nothing is read before the first batch is requested.

        Args:
          tokens: the corpus.
          batch_size: rows of the global batch, over all processes.
          seq_len: targets per row; a row has one token more.
          seed: of the order, a non-negative integer.
          shuffle: False for the order of the files; None to shuffle if `repeat`.
          repeat: continue with another epoch; False for one pass, as in evaluation.
          num_batches: end the pass after this many batches; None for no limit.
          process_index: of this process; None to ask JAX.
          process_count: processes that share a batch; None to ask JAX.

        Raises:
          ValueError: if a number is out of its range, `batch_size` doesn't divide by
            `process_count`, or the corpus has fewer windows than a batch needs.
        """
        index = jax.process_index() if process_index is None else process_index
        count = jax.process_count() if process_count is None else process_count
        _check_sizes(batch_size, seq_len, seed, num_batches)
        _check_process(index, count, batch_size)
        self.tokens, self.batch_size, self.seq_len = tokens, batch_size, seq_len
        self._seed, self._repeat = seed, repeat
        self._shuffle = repeat if shuffle is None else shuffle

        num_examples = (len(tokens) - 1) // seq_len
        _check_examples(num_examples, tokens, batch_size, seq_len)
        self._order = self._make_order(num_examples)
        self._own = range(
            index * batch_size // count, (index + 1) * batch_size // count
        )
        self._num_batches = num_batches
        self._left_out = LeftOut()
        self._iterator: grain.DatasetIterator | None = None
        self._rows = 0
        self._ended = False

    def _make_order(self, num_examples: int) -> grain.MapDataset:
        order = grain.MapDataset.range(num_examples).seed(self._seed)
        if self._shuffle:
            order = order.shuffle()
        if self._repeat:
            order = order.repeat()
        # Grain builds its index on the first access, which two reading threads must not
        # do at once.
        order[0]
        return order

    @property
    def _last(self) -> int:
        """Rows of a pass that are not left out."""
        kept = self._left_out.num_kept(len(self._order))
        limit = self._num_batches
        return kept if limit is None else min(kept, limit * self.batch_size)

    @property
    def rows(self) -> int:
        """Rows of the stream before the next batch: those drawn, and those left out."""
        return self._rows

    @property
    def sample_batch(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Shapes of a global batch, for ``jaxpar.initialize``."""
        shape = (self.batch_size, self.seq_len + 1)
        return {"tokens": jax.ShapeDtypeStruct(shape, np.dtype(np.int32))}

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

    def __next__(self) -> dict[str, Int32[np.ndarray, "B T_plus_1"]]:
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
        last = self._left_out.num_kept(self._rows) + self.batch_size - 1
        self._rows = self._left_out.row(last) + 1
        return batch

    def _start(self) -> grain.DatasetIterator:
        kept = self._left_out.num_kept(self._rows)
        batches = _Batches(
            self.tokens,
            order=self._order,
            left_out=self._left_out,
            seq_len=self.seq_len,
            own=range(kept + self._own.start, kept + self._own.stop),
            batch_size=self.batch_size,
            length=(self._last - kept) // self.batch_size,
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
        self._left_out = LeftOut(intervals)
        self._move_to(self._rows)

    def get_state(self) -> dict[str, Any]:
        """Return the loader's position and its stream, as JSON's types.

        The first call reads the whole corpus once, for its hash.

        Returns:
          ``rows`` and what the batches depend on: ``seed``, ``shuffle``,
          ``batch_size``, ``seq_len``, ``num_tokens``, ``sha256``. The same on every
          process. Rows left out are not a part of it.
        """
        return {"rows": self._rows, **self._stream()}

    def _stream(self) -> dict[str, Any]:
        return {
            "seed": self._seed,
            "shuffle": self._shuffle,
            "batch_size": self.batch_size,
            "seq_len": self.seq_len,
            "num_tokens": len(self.tokens),
            "sha256": self.tokens.sha256,
        }

    def set_state(self, state: Mapping[str, Any], *, change: bool = False) -> None:
        """Move to the position of a state; the next batch is the one that followed it.

        Args:
          state: from `get_state`, of a loader over any number of processes.
          change: accept a state of other batches. With another batch_size this loader
            goes on at the same row; where the stream itself is another (its seed,
            shuffle, seq_len or corpus), it starts from the beginning.

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
        tokens: Tokens,
        *,
        order: grain.MapDataset,
        left_out: LeftOut,
        seq_len: int,
        own: range,
        batch_size: int,
        length: int,
    ):
        self._tokens, self._order, self._left_out = tokens, order, left_out
        self._seq_len, self._own = seq_len, own
        self._batch_size, self._length = batch_size, length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> dict[str, Int32[np.ndarray, "B T_plus_1"]]:
        first = index * self._batch_size
        rows = [self._left_out.row(first + kept) for kept in self._own]
        starts = np.array([self._order[row] for row in rows]) * self._seq_len
        windows = np.stack(
            [
                self._tokens.read(start, start + self._seq_len + 1)
                for start in starts.tolist()
            ]
        )
        if not np.can_cast(windows.dtype, np.int32) and windows.max() > _MAX_ID:
            at = rows[int(windows.max(axis=1).argmax())]
            raise ValueError(
                f"row {at} holds token id {windows.max()}, but ids must be below "
                "2**31, because models take int32; check the file's dtype=."
            )
        return {"tokens": windows.astype(np.int32)}


def _check_sizes(
    batch_size: int, seq_len: int, seed: int, num_batches: int | None
) -> None:
    sizes = {"batch_size": batch_size, "seq_len": seq_len, "num_batches": num_batches}
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


def _check_examples(
    num_examples: int, tokens: Tokens, batch_size: int, seq_len: int
) -> None:
    if num_examples < batch_size:
        raise ValueError(
            f"tokens: the corpus has {len(tokens):,} tokens, {num_examples:,} windows "
            f"of seq_len={seq_len}, but batch_size={batch_size} needs "
            f"{batch_size * seq_len + 1:,} tokens; give more data, or a smaller batch "
            "or seq_len."
        )
    if num_examples > _MOST_EXAMPLES:
        raise ValueError(
            f"tokens: the corpus has {num_examples:,} windows of seq_len={seq_len}, "
            f"but at most {_MOST_EXAMPLES:,} can be shuffled; give a longer seq_len, "
            "or split the corpus."
        )
