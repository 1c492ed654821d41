"""What happens from one step of a run to the next: check, log, evaluate, save, go back.

The metrics of a step are checked when the next one is dispatched, and before anything
is saved, so that no checkpoint holds a bad step. Problems are written to
``events.jsonl`` in the run's folder.
"""

import collections
import functools
import time
from collections.abc import Mapping
from typing import Any

import jax
from rich.console import Console

from jaxpar.checkpoint.processes import from_first
from jaxpar.checkpoint.retention import as_keep
from jaxpar.engine.engine import Engine
from jaxpar.engine.replicas import CorruptionError
from jaxpar.launch.exit_codes import CORRUPT, DIVERGED, SAVE_FAILED, STOPPED
from jaxpar.training import goodput
from jaxpar.training.evaluations import Evaluations, describe
from jaxpar.training.mending import mend
from jaxpar.training.metrics import MetricsLogger
from jaxpar.training.performance import Performance
from jaxpar.training.profile import Profile
from jaxpar.training.recovery import StepMonitor, Taken
from jaxpar.training.replaying import Replaying
from jaxpar.training.run import EVENTS, NEW_DATA, Run, RunRules, digest
from jaxpar.training.saves import Saves
from jaxpar.training.signals import RunStopped, StopSignals
from jaxpar.training.stragglers import StragglerDetector, describe_slow
from jaxpar.types import Batch


class _BadNumbersError(Exception):
    """The run must roll back; `taken` are the steps whose batches to leave out."""

    def __init__(self, why: str, taken: list[Taken]):
        super().__init__(why)
        self.taken = taken


