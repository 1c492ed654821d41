"""What is the corpus: one sequence of token ids over files, identified by its hash.

Files are never joined, so a corpus larger than memory only costs what is read of it.
"""

import bisect
import dataclasses
import functools
import hashlib
import itertools
from collections.abc import Callable, Sequence

import jax
import numpy as np
from jaxtyping import Int64, Integer

from jaxpar.data.disk_array import DiskArray
from jaxpar.progress import counting

_HASH_CHUNK = 1 << 22
"""Elements hashed at a time."""


@dataclasses.dataclass(frozen=True, eq=False)
class Tokens:
    """Token ids in a fixed order, possibly over several arrays on disk.

    Attributes:
      parts: 1-D integer arrays of one dtype, read as one sequence; `DiskArray` for data
        on disk.
      files: the files of the ids, in order, for messages and records.
      vocab_size: one more than the largest possible id, where the data's format
        determines it (256 for bytes); None otherwise.
      num_bytes: of the text that the ids stand for; None if unknown.
      starts: position of each document's first id, ascending from 0; None if unknown.
      loss_mask: uint8, one for each id: 1 where it is to be learned; None for all.
      end_id: the id that ends every document; None if there is none.
      known_sha256: what `sha256` is, where it has been computed; None to compute it.
      is_heldout: whether it is held-out data, for messages.

    Raises:
      ValueError: if a part is not 1-D, not of integers or of another dtype than the
        first, `starts` or `loss_mask` don't fit them, or there is no token at all.

    Example:
      >>> tokens = Tokens((np.arange(5), np.arange(5, 8)), files=("a", "b"))
      >>> len(tokens), tokens.read(3, 7)
      (8, array([3, 4, 5, 6]))
    """

    parts: tuple[np.ndarray | DiskArray, ...]
    files: tuple[str, ...]
    vocab_size: int | None = None
    num_bytes: int | None = None
    starts: Int64[np.ndarray, "documents"] | None = dataclasses.field(
        default=None, repr=False
    )
    loss_mask: np.ndarray | DiskArray | None = dataclasses.field(
        default=None, repr=False
    )
    end_id: int | None = None
    known_sha256: str | None = None
    is_heldout: bool = False

    def __post_init__(self):
        named = len(self.files) == len(self.parts)
        for index, part in enumerate(self.parts):
            name = repr(self.files[index]) if named else f"parts[{index}]"
            _check_part(part, name, self.parts[0].dtype)
        if not len(self):
            raise ValueError(
                f"the corpus of {len(self.files)} files holds no tokens; give at least "
                "one file that is not empty."
            )
        self._check_documents()

    def _check_documents(self) -> None:
        starts, mask = self.starts, self.loss_mask
        if starts is not None and not (
            len(starts)
            and starts[0] == 0
            and starts[-1] < len(self)
            and (np.diff(starts) > 0).all()
        ):
            raise ValueError(
                f"starts must ascend from 0 and stay below the {len(self):,} tokens; "
                "give the position of each document's first id."
            )
        if mask is not None and (mask.dtype, len(mask)) != (np.uint8, len(self)):
            raise ValueError(
                f"loss_mask holds {len(mask):,} {mask.dtype}, but must be uint8, one "
                f"for each of the {len(self):,} tokens."
            )

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    @functools.cached_property
    def _ends(self) -> list[int]:
        return [*itertools.accumulate(len(part) for part in self.parts)]

    @functools.cached_property
    def _begins(self) -> list[int]:
        return [0, *self._ends[:-1]]

    @property
    def dtype(self) -> np.dtype:
        """The dtype of the ids as they are stored."""
        return self.parts[0].dtype

    @property
    def remark(self) -> str:
        """What messages say after the word corpus, or tokens: " (held out)", or ""."""
        return " (held out)" if self.is_heldout else ""

    @property
    def array(self) -> Integer[np.ndarray, "_"]:
        """All ids as one array in memory."""
        return self.read(0, len(self))

    def read(self, start: int, stop: int) -> Integer[np.ndarray, "_"]:
        """Copy the ids from `start` up to `stop` into memory, across parts.

        Args:
          start: position of the first id.
          stop: position after the last; clipped at the end, as in a slice.

        Returns:
          The ids, in their stored dtype.

        Raises:
          ChangedDataError: if a file is not what it was.
        """
        first = bisect.bisect_right(self._begins, start) - 1
        last = max(bisect.bisect_left(self._begins, stop), first + 1)
        begun = zip(self._begins[first:last], self.parts[first:last], strict=True)
        return np.concatenate(
            [part[max(start - at, 0) : max(stop - at, 0)] for at, part in begun]
        )

    @functools.cached_property
    def sha256(self) -> str:
        """Hash of the corpus bytes in order, in hexadecimal; computed when first read.

        It reads the whole corpus once. For text it is the hash of the files
        concatenated, for a ``.bin`` file the hash of the file.
        Where there is a loss mask, it is `joint_sha256` of both.
        """
        if self.known_sha256 is not None:
            return self.known_sha256
        of_ids, _ = self._hash_and_largest
        if self.loss_mask is None:
            return of_ids
        digest = hashlib.sha256()
        self._scan((self.loss_mask,), digest.update)
        return joint_sha256(of_ids, digest.hexdigest())

    @functools.cached_property
    def _hash_and_largest(self) -> tuple[str, int]:
        """Hash of the ids, and the largest of them, from one read."""
        digest, largest = hashlib.sha256(), 0

        def see(piece: np.ndarray) -> None:
            nonlocal largest
            digest.update(piece)
            largest = max(largest, int(piece.view(self.dtype).max()))

        self._scan(self.parts, see)
        return digest.hexdigest(), largest

    def _scan(
        self,
        arrays: tuple[np.ndarray | DiskArray, ...],
        see: Callable[[np.ndarray], None],
    ) -> None:
        """Read arrays once, in pieces, with progress."""
        total = sum(array.nbytes for array in arrays)
        what = f"hashing {first_of(self.files)}"
        with counting(what, total, unit="B", shown=is_first()) as advance:

            def counted(piece: np.ndarray) -> None:
                see(piece)
                advance(piece.nbytes)

            for array in arrays:
                if isinstance(array, DiskArray):
                    array.scan(counted)
                    continue
                for start in range(0, len(array), _HASH_CHUNK):
                    counted(np.ascontiguousarray(array[start : start + _HASH_CHUNK]))

    def require_vocabulary(self, vocab_size: int) -> None:
        """Raise ValueError if there may be ids that a model's vocabulary lacks.

        Where the format of the data doesn't say, the largest id of all is found.
        """
        needed = self.vocab_size
        if needed is None:
            needed = self._hash_and_largest[1] + 1
        if needed > vocab_size:
            raise ValueError(
                f"vocab_size={vocab_size:,} of the model is below the "
                f"{needed:,} of the corpus ({self.files[0]}); choose another "
                "model (--model), or another tokenizer (--tokenizer)."
            )


