"""What is said of a run: how it stands, its numbers, its settings, its plan."""

import dataclasses
import math
import shlex
from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxpar.planner.sections import quantity
from jaxpar.show.quantities import duration, moment, number
from jaxpar.show.run_data import PLAN, RunData
from jaxpar.show.series import Series, smooth
from jaxpar.training import goodput

SILENT_SECONDS = 600.0
"""A run that has written nothing for so long is taken for dead."""
NOTHING = Series(np.empty(0), np.empty(0))


@dataclasses.dataclass(frozen=True)
class State:
    """How a run stands.

    Attributes:
      word: "finished", "running", "stopped", "ended early", "no sign of life", or "not
        started".
      why: what is known of it.
      is_good: whether that is good news; None for neither.
    """

    word: str
    why: str = ""
    is_good: bool | None = None


def state_of(run: RunData, now: float) -> State:
    """Say how a run stood at a time, in seconds since 1970."""
    total, last = run.total_steps, run.last_step
    if total is not None and last >= total:
        return State("finished", is_good=True)
    account = run.accounts[-1] if run.accounts else {}
    stop = next((e for e in reversed(run.events) if e.get("event") == "stopped"), None)
    if stop and _time(stop.get("time")) >= _time(account.get("began")):
        code = f" (exit code {stop['code']})" if "code" in stop else ""
        return State("stopped", f"{stop.get('why', '')}{code}", is_good=False)
    if "end" in _seconds(account):
        return State("ended early", f"the program returned at step {last:,}")
    written = max(_time(account.get("ended")), _last(run.series.get("time", NOTHING)))
    if not written:
        return State("not started", "nothing has been logged")
    if now - written < SILENT_SECONDS:
        return State("running", f"last written {duration(max(now - written, 0))} ago")
    return State(
        "no sign of life",
        f"nothing written since {moment(written)} UTC, and no reason recorded: killed, "
        "or it runs elsewhere and writes to another disk",
        is_good=False,
    )


def headline_facts(run: RunData) -> dict[str, str]:
    """The numbers to know first; those that are known."""
    facts: dict[str, str] = {}
    of = f"step of {run.total_steps:,}" if run.total_steps else "step"
    facts[of] = f"{run.last_step:,}"
    loss = smooth(run.series.get("train/loss", NOTHING)).finite()
    if len(loss):
        facts["train loss"] = f"{loss.values[-1]:.4f}"
    heldout = run.series.get("eval/loss", NOTHING).finite()
    if len(heldout):
        facts["held-out loss"] = f"{heldout.values[-1]:.4f}"
        best = int(heldout.values.argmin())
        if best < len(heldout) - 1:
            at = f"best, step {heldout.steps[best]:,.0f}"
            facts[at] = f"{heldout.values[best]:.4f}"
    tokens = median(run.series.get("perf/tokens_per_second"))
    if tokens is not None:
        facts["tokens/s"] = f"{tokens:,.0f}"
    mfu = median(run.series.get("perf/mfu"))
    if mfu is not None:
        facts["MFU"] = f"{mfu:.1%}"
    step = median(step_seconds(run)[0])
    if step is not None:
        facts["step time"] = quantity(step, "s")
    memory = highest(run, "perf/memory_gb", "workers/memory_gb_max")
    if memory is not None:
        facts["memory"] = f"{memory:.3g} GB"
    sums = goodput_sums(run)
    if sums:
        facts["goodput"] = f"{sums.get('step', 0.0) / sum(sums.values()):.1%}"
        facts["time"] = duration(sum(sums.values()))
    return facts


def median(series: Series | None) -> float | None:
    """The median of finite values; None without any."""
    values = NOTHING.values if series is None else series.finite().values
    return float(np.median(values)) if len(values) else None


def highest(run: RunData, *names: str) -> float | None:
    """The highest finite value of several metrics; None without any."""
    found = [run.series[name].finite().values for name in names if name in run.series]
    return max((float(each.max()) for each in found if len(each)), default=None)