class RunLoop:
    """Takes the steps of a run, from one start to its end.

    Args:
      engine: of the run.
      data: an iterator over batches, with its position.
      run: the run.
      rules: what does not change.
      evaluations: that the run's `RunRules` ask for.
      tokens_per_step: of a global batch; None if unknown.
    """

    def __init__(
        self,
        engine: Engine,
        data: Any,
        run: Run,
        rules: RunRules,
        evaluations: Evaluations,
        tokens_per_step: int | None,
    ):
        self.rules, self.recovery = rules, rules.recovery
        if self.recovery.memory_every:
            run = run.with_memory()
        self.engine, self.data, self.run = engine, data, run
        self.evaluations = evaluations
        self.leaves_out = hasattr(data, "leave_out")
        self.first_numbers: dict[str, float] = {}
        self.console = Console(highlight=False, soft_wrap=True)
        self.rollbacks, self.drawn, self.rows = 0, 0, 0
        self.batch_rows = engine.batch_spec.num_rows
        self.left_out: list[tuple[int, int]] = []
        self.last: tuple[int, tuple[int, int]] = (0, (0, 0))
        self.unjudged: Taken | None = None
        self.doubtful: collections.deque[Taken] = collections.deque(
            maxlen=self.recovery.nonfinite
        )
        scales = engine.spec.precision.scales_loss
        self.monitor = StepMonitor(self.recovery, scales_loss=scales)
        self.mended = from_first(lambda: mend(run))
        self.clock = goodput.Clock(run.folder)
        self.replaying = Replaying(
            engine, self.recovery.replay_every, self.clock, self._report
        )
        self.profile = Profile(
            engine, run.folder, rules.profiled, self.clock.annotations
        )
        self.performance = Performance(engine, self.clock.spent, tokens_per_step)
        self.stragglers = StragglerDetector(
            self.recovery.compare_every, self.recovery.slow
        )
        self.has_compiled, self.is_saved = False, True
        self.heldout: float | None = None
        stops = self.recovery.on_failed_save == "stop"
        self.saves = Saves(
            *(self._begin_save, engine.wait, self._save_failed),
            functools.partial(self._stop, SAVE_FAILED) if stops else None,
        )

    def account(self, *, show: bool = True) -> None:
        """Close the account of where the time went, and print it."""
        self.clock.enter("end")
        self.clock.write()
        self.run.close_memory(delete=self.is_saved)
        if show and jax.process_index() == 0:
            goodput.show(self.run.folder, self.console)

    def begin(self) -> int:
        """Restore the newest valid checkpoint; without one, save the initial state."""
        self.run.accept(self.engine)
        self.left_out = self.run.rows_left_out(self.batch_rows)
        with self.clock.during("restore"):
            start = self.run.resume(self.engine, self.data)
        if start is not None:
            if EVENTS in self.mended or not self.run.events():
                self.left_out = self.run.recall_left_out(start, self.batch_rows)
            self._resume_at(start)
            found = self._evaluate(start)
            if self._due(start)[0] and self.evaluations.lacks(start):
                self.first_numbers = found  # A stop signal came before it.
            return start
        self.run.require_no_progress()
        with self.clock.during("restore"):
            self.run.begin(self.engine)
        start = self.engine.steps
        self.clock.resume(start)
        self.first_numbers = self._evaluate(start)
        self._save(self.evaluations.loss)
        # Before a step is logged: a log without a checkpoint means that it was lost.
        self._wait_for_saves()
        return start

    def go_on(
        self, start: int, logger: MetricsLogger, signals: StopSignals
    ) -> int | None:
        """Train to the last step, or return the step to roll back to."""
        self._log(start, self.first_numbers, logger)
        self.first_numbers = {}
        try:
            for step in range(start + 1, self.rules.steps + 1):
                if self.evaluations.is_over:
                    break
                with self.profile.step(step):
                    self._step(step, logger)
                if self._is_due(step, self.recovery.probe_every):
                    self.engine.probe()
                self._evaluate_and_save(step, logger, signals.asked(step))
                if self._is_due(step, self.recovery.memory_every):
                    self._keep_in_memory(logger)
            self._wait_for_saves()
            self._say_early_stop()
        except (_BadNumbersError, FloatingPointError) as error:
            return self._roll_back(error)
        except CorruptionError as error:
            self.saves.have_ended()  # Of a state before; this one is not saved.
            self.run.forget_memory()
            self._stop(CORRUPT, f"step {self.engine.steps}: {error}")
        return None

    def _evaluate_and_save(
        self, step: int, logger: MetricsLogger, asked: str | None
    ) -> None:
        """Do what is due after a step, and end the run if that was asked for."""
        due, is_saved = self._due(step)
        is_saved |= self.engine.has_failed_save(step)  # Tried again at once.
        heldout = None
        if due or is_saved or asked:
            self._judge(logger)
        if due and not asked:  # A stop signal leaves little time.
            self._log(step, self._evaluate(step), logger)
            heldout = self.evaluations.loss
            is_saved |= self.evaluations.is_improved or self.evaluations.is_over
        if is_saved or asked:
            # A checkpoint never has steps that the log lacks.
            logger.flush()
            self._save(heldout)
        if asked:
            self._stop_at(step, asked)

    def _due(self, step: int) -> tuple[bool, bool]:
        """Whether to evaluate, and whether to save, after a step."""
        is_last = step == self.rules.steps
        is_saved = self._is_due(step, self.rules.save_every) or is_last
        # The best checkpoints are chosen among all that are saved.
        is_judged = is_saved and as_keep(self.rules.keep).best > 0
        due = self.evaluations.is_due(step, is_saved=is_saved, is_last=is_last)
        return due or (is_judged and bool(self.evaluations)), is_saved

    def _say_early_stop(self) -> None:
        """Report that the run is over before its last step, if it is."""
        if not self.evaluations.is_over:
            return
        best, since = self.evaluations.standing()
        why = f"no better held-out loss for {since} evaluations since step {best}"
        if self.has_compiled:
            self._report("stopped early", self.engine.steps, why=why, best_step=best)
        else:
            self._say(f"has stopped early at step {self.engine.steps}: {why}")

    def _log(
        self, step: int, numbers: Mapping[str, float], logger: MetricsLogger
    ) -> None:
        """Log numbers, and call the hooks."""
        if numbers:
            logger.log(step, numbers)
            self.evaluations.remember(step, numbers)
            for hook in self.rules.hooks:
                hook(step, dict(numbers), self.engine)

    def _step(self, step: int, logger: MetricsLogger) -> None:
        """Dispatch a step, then check the previous one."""
        began = time.monotonic()
        self.clock.enter("data", step)
        batch = self._draw()
        self.clock.enter("step" if self.has_compiled else "compile", step)
        if self.stragglers.step(step, time.monotonic() - began):
            self._judge(logger)
            self.stragglers.gather()
        metrics = self.replaying.step(step, batch)
        if not self.has_compiled:
            self.has_compiled = True
            self.clock.enter("step")
        self._judge(logger)
        logger.flush()
        self.unjudged = Taken(step, *self.last, batch, metrics)

    def _draw(self) -> Batch:
        """The next batch that is not left out."""
        while True:
            began, batch = self.rows, next(self.data)
            self.rows = self.data.rows if self.leaves_out else began + self.batch_rows
            self.last = self.drawn, (began, self.rows)
            self.drawn += 1
            # Data that can leave rows out by itself has done so.
            if self.leaves_out or not any(
                start < self.rows and began < stop for start, stop in self.left_out
            ):
                return batch

    def _judge(self, logger: MetricsLogger) -> None:
        """Read the metrics of the last dispatched step, log them, and check them."""
        taken, self.unjudged = self.unjudged, None
        if taken is None:
            return
        values = jax.device_get(taken.metrics)
        of_workers, slow = self.stragglers.collect()
        returned = {f"train/{name}": float(x) for name, x in values.items()}
        rates = self.performance.read(taken.batch)
        self._log(taken.step, {**returned, **rates, **of_workers}, logger)
        for each in slow:
            own = {"worker": each.worker, "times": round(each.times, 2)}
            self._report("slow", taken.step, **own, why=describe_slow(each))
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
            raise _BadNumbersError(why, bad)

    def _batch(self, taken: Taken) -> dict[str, Any]:
        return {"batch": taken.ordinal, "batch_xxh3": digest(taken.batch)}

    def _roll_back(self, error: _BadNumbersError | FloatingPointError) -> int:
        """Return to the last good step, without the bad batches."""
        why = str(error)
        taken = getattr(error, "taken", [])
        lasts = [(each.ordinal, each.rows) for each in taken] or [self.last]
        ordinals, rows = zip(*sorted(lasts), strict=True)
        self.rollbacks += 1
        if self.rollbacks > self.recovery.rollbacks:
            self._stop(
                DIVERGED, f"{why}, after {self.recovery.rollbacks} rollbacks already"
            )
        self.left_out = sorted({*self.left_out, *rows})
        self.unjudged = None
        self.doubtful.clear()
        with self.clock.during("save"):
            self.saves.have_ended()
            self.run.forget_memory()
        with self.clock.during("restore"):
            start = self.run.resume(self.engine, self.data)
        assert start is not None, "begin saved the initial state"
        self._resume_at(start)
        said = {"left_out": list(ordinals), "rows_left_out": list(map(list, rows))}
        self._report("rolled back", start, why=why, **said)
        return start

    def _resume_at(self, start: int) -> None:
        """Restore what the run knew at a step."""
        self.clock.resume(start)
        self.performance.read()  # What was done since the last step is not one's time.
        self.drawn, self.rows = self.run.drawn(start, self.batch_rows)
        self._leave_out()
        self.evaluations.recall(self.run, start)
        window = self.recovery.window
        self.monitor.begin_after(self.run.numbers_before(start, window))

    def _leave_out(self) -> None:
        """Have the data leave rows out, and take its own count of them."""
        if not self.leaves_out:
            return
        if self.data.rows == 0 < self.rows:
            self._note_new_data()
        self.rows = self.data.rows
        self.data.leave_out(self.left_out)

    def _note_new_data(self) -> None:
        """Forget what was left out of another stream of rows."""
        own = ("rows", "batch_size", "steps")
        stream = {k: v for k, v in self.data.get_state().items() if k not in own}
        known = [e["stream"] for e in self.run.events() if e["event"] == NEW_DATA]
        if stream not in known[-1:]:
            at = self.engine.steps
            self.run.note(NEW_DATA, at, rows_before=self.rows, stream=stream)
            self.left_out = []

    def _save(self, heldout: float | None) -> None:
        """Start a save, with the loss that chooses the best."""
        self.heldout = heldout
        with self.clock.during("save"):
            self.saves.start()

    def _begin_save(self) -> None:
        self.engine.save(
            self.run.checkpoints,
            data=self.data,
            keep=self.rules.keep,
            meta=self._meta(),
            metric=self.heldout,
            reread=self.recovery.reread,
        )
        self.clock.saved(self.engine.steps)

    def _meta(self) -> dict[str, Any]:
        drawn = {"batches_drawn": self.drawn, "rows_drawn": self.rows}
        return {**self.run.record, **drawn, "rows_left_out": self.left_out}

    def _keep_in_memory(self, logger: MetricsLogger) -> None:
        self._judge(logger)
        logger.flush()
        with self.clock.during("save"):
            self.run.keep_in_memory(self.engine, self.data, self._meta())

    def _evaluate(self, step: int) -> dict[str, float]:
        """Evaluate and print; name -> number."""
        if not self.evaluations:
            return {}
        with self.clock.during("evaluate"):
            found = self.evaluations.run()
        self._say(f"held-out {describe(found)} at step {step}")
        return found

    def _wait_for_saves(self) -> None:
        with self.clock.during("save"):
            self.saves.wait()

    def _save_failed(self, why: str) -> None:
        self._report("save failed", self.engine.steps, why=why)

    def _stop_at(self, step: int, signal_name: str) -> None:
        self._wait_for_saves()
        why = f"{signal_name} received; step {step} is saved: restart to resume"
        self._stop(STOPPED, why)

    def _stop(self, code: int, why: str) -> None:
        self._report("stopped", self.engine.steps, why=why, code=code)
        self.is_saved = code != SAVE_FAILED
        self.account()
        raise RunStopped(code, why)

    def _report(self, event: str, step: int, **fields: Any) -> None:
        self.run.note(event, step, **fields)
        said = ", ".join(f"{name} {value}" for name, value in fields.items())
        self._say(f"{event} at step {step}: {said}")

    def _say(self, text: str) -> None:
        if jax.process_index() == 0:
            self.console.print(text, markup=False)

    @staticmethod
    def _is_due(step: int, every: int) -> bool:
        return every > 0 and step % every == 0