def joint_sha256(of_ids: str, of_mask: str) -> str:
    """The identity of ids and their loss mask, of the hashes of both."""
    return hashlib.sha256(f"{of_ids} {of_mask}".encode()).hexdigest()


def first_of(names: Sequence[str]) -> str:
    """Name the first of several, and how many others there are.

    Example:
      >>> first_of(["a"]), first_of(["a", "b", "c"])
      ('a', 'a and 2 others')
    """
    others = f" and {len(names) - 1:,} others" if names[1:] else ""
    return "".join(names[:1]) + others


def is_first() -> bool:
    """Whether this process speaks for the run, without making jax look for devices."""
    return not jax.distributed.is_initialized() or jax.process_index() == 0


def _check_part(part: np.ndarray | DiskArray, name: str, dtype: np.dtype) -> None:
    if part.ndim != 1:
        raise ValueError(
            f"{name} has shape {part.shape}, but a corpus is one run of token "
            "ids; save it with one dim (array.reshape(-1))."
        )
    if not np.issubdtype(part.dtype, np.integer):
        raise ValueError(
            f"{name} holds {part.dtype}, but token ids must be integers; save "
            "it as uint16, or uint32 for a vocabulary over 65,536."
        )
    if part.dtype != dtype:
        raise ValueError(
            f"{name} holds {part.dtype} and the part before it "
            f"{dtype}; save all parts of a corpus in one dtype."
        )