def step_seconds(run: RunData) -> tuple[Series, bool]:
    """Seconds of a step, and whether they were measured.

    Logs of earlier versions have no step times: the time between two records is
    divided by the steps between them, and contains saves and evaluations.
    """
    if "perf/step_seconds" in run.series:
        return run.series["perf/step_seconds"], True
    times = run.series.get("time", NOTHING)
    # The first step after a start follows the last one of the start before.
    steps, between = times.steps[1:], times.steps[1:] - times.steps[:-1]
    passed = (times.values[1:] - times.values[:-1]) / np.maximum(between, 1)
    starts = np.isin(times.steps[:-1], run.resumed)
    return Series(steps[~starts], passed[~starts]), False


def goodput_sums(run: RunData) -> dict[str, float]:
    """Seconds of each kind over all starts; empty where they are not known."""
    try:
        sums = goodput.total(run.accounts)
    except (KeyError, TypeError, ValueError, AttributeError):
        return {}
    known = {kind: spent for kind, spent in sums.items() if 0 < spent < math.inf}
    ordered = [*(k for k in goodput.WORDS if k in known), *sorted(known)]
    return {kind: known[kind] for kind in dict.fromkeys(ordered)}


def settings(run: RunData) -> dict[str, str]:
    """Config, identity, versions, command and commit: name -> value, as text."""
    found: dict[str, Any] = dict(_flat(run.config))
    for part in ("identity", "versions"):
        given = run.record.get(part)
        found |= _flat(given if isinstance(given, dict) else {}, prefix=f"{part}.")
    command = run.record.get("command")
    if isinstance(command, list):
        found["command"] = shlex.join(map(str, command))
    if run.record.get("commit"):
        found["commit"] = run.record["commit"]
    return {name: as_text(value) for name, value in found.items()}


def as_text(value: Any) -> str:
    """A value of JSON as people write it."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, list):
        return ", ".join(map(as_text, value)) or "none"
    if isinstance(value, dict):
        return ", ".join(f"{name} {as_text(each)}" for name, each in value.items())
    return str(value)


def plan_rows(run: RunData) -> list[tuple[str, str, str, str]]:
    """(what, planned, measured, measured over planned), where there is a plan."""
    if run.plan is None:
        return []
    estimate, memory = run.plan.get("estimate"), run.plan.get("bytes_per_device")
    planned = {
        **(estimate if isinstance(estimate, dict) else {}),
        "peak": memory.get("peak") if isinstance(memory, dict) else None,
    }
    gigabytes = highest(run, "perf/memory_gb", "workers/memory_gb_max")
    pairs = (
        ("step time", "step_seconds", median(step_seconds(run)[0]), "s"),
        ("tokens/s", "tokens_per_second", _rate(run, "tokens_per_second"), ""),
        ("MFU", "mfu", _rate(run, "mfu"), "%"),
        ("memory of a device", "peak", gigabytes and gigabytes * 1e9, "B"),
    )
    rows = []
    for name, key, measured, unit in pairs:
        value = planned.get(key)
        wanted = float(value) if isinstance(value, int | float) else None
        ratio = f"{measured / wanted:,.3g}" if measured and wanted else "-"
        rows.append((name, _written(wanted, unit), _written(measured, unit), ratio))
    return rows


def plan_command(run: RunData) -> str:
    """The command that writes a plan for this run."""
    command = run.record.get("command")
    recipe, *flags = map(str, command) if isinstance(command, list) and command else "R"
    recipe = "RECIPE" if recipe == "R" else recipe
    target = f"--target TARGET --json {shlex.quote(str(run.folder / PLAN))}"
    after = f" -- {shlex.join(flags)}" if flags else ""
    return f"jaxpar plan {shlex.quote(recipe)} {target}{after}"


def _rate(run: RunData, name: str) -> float | None:
    return median(run.series.get(f"perf/{name}"))


def _written(value: float | None, unit: str) -> str:
    if value is None or not math.isfinite(value):
        return "-"
    if unit == "%":
        return f"{value:.1%}"
    return quantity(value, unit) if unit else number(value)


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings as "recovery.spike"."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, dict) and value:
            found |= _flat(value, f"{prefix}{name}.")
        else:
            found[f"{prefix}{name}"] = value
    return found


def _time(value: Any) -> float:
    return float(value) if isinstance(value, int | float) else 0.0


def _last(series: Series) -> float:
    return float(series.values[-1]) if len(series) else 0.0


def _seconds(account: Mapping[str, Any]) -> Mapping[str, Any]:
    found = account.get("seconds")
    return found if isinstance(found, dict) else {}
