"""How does a run continue unattended: through signals, bad numbers and failed saves.

The metrics of a step are checked when the next one is dispatched, and before anything
is saved, so that no checkpoint holds a bad step. Problems are written to
``events.jsonl`` in the run's folder.
"""

import collections
import contextlib
import dataclasses
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import jax
from rich.console import Console

from jaxpar.checkpoint import Keep
from jaxpar.engine.engine import Engine
from jaxpar.engine.replicas import CorruptionError
from jaxpar.engine.run_ahead import SkippedStepWarning
from jaxpar.launch.exit_codes import CORRUPT, DIVERGED, REPLACED, SAVE_FAILED, STOPPED
from jaxpar.launch.lease import LeaseLostError
from jaxpar.training import goodput
from jaxpar.training.metrics import MetricsLogger
from jaxpar.training.recovery import Recovery, StepMonitor
from jaxpar.training.run import Run, digest
from jaxpar.training.signals import RunStopped, StopSignals
from jaxpar.training.stragglers import StragglerDetector, describe
from jaxpar.types import Batch, Metrics


@dataclasses.dataclass(frozen=True)
class Taken:
    """A step that was dispatched and is not checked yet.

    Attributes:
      step: its number.
      ordinal: number of its batch, counted over all batches that the run has drawn.
      batch: the batch.
      metrics: on the device.
    """

    step: int
    ordinal: int
    batch: Batch
    metrics: Metrics


class _BadNumbersError(Exception):
    """The run must roll back; `ordinals` are the batches to leave out."""

    def __init__(self, why: str, ordinals: list[int]):
        super().__init__(why)
        self.ordinals = ordinals


def train(
    engine: Engine,
    data: Any,
    run: Run,
    *,
    steps: int,
    total_steps: int | None = None,
    save_every: int,
    keep: int | Keep | None = 3,
    evaluate: Callable[[], float] | None = None,
    recovery: Recovery | None = None,
    tokens_per_step: int | None = None,
) -> float | None:
    """Train to a step, from the newest checkpoint in the run's folder.

    Args:
      engine: the engine; its state is restored from the run's newest valid checkpoint,
        if there is one.
      data: an iterator over batches with ``get_state()`` and ``set_state(state)``.
      run: the run's folder, by `jaxpar.open_run`.
      steps: the step to train to.
      total_steps: the run's last step; None for `steps`. Where it is later, another
        call goes on, perhaps of an engine on another mesh.
      save_every: steps between checkpoints; the last step is saved too.
      keep: which checkpoints to keep.
      evaluate: returns the held-out loss; called at the start and before each save,
        where ``metrics.jsonl`` has it as "heldout_loss".
      recovery: rules for bad numbers and failures; None for the defaults.
      tokens_per_step: of a global batch, for tokens/s.

    Returns:
      The held-out loss at the last step; None without `evaluate`.

    Raises:
      RunStopped: if the run ends early; scripts end with its code.
    """
    loop = _Loop(engine, data, run, recovery or Recovery(), keep, evaluate)
    logging = {
        "total_steps": total_steps or steps,
        "tokens_per_step": tokens_per_step,
        "tensorboard": run.tensorboard,
        "console": loop.console,
        "append": True,
    }
    with _ends_if_replaced(), StopSignals() as signals, warnings.catch_warnings():
        warnings.simplefilter("ignore", SkippedStepWarning)  # The loop reports them.
        start: int | None = loop.begin()
        while start is not None:
            with MetricsLogger(run.folder, resume_at=start, **logging) as logger:
                start = loop.go_on(start, steps, save_every, logger, signals)
        loop.account(show=steps >= (total_steps or steps))
    return loop.heldout


@contextlib.contextmanager
def _ends_if_replaced() -> Iterator[None]:
    """End the run, without another line written, once another process has it."""
    try:
        yield
    except LeaseLostError as error:
        raise RunStopped(REPLACED, str(error)) from None


