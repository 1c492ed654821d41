"""How does a run continue unattended: through signals, bad numbers and failed saves."""

import contextlib
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jaxpar.checkpoint import Keep
from jaxpar.engine.engine import Engine
from jaxpar.engine.run_ahead import SkippedStepWarning
from jaxpar.launch.exit_codes import REPLACED, SAVE_FAILED
from jaxpar.launch.lease import LeaseLostError
from jaxpar.launch.worker_environment import current, say_error
from jaxpar.training.early_stop import EarlyStop
from jaxpar.training.evaluations import Evaluation, Evaluations
from jaxpar.training.metrics import MetricsLogger
from jaxpar.training.profile import profiled_steps
from jaxpar.training.recovery import Recovery
from jaxpar.training.run import Hook, Run, RunRules
from jaxpar.training.run_loop import RunLoop
from jaxpar.training.signals import RunStopped, StopSignals
from jaxpar.training.writers import Guarded, MetricsWriter


def train(  # noqa: PLR0913 - keywords, each of its own kind
    engine: Engine,
    data: Any,
    run: Run,
    *,
    steps: int,
    total_steps: int | None = None,
    save_every: int,
    keep: int | Keep | None = 3,
    evaluate: Evaluation | Mapping[str, Evaluation] | None = None,
    eval_every: int | None = None,
    early_stop: EarlyStop | None = None,
    writers: Sequence[MetricsWriter] = (),
    hooks: Sequence[Hook] = (),
    recovery: Recovery | None = None,
    tokens_per_step: int | None = None,
    profile: tuple[int, int] | str | None = None,
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
      evaluate: returns the held-out loss, or a dict of numbers; several by name, in a
        dict. Called by every process at the start and before each save;
        ``metrics.jsonl`` has the numbers as ``eval/loss`` or ``eval/<name>/<number>``.
        The first loss chooses the best checkpoints of `keep`.
      eval_every: steps between evaluations; None for those that are saved.
      early_stop: ends the run, as a finished one, once that first loss has not improved
        for some evaluations. Each step that improves it is saved, and the best one's
        checkpoint is kept. None for that of the run's config, or never.
      writers: take the numbers too (`jaxpar.training.writers`), beside those that the
        run's config names. One that fails is left out, with a warning.
      hooks: functions of (step, metrics, engine), called on every process with the
        numbers of ``metrics.jsonl`` once they are read: the step's when the next one
        has been dispatched, so that the engine is a step ahead, and those of an
        evaluation. One that raises `RunStopped` ends the run.
      recovery: rules for bad numbers and failures; None for the defaults.
      tokens_per_step: of a global batch, for tokens/s.
      profile: the first and the last step to trace, "10:15" or (10, 15), on process 0;
        the trace is written to the run's folder "profile", with a summary of where the
        time went. None for those of the run's config, or none.

    Returns:
      The held-out loss at the last step taken; None without `evaluate`.

    Raises:
      RunStopped: if the run ends early; scripts end with its code.
      ValueError: if `profile` is not of steps of the run, if the optimizer's warm-up
        is longer than that, `eval_every` is below 1, or it or `early_stop` is given
        without `evaluate`, or one that returns no loss.
      TypeError: if an evaluation is not a function, or returns no numbers.
    """
    early_stop = early_stop or run.early_stop
    evaluations = Evaluations(evaluate, eval_every, early_stop)
    keep = early_stop.kept(keep) if early_stop else keep
    _check_warm_up(engine, total_steps or steps)
    profiled = profiled_steps(profile or run.profile, total_steps or steps)
    rules = RunRules(
        steps, save_every, keep, recovery or Recovery(), tuple(hooks), profiled
    )
    loop = RunLoop(engine, data, run, rules, evaluations, tokens_per_step)
    logging = {
        "total_steps": total_steps or steps,
        "tokens_per_step": tokens_per_step,
        "writers": Guarded([*run.writers, *writers]),
        "settings": run.record["config"],
        "console": loop.console,
        "append": True,
    }
    limit = rules.recovery.end_seconds
    # Nothing is written of a trace once another process has the run.
    with (
        _ends_if_replaced(),
        loop.profile,
        StopSignals(limit, lambda why: _note(engine, run, why)) as signals,
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore", SkippedStepWarning)  # The loop reports them.
        start: int | None = loop.begin()
        if profiled and start >= profiled[1]:
            steps_done = f"profile {profiled[0]}:{profiled[1]}: those steps are done"
            loop.console.print(f"{steps_done} already", markup=False)
        while start is not None:
            with MetricsLogger(run.folder, resume_at=start, **logging) as logger:
                start = loop.go_on(start, logger, signals)
        loop.account(show=steps >= (total_steps or steps))
    return evaluations.loss


def _check_warm_up(engine: Engine, steps: int) -> None:
    """Raise if a run ends before its optimizer compresses anything."""
    warm = engine.placement.update.reduction.warm_up()
    if warm and warm >= steps:
        raise ValueError(
            f"steps={steps}: the optimizer exchanges whole gradients for {warm} steps, "
            "so that nothing would be compressed; give it a warm-up of 15 to 20 % of "
            "the run (freeze_step, var_freeze_step), or train for longer."
        )


def _note(engine: Engine, run: Run, why: str) -> None:
    """Write down why this process ends in the middle of a save."""
    if (worker := current()) is not None:
        say_error(worker, why)
    run.note("stopped", engine.steps, why=why, code=SAVE_FAILED)


@contextlib.contextmanager
def _ends_if_replaced() -> Iterator[None]:
    """End the run, without another line written, once another process has it."""
    try:
        yield
    except LeaseLostError as error:
        raise RunStopped(REPLACED, str(error)) from None
