"""When is a run evaluated, under which names, and have its losses stopped falling?"""

import functools
import numbers
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from jaxpar.checkpoint.processes import from_first
from jaxpar.engine.engine import Engine
from jaxpar.training.early_stop import EarlyStop, Standing
from jaxpar.training.run import Run, mean_loss
from jaxpar.types import Batch

Evaluation = Callable[[], float | Mapping[str, float]]
"""Returns a loss, or numbers by name; called by every process."""


class Evaluations:
    """Runs a run's evaluations, and names their numbers.

    One evaluation gives ``eval/loss``, or ``eval/<number>`` if it returns several;
    evaluations by name give ``eval/<name>/loss`` or ``eval/<name>/<number>``.

    Args:
      given: an evaluation, or several by name; None for none.
      every: steps between them; None for those that are saved.
      early_stop: when they end the run; None for never.

    Attributes:
      loss: of the last `run`: the first number that is called loss; None before, and
        where none is.
      early_stop: as given.

    Example:
      >>> given = {"code": lambda: 1.5, "text": lambda: {"bleu": 0.25}}
      >>> both = Evaluations(given, None)
      >>> both.run()
      {'eval/code/loss': 1.5, 'eval/text/bleu': 0.25}
      >>> both.loss
      1.5
    """

    def __init__(
        self,
        given: Evaluation | Mapping[str, Evaluation] | None,
        every: int | None,
        early_stop: EarlyStop | None = None,
    ):
        if early_stop is not None and given is None:
            raise ValueError(
                f"patience={early_stop.patience} needs evaluate=, a function that "
                "returns a loss."
            )
        if every is not None and every < 1:
            raise ValueError(
                f"eval_every={every} must be at least 1; None evaluates what is saved."
            )
        if every is not None and given is None:
            raise ValueError(
                f"eval_every={every} needs evaluate=, a function that returns a loss."
            )
        by_name = given if isinstance(given, Mapping) else {"": given} if given else {}
        wrong = [name for name, each in by_name.items() if not callable(each)]
        if wrong:
            kind = type(by_name[wrong[0]]).__name__
            named = f"evaluate[{wrong[0]!r}]" if wrong[0] else "evaluate"
            raise TypeError(
                f"{named} is {kind}, but an evaluation must be a function without "
                "arguments."
            )
        self._evaluations, self._every = by_name, every
        self.loss: float | None = None
        self.early_stop = early_stop
        self._loss_name: str | None = None
        self._past: dict[int, Mapping[str, float]] = {}

    def __bool__(self) -> bool:
        return bool(self._evaluations)

    def is_due(self, step: int, *, is_saved: bool, is_last: bool) -> bool:
        """Whether to evaluate after a step."""
        if not self:
            return False
        return is_last or (is_saved if self._every is None else step % self._every == 0)

    def run(self) -> dict[str, float]:
        """Evaluate.

        Returns:
          Name -> number.

        Raises:
          TypeError: if an evaluation returns something else.
          ValueError: if there is no loss that could stop the run early.
        """
        found = {}
        for name, evaluate in self._evaluations.items():
            for key, value in _named(name, evaluate()).items():
                if (
                    not isinstance(value, numbers.Real)
                    and getattr(value, "shape", None) != ()
                ):
                    raise TypeError(
                        f"evaluate: {key} is {type(value).__name__}, but an evaluation "
                        "returns a number, or a dict of numbers."
                    )
                found[key] = float(value)
        losses = (name for name in found if name.rpartition("/")[2] == "loss")
        self._loss_name = next(losses, None)
        self.loss = found.get(self._loss_name or "")
        if self.early_stop and self.loss is None:
            raise ValueError(
                f"patience={self.early_stop.patience} needs a number called loss, but "
                f"evaluate returns {', '.join(found)}; return the loss too."
            )
        return found

    def recall(self, run: Run, step: int) -> None:
        """Remember what a run has logged up to a step, and nothing else."""
        if self.early_stop:
            self._past = dict(run.evaluated_until(step))

    def remember(self, step: int, numbers: Mapping[str, float]) -> None:
        """Remember an evaluation that is logged, as process 0 has it."""
        if self.early_stop and self._loss_name in numbers:
            self._past[step] = from_first(lambda: dict(numbers))

    def lacks(self, step: int) -> bool:
        """Whether an evaluation that an early stop goes by is missing."""
        return self.early_stop is not None and step not in self._past

    def standing(self) -> Standing:
        """How the losses stand; without a rule for an early stop, none does."""
        name, rule = self._loss_name, self.early_stop
        if rule is None or name is None:
            return Standing(None, 0)
        return rule.standing({at: x[name] for at, x in self._past.items() if name in x})

    @property
    def is_improved(self) -> bool:
        """Whether the last one is the best, and an early stop must keep it."""
        return self.standing().best_step == max(self._past, default=-1)

    @property
    def is_over(self) -> bool:
        """Whether the run ends early."""
        rule = self.early_stop
        return rule is not None and self.standing().since >= rule.patience


def _named(name: str, value: Any) -> dict[str, Any]:
    parts = value if isinstance(value, Mapping) else {"loss": value}
    prefix = f"eval/{name}/" if name else "eval/"
    return {f"{prefix}{key}": x for key, x in parts.items()}


def mean_losses(
    engine: Engine, sets: Mapping[str, Iterable[Batch]]
) -> dict[str, Evaluation]:
    """Make the evaluations of several held-out sets, for `jaxpar.train`.

    Args:
      engine: the engine.
      sets: name -> batches, as `jaxpar.mean_loss` takes them. The name "" is that of
        the set whose loss is ``eval/loss``; the others' are ``eval/<name>/loss``.
    """
    return {
        name: functools.partial(mean_loss, engine, batches)
        for name, batches in sets.items()
    }


def describe(found: Mapping[str, float]) -> str:
    """Numbers as text.

    Example:
      >>> describe({"eval/loss": 1.5})
      '1.500000'
      >>> describe({"eval/code/loss": 1.5, "eval/code/hits": 3})
      'code/loss 1.500000, code/hits 3.000000'
    """
    if list(found) == ["eval/loss"]:
        return f"{found['eval/loss']:.6f}"
    return ", ".join(f"{k.removeprefix('eval/')} {x:.6f}" for k, x in found.items())
