"""Which flags does a recipe have for rows and batches that grow?"""

import dataclasses
from typing import Any

from jaxpar.data.batch_sizes import BatchWarmup, as_sizes
from jaxpar.data.curriculum import Curriculum, other_shapes
from jaxpar.data.growth import Growing, Growth, GrowthInSteps
from jaxpar.data.loader import Loader
from jaxpar.data.packing import batch_shapes
from jaxpar.data.rows import RowSource
from jaxpar.data.suites import SuitesConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class GrowthConfig(SuitesConfig):
    """Fields of a recipe's config whose rows or batches may grow."""

    curriculum_start: int | None = None
    """Tokens of a row at step 0, which grow to whole rows; by default they are whole
    from the start."""
    curriculum_steps: int = 1000
    """Steps until rows are whole, with --curriculum-start."""
    curriculum_root: float = 1.0
    """How rows grow: 1 linearly, 2 as the square root of the step."""
    curriculum_multiple: int = 64
    """Lengths are multiples of it; each is a program to compile."""
    curriculum_lengths: tuple[int, ...] = ()
    """Lengths of rows by hand, in place of --curriculum-start; the last is whole."""
    curriculum_until: tuple[int, ...] = ()
    """For each of these lengths but the last, the first step that has the next one."""
    batch_warmup: tuple[int, ...] = ()
    """START INCREMENT SAMPLES: batches begin with START rows and grow by INCREMENT, to
    --batch-size, over the first SAMPLES rows."""

    def lengths(self, seq_len: int) -> Growing | None:
        """How rows grow to a length; None if they don't.

        Raises:
          ValueError: if the fields don't fit each other, or the length.
        """
        if not self.curriculum_lengths:
            if self.curriculum_until:
                raise ValueError(
                    f"curriculum_until={self.curriculum_until} is of lengths that are "
                    "given by hand; give --curriculum-lengths too."
                )
            if self.curriculum_start is None:
                return None
            how: dict[str, Any] = {
                "steps": self.curriculum_steps,
                "root": self.curriculum_root,
                "multiple": self.curriculum_multiple,
            }
            return Growth(self.curriculum_start, seq_len, **how)
        if self.curriculum_start is not None:
            raise ValueError(
                f"curriculum_start={self.curriculum_start} and curriculum_lengths="
                f"{self.curriculum_lengths} are two ways to say how rows grow; give "
                "one of them."
            )
        if self.curriculum_lengths[-1] != seq_len:
            raise ValueError(
                f"curriculum_lengths={self.curriculum_lengths} must end at the model's "
                f"seq_len={seq_len}."
            )
        return GrowthInSteps(self.curriculum_lengths, self.curriculum_until)

    def sizes(self, batch_size: int) -> int | BatchWarmup:
        """The rows of batches, or how they grow to that.

        Raises:
          ValueError: if `batch_warmup` is not of three numbers that fit.
        """
        if not self.batch_warmup:
            return batch_size
        if len(self.batch_warmup) != 3:
            raise ValueError(
                f"batch_warmup={self.batch_warmup} must be three numbers, START "
                "INCREMENT SAMPLES, such as --batch-warmup 16 16 100000."
            )
        start, increment, samples = self.batch_warmup
        return BatchWarmup(start, increment, samples, batch_size)

    def batch_arguments(
        self, batch_size: int, seq_len: int, *, pack: bool
    ) -> dict[str, Any]:
        """``sample_batch`` and ``other_shapes`` of `jaxpar.initialize`.

        Args:
          batch_size: rows of a batch, in the end.
          seq_len: targets of a whole row.
          pack: as for `jaxpar.data.batch_shapes`.
        """
        sample = batch_shapes(batch_size, seq_len, pack=pack)
        sizes = as_sizes(self.sizes(batch_size))
        others = other_shapes(sample, self.lengths(seq_len), sizes)
        return {"sample_batch": sample, "other_shapes": others}

    def open_loader(
        self, rows: RowSource, batch_size: int, seq_len: int, seed: int
    ) -> Loader | Curriculum:
        """Make the loader of a run's training data.

        Args:
          rows: the data.
          batch_size: rows of a batch, in the end.
          seq_len: targets of a whole row.
          seed: of the order.
        """
        loader = Loader(rows, batch_size=self.sizes(batch_size), seed=seed)
        lengths = self.lengths(seq_len)
        return loader if lengths is None else Curriculum(loader, lengths)
