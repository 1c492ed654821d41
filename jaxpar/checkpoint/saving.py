"""When is a step saved: once its files are on disk, verified and under its name."""

import concurrent.futures
import contextlib
import dataclasses
import math
import operator
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from pathlib import Path

from jaxpar.checkpoint import arrays as stored_arrays
from jaxpar.checkpoint import folder as files
from jaxpar.checkpoint.manifest import Manifest, seal, sync
from jaxpar.checkpoint.outcome import FailedElsewhereError, SaveOutcome
from jaxpar.checkpoint.processes import gather
from jaxpar.checkpoint.retention import Keep
from jaxpar.checkpoint.sealing import seal_together
from jaxpar.checkpoint.slices import Slices
from jaxpar.launch.lease import LeaseLostError, require_lease

REREAD = 0.125
"""Share of the slices that is read back by default, other ones at each save."""
_POLL_SECONDS, _LONGEST_POLL_SECONDS = 0.2, 600.0


class SaveFailedError(OSError):
    """A checkpoint could not be written; earlier ones are complete."""


@dataclasses.dataclass(frozen=True)
class ReadBack:
    """What a process reads back of a step that it has written.

    Attributes:
      own: leaf -> the slices that it owns, as its devices held them.
      share: of these, at most 1; 0 for none.
      turn: number of the save, by which the sample is another each time.
    """

    own: Mapping[str, Slices]
    share: float
    turn: int

    def compare(self, folder: Path, manifest: Manifest) -> None:
        """Compare a sample with what is in a step's folder.

        Raises:
          DifferentError: if it is not what the devices held.
        """
        stored_arrays.compare_slices(folder, manifest, self.sample())

    def sample(self) -> dict[str, Slices]:
        """The slices to read back this time, by leaf."""
        every = round(1 / self.share) if self.share else 0
        slices = [
            (name, place)
            for name, each in sorted(self.own.items())
            for place in sorted(each.checksums)
        ]
        sample = set(slices[self.turn % every :: every] if every else [])
        return {
            name: Slices(
                each.shape,
                {p: x for p, x in each.checksums.items() if (name, p) in sample},
            )
            for name, each in self.own.items()
        }


def checked_step(step: int) -> int:
    """The number of a step.

    Raises:
      ValueError: if it is below 0.
    """
    number = operator.index(step)
    if number < 0:
        raise ValueError(f"step is {number}; it must be at least 0")
    return number


def start(
    outcome: SaveOutcome, begin: Callable[[], None], finish: Callable[[], None]
) -> concurrent.futures.Future[None]:
    """Begin to write a step, and finish it in the background.

    An error is one of the result, and of the outcome, by which all processes learn of
    it. The thread ends with the program's main one.
    """
    result: concurrent.futures.Future[None] = concurrent.futures.Future()

    def failed(_: object, error: BaseException | None, trace: object) -> bool:
        if error is None:
            result.set_result(None)
            return True
        if not isinstance(error, FailedElsewhereError):
            outcome.fail(repr(error)[:1000])
        result.set_exception(error)
        return True

    def run() -> None:
        with contextlib.ExitStack() as stack:
            stack.push(failed)
            finish()

    try:
        begin()
    except (OSError, ValueError, RuntimeError) as error:
        failed(None, error, None)
    else:
        threading.Thread(target=run, name="jaxpar-save", daemon=True).start()
    return result


def finish(
    outcome: SaveOutcome,
    written: Path,
    writer: stored_arrays.Writer,
    manifest: Manifest,
    keep: Keep,
    read_back: ReadBack,
) -> None:
    """Wait for a step's arrays; verify and rename it, and delete old steps.

    Process 0 does what is done once. All hash their share of the files, and the others
    wait for process 0 to read back what they have written; old steps stay until all
    have done that.

    Args:
      outcome: of the save.
      written: where the step is written, in the folder of the checkpoints.
      writer: writes the arrays.
      manifest: of the step, without files.
      keep: which steps to keep.
      read_back: what this process compares.

    Raises:
      OSError, ValueError, RuntimeError: the cause of a failure (`LeaseLostError` is
        one); the step's files are deleted then.
    """
    folder, is_first = written.parent, outcome.index == 0
    with contextlib.ExitStack() as on_failure:
        if is_first:
            on_failure.callback(files.delete, written)
        writer.wait()
        if is_first:
            stored_arrays.require_declared(written, manifest.leaves)
            read_back.compare(written, manifest)
        sealed = seal_together(outcome, written)
        if is_first:
            seal(written, manifest, sealed)
            require_lease(folder)
            files.rename(written, files.step_path(folder, manifest.step))
            sync(folder)
        on_failure.pop_all()
    step = files.step_path(folder, manifest.step)
    if not is_first and _appears(outcome, written, step):
        read_back.compare(step, manifest)
    outcome.wait_for_all("compared", _LONGEST_POLL_SECONDS)
    if is_first:
        steps = dict.fromkeys(files.complete_steps(folder))
        for old in keep.going(files.metrics(folder) if keep.best else steps):
            files.delete_step(folder, old)


def _appears(outcome: SaveOutcome, written: Path, step: Path) -> bool:
    """Wait until process 0 has given a step its name; False if it does not."""
    until = time.monotonic() + _LONGEST_POLL_SECONDS
    while written.exists() and time.monotonic() < until:
        outcome.require_sound()
        time.sleep(_POLL_SECONDS)
    return files.is_complete(step)


def failure(
    folder: str,
    failed: Sequence[str | None],
    error: BaseException | None,
    newest: int | None,
) -> LeaseLostError | SaveFailedError:
    """The error of a failed save.

    Args:
      folder: of the checkpoints.
      failed: what each process says of it; None where nothing failed.
      error: of this process.
      newest: the newest complete step.
    """
    lost = [why for why in failed if why and why.startswith("LeaseLostError")]
    if lost:
        is_own = isinstance(error, LeaseLostError)
        return LeaseLostError(str(error) if is_own else lost[0])
    own = [why and not why.startswith(FailedElsewhereError.__name__) for why in failed]
    said = "; ".join(
        why if len(failed) == 1 else f"process {i}: {why}"
        for i, why in enumerate(failed)
        if why and (own[i] or not any(own))
    )
    return SaveFailedError(
        f"a save to {folder!r} failed: {said}. The newest checkpoint there is "
        f"{'none' if newest is None else f'step {newest}'}; make room or repair the "
        "disk, and save again"
    )


def of_all(own: Mapping[str, Slices]) -> dict[str, Slices]:
    """The slices of all processes, of those that each owns; every process calls it."""
    everyone = gather({name: each.checksums for name, each in own.items()})
    found: dict[str, dict[str, str]] = {name: {} for name in own}
    for process in everyone:
        for name, entries in process.items():
            found[name].update(entries)
    return {name: Slices(each.shape, found[name]) for name, each in own.items()}


def finite(metric: float | None) -> float | None:
    """A metric that can be ordered; None if it can't."""
    return None if metric is None or not math.isfinite(metric) else float(metric)


def versions() -> dict[str, str]:
    """Versions of the software that saves a step."""
    return {name: metadata.version(name) for name in ("jax", "orbax-checkpoint")}