class _Loop:
    def __init__(
        self,
        engine: Engine,
        data: Any,
        run: Run,
        recovery: Recovery,
        keep: int | Keep | None,
        evaluate: Callable[[], float] | None,
    ):
        self.engine, self.data, self.run = engine, data, run
        self.evaluate = evaluate
        self.heldout: float | None = None
        self.recovery, self.keep = recovery, keep
        self.console = Console(highlight=False, soft_wrap=True)
        self.rollbacks, self.drawn = 0, 0
        self.left_out: set[int] = set()
        self.unjudged: Taken | None = None
        self.doubtful: collections.deque[Taken] = collections.deque(
            maxlen=recovery.nonfinite
        )
        scales = engine.spec.precision.scales_loss
        self.monitor = StepMonitor(recovery, scales_loss=scales)
        self.clock = goodput.Clock(run.folder)
        self.stragglers = StragglerDetector(recovery.compare_every, recovery.slow)
        self.has_compiled = False

    def account(self, *, show: bool = True) -> None:
        """Close the account of where the time went, and print it."""
        self.clock.enter("end")
        self.clock.write()
        if show and jax.process_index() == 0:
            goodput.show(self.run.folder, self.console)

    def begin(self) -> int:
        """Restore the newest valid checkpoint; without one, save the initial state."""
        self.run.accept(self.engine)
        self.left_out = self.run.batches_left_out()
        with self.clock.during("restore"):
            start = self.run.resume(self.engine, self.data)
        if start is not None:
            self._take_up(start)
            self._evaluate(start)
            return start
        self.run.require_no_progress()
        start = self.engine.steps
        self.clock.resume(start)
        self._evaluate(start)
        self._save()
        # Before a step is logged: a log without a checkpoint means that it was lost.
        self._wait_for_saves()
        return start

    def go_on(
        self,
        start: int,
        steps: int,
        save_every: int,
        logger: MetricsLogger,
        signals: StopSignals,
    ) -> int | None:
        """Train to the last step, or return the step to roll back to."""
        try:
            for step in range(start + 1, steps + 1):
                self._step(step, logger)
                if self._is_due(step, self.recovery.probe_every):
                    self._probe(step)
                asked = signals.asked(step)
                is_due = self._is_due(step, save_every) or step == steps
                if is_due or asked:
                    self._judge(logger)
                    self.heldout = None
                    if not asked:  # A stop signal leaves little time.
                        self._evaluate(step)
                    if self.heldout is not None:
                        logger.log(step, {"heldout_loss": self.heldout})
                    # A checkpoint never has steps that the log lacks.
                    logger.flush()
                    self._save()
                if asked:
                    self._stop_at(step, asked)
            self._wait_for_saves()
        except (_BadNumbersError, FloatingPointError) as error:
            return self._roll_back(error)
        return None

    def _step(self, step: int, logger: MetricsLogger) -> None:
        """Dispatch a step, then check the previous one."""
        began = time.monotonic()
        self.clock.enter("data", step)
        batch = self._draw()
        self.clock.enter("step" if self.has_compiled else "compile", step)
        if self.stragglers.step(step, time.monotonic() - began):
            self._judge(logger)
            self.stragglers.gather()
        metrics = self.engine.step(batch)
        if not self.has_compiled:
            self.has_compiled = True
            self.clock.enter("step")
        self._judge(logger)
        logger.flush()
        self.unjudged = Taken(step, self.drawn - 1, batch, metrics)

    def _draw(self) -> Batch:
        """The next batch that is not left out."""
        while True:
            batch, ordinal = next(self.data), self.drawn
            self.drawn += 1
            if ordinal not in self.left_out:
                return batch

    def _judge(self, logger: MetricsLogger) -> None:
        """Read the metrics of the last dispatched step, log them, and check them."""
        taken, self.unjudged = self.unjudged, None
        if taken is None:
            return
        values = jax.device_get(taken.metrics)
        of_workers, slow = self.stragglers.collect()
        logger.log(taken.step, {**values, **of_workers})
        for each in slow:
            times = round(each.times, 2)
            self._report(
                "slow", taken.step, worker=each.worker, times=times, why=describe(each)
            )
        loss, norm = float(values["loss"]), float(values["grad_norm"])
        if not self.monitor.is_finite(loss, norm):
            self.doubtful.append(taken)
            self._report(
                "skipped", taken.step, loss=loss, grad_norm=norm, **self._batch(taken)
            )
        else:
            self.doubtful.clear()
        why = self.monitor.judge(loss, norm)
        if why:
            bad = list(self.doubtful) or [taken]
            self._report("bad", taken.step, why=why, loss=loss, **self._batch(taken))
            raise _BadNumbersError(why, [each.ordinal for each in bad])

    def _batch(self, taken: Taken) -> dict[str, Any]:
        return {"batch": taken.ordinal, "batch_xxh3": digest(taken.batch)}

    def _roll_back(self, error: _BadNumbersError | FloatingPointError) -> int:
        """Return to the last good step, without the bad batches."""
        why = str(error)
        ordinals = getattr(error, "ordinals", [self.drawn - 1])
        self.rollbacks += 1
        if self.rollbacks > self.recovery.rollbacks:
            self._stop(
                DIVERGED, f"{why}, after {self.recovery.rollbacks} rollbacks already"
            )
        self.left_out |= set(ordinals)
        self.unjudged = None
        self.doubtful.clear()
        self._wait_for_saves()
        with self.clock.during("restore"):
            start = self.run.resume(self.engine, self.data)
        assert start is not None, "begin saved the initial state"
        self._take_up(start)
        self._report("rolled back", start, why=why, left_out=sorted(ordinals))
        return start

    def _take_up(self, start: int) -> None:
        """Restore what the run knew at a step."""
        self.clock.resume(start)
        self.drawn = self.run.batches_drawn(start)
        window = self.recovery.window
        self.monitor.begin_after(self.run.numbers_before(start, window))

    def _save(self) -> None:
        """Save; report a previous save that failed."""
        try:
            self._wait_for_saves()
            with self.clock.during("save"):
                self.engine.save(
                    self.run.checkpoints,
                    data=self.data,
                    keep=self.keep,
                    meta=self.run.record | {"batches_drawn": self.drawn},
                    metric=self.heldout,
                )
            self.clock.saved(self.engine.steps)
        except OSError as error:
            self._failed_save(error)

    def _evaluate(self, step: int) -> None:
        if self.evaluate is not None:
            with self.clock.during("evaluate"):
                self.heldout = self.evaluate()
            if jax.process_index() == 0:
                self.console.print(f"held-out {self.heldout:.6f} at step {step}")

    def _wait_for_saves(self) -> None:
        try:
            with self.clock.during("save"):
                self.engine.wait()
        except OSError as error:
            self._failed_save(error)

    def _failed_save(self, error: OSError) -> None:
        why = f"a save failed: {error}"
        if self.recovery.on_failed_save == "stop":
            self._stop(SAVE_FAILED, why)
        self._report("save failed", self.engine.steps, why=str(error))

    def _probe(self, step: int) -> None:
        try:
            self.engine.probe()
        except CorruptionError as error:
            self._stop(CORRUPT, f"step {step}: {error}")

    def _stop_at(self, step: int, signal_name: str) -> None:
        self._wait_for_saves()
        self._stop(
            STOPPED,
            f"{signal_name} received; step {step} is saved: restart to resume",
        )

    def _stop(self, code: int, why: str) -> None:
        self._report("stopped", self.engine.steps, why=why, code=code)
        self.account()
        raise RunStopped(code, why)

    def _report(self, event: str, step: int, **fields: Any) -> None:
        self.run.note(event, step, **fields)
        said = ", ".join(f"{name} {value}" for name, value in fields.items())
        if jax.process_index() == 0:
            self.console.print(f"{event} at step {step}: {said}", markup=False)

    @staticmethod
    def _is_due(step: int, every: int) -> bool:
        return every > 0 and step % every == 0
