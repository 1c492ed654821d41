"""Which of some choices is the best compromise for a recipe on a target?"""

import concurrent.futures
import dataclasses
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from jaxpar.planner.plan import Plan
from jaxpar.planner.recipe import plan_recipe
from jaxpar.planner.subprocess import CompilerProcessError, Stopped, call
from jaxpar.planner.targets import Target, parse_target

USUAL = (
    *("zero=0", "zero=1", "zero=2", "zero=3"),
    *("zero=1 mesh.tensor=2", "zero=3 mesh.tensor=2"),
    "zero=1 mesh.pipe=2 accumulate=8",
)
"""What is compared if nothing else is asked for: data parallelism, the ZeRO stages,
tensor parallelism and a pipeline.
"""

CLOSE = 1.05
"""Steps that take at most this many times the shortest count as equally fast."""

_WORD = re.compile(r"[a-z][\w.\-]*=\S+")

_FRAME = " ─│╭╮╰╯"
"""What the command line draws around its messages."""

Report = Callable[[str, Plan | str], None]


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Choices for a recipe on a target, compiled.

    Attributes:
      target: the devices.
      found: what was set -> its plan, or why there is none.
    """

    target: str
    found: Mapping[str, Plan | str]

    @property
    def plans(self) -> dict[str, Plan]:
        """Those that compiled."""
        return {k: x for k, x in self.found.items() if not isinstance(x, str)}

    def best(self) -> tuple[str, str] | None:
        """The best compromise, and why.

        Of the choices that fit, those whose step takes at most `CLOSE` times the
        shortest, and of these the one with the least memory. Where no rates are known
        (CPUs), the one with the least memory.

        Returns:
          (what was set, the reason); None if nothing fits.
        """
        fitting = {k: x for k, x in self.plans.items() if x.fits is not False}
        if not fitting:
            return None
        times = {name: _seconds(plan) for name, plan in fitting.items()}
        if not all(times.values()):
            name = min(fitting, key=lambda x: fitting[x].memory.peak)
            gigabytes = fitting[name].memory.peak / 1e9
            return name, (
                f"it needs the least memory, {gigabytes:.3g} GB; no rates are known of "
                f"{self.target}, so that no step can be estimated"
            )
        shortest = min(times, key=lambda x: times[x])
        close = [x for x in fitting if times[x] <= CLOSE * times[shortest]]
        name = min(close, key=lambda x: fitting[x].memory.peak)
        return name, self._reason(name, shortest, close)

    def _reason(self, name: str, shortest: str, close: Sequence[str]) -> str:
        plans = self.plans
        gigabytes = {x: plan.memory.peak / 1e9 for x, plan in plans.items()}
        if len(close) == 1:
            reason = "of those that fit it is the fastest by more than 5 %"
        else:
            reason = (
                f"{len(close)} that fit take about as long (within 5 %), and of them "
                f"it needs the least memory, {gigabytes[name]:.3g} GB"
            )
            if name != shortest:
                more = gigabytes[shortest] - gigabytes[name]
                reason += f"; the fastest, {shortest}, needs {more:.3g} GB more"
        least = min(plans, key=lambda x: gigabytes[x])
        if gigabytes[least] < 0.95 * gigabytes[name]:
            longer = _seconds(plans[least]) / _seconds(plans[name]) - 1
            less = gigabytes[name] - gigabytes[least]
            reason += f"; {least} needs {less:.3g} GB less, for {longer:.0%} more time"
        return reason


def read_choices(text: str) -> list[str]:
    """Take a list of choices apart.

    Args:
      text: "usual" for `USUAL`; or such as "zero=1; zero=3 mesh.tensor=2", fields of
        the recipe's config and their values.

    Raises:
      ValueError: if there are fewer than two, or one is of another form.
    """
    if text == "usual":
        return list(USUAL)
    choices = [" ".join(part.split()) for part in text.split(";") if part.strip()]
    for choice in choices:
        for word in choice.split():
            if not _WORD.fullmatch(word):
                raise ValueError(
                    f"--compare {text!r}: {word!r} must be a field, an equals sign "
                    "and a value; choices are separated by semicolons, such as "
                    "'zero=1; zero=3 mesh.tensor=2'."
                )
    if len(set(choices)) < 2:
        raise ValueError(
            f"--compare {text!r} must have two different choices or more, separated by "
            "semicolons, such as 'zero=1; zero=3'; or be 'usual'."
        )
    return choices


def compare_recipe(
    path: Path,
    target: str,
    choices: Sequence[str],
    args: Sequence[str] = (),
    *,
    report: Report = lambda choice, found: None,
) -> Comparison:
    """Compile a recipe's step for each of some choices.

    Args:
      path: the recipe.
      target: the devices.
      choices: of `read_choices`.
      args: the recipe's own flags, for all of them.
      report: called with each choice as it is compiled.

    Returns:
      The plans, in the order of the choices.
    """
    goal = parse_target(target)
    jobs = min(4, os.cpu_count() or 1)
    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        running = {
            choice: pool.submit(_plan, path, goal, choice, args) for choice in choices
        }
        found = {}
        for choice, future in running.items():
            found[choice] = future.result()
            report(choice, found[choice])
    return Comparison(goal.name, found)


def _plan(path: Path, target: Target, choice: str, args: Sequence[str]) -> Plan | str:
    """A choice's plan; or why there is none."""
    own = [x for word in choice.split() for x in flags_of(word)]
    how = f"{plan_recipe.__module__}:{plan_recipe.__name__}"

    given = path, target.name, (*args, *own)
    try:
        answer = call(how, *given, what=f"{path.name} with {choice}")
    except (ValueError, CompilerProcessError) as error:
        return str(error)
    if isinstance(answer, Stopped):  # The flags are not the recipe's.
        return _reason(answer.err.strip() or answer.out)
    return answer


def flags_of(word: str) -> list[str]:
    """A recipe's flags for a word of a choice.

    Example:
      >>> flags_of("mesh.data=8"), flags_of("secondary=True"), flags_of("a.b=False")
      (['--mesh.data', '8'], ['--secondary'], ['--a.no-b'])
    """
    key, _, value = word.partition("=")
    if value == "True":
        return [f"--{key}"]
    if value == "False":
        part, dot, last = key.rpartition(".")
        return [f"--{part}{dot}no-{last}"]
    return [f"--{key}", value]


def _reason(printed: str) -> str:
    """The first line that names a value, without the frame drawn around it."""
    lines = [line.strip(_FRAME) for line in printed.splitlines()]
    return next((line for line in lines if ": " in line), printed)


def _seconds(plan: Plan) -> float:
    return plan.estimate.step_seconds if plan.estimate else 0.0
