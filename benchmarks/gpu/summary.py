"""What has been learned so far: a table, the marks, and rates to propose."""

import collections
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from benchmarks.gpu.items import Item
from benchmarks.gpu.lines import RESULT, Key, states

Found = dict[tuple[str, str], dict[str, dict[str, Any]]]
"""Item and case -> name of a result -> its numbers; the newest counts."""

TOKENS_MARKS = {"124m": 480_000, "1.3b": 50_000}
PEAK_MARK, LOSS_MARK = 0.05, 0.02
WINDOW_CASE, WINDOW_MARK = "window 2048 32768", 5.0
COPY_MARK, OFFLOAD_MARK, HOST_GB_MARK = 50.0, 1.10, 100.0
OPTIMIZER_MARKS = {"fused adamw": 0.9, "fused adamw 8 bits": 0.7}
_SHOWN = {
    "tokens_per_second": "{:,.0f} tokens/s",
    "slowest_round": "slowest {:,.0f}",
    "fastest_round": "fastest {:,.0f}",
    "mfu_causal": "MFU {:.1%} causal",
    "mfu_full": "{:.1%} full",
    "peak_gb": "peak {:.1f} GB",
    "predicted_peak_gb": "predicted {:.1f} GB",
    "peak_error": "{:+.1%}",
    "estimated_step_ms": "estimated {:.1f} ms",
    "step_ms": "step {:.1f} ms",
    "gb_per_second": "{:,.0f} GB/s",
    "each_way_gb_per_second": "{:.1f} GB/s each way",
    "on_host_gb": "{:.1f} GB on the host",
    "of_copy_bandwidth": "{:.0%} of a copy",
    "tflops_per_second": "{:.0f} TFLOP/s",
    "sparse_of_cudnn_forward": "{:.2f} x cuDNN dense forward",
    "sparse_of_cudnn_both": "{:.2f} x both ways",
    "sparse_of_flex_both": "{:.2f} x FlexAttention both ways",
    "passed": "{} passed",
    "failed": "{} failed",
}


def of_day(
    lines: Iterable[Mapping[str, Any]], code: str, device: str
) -> tuple[Found, dict[Key, str]]:
    """Results and states of one code on one device.

    Args:
      lines: of the file of results.
      code: the digest of the sources.
      device: as the driver names it.

    Returns:
      What was found, and how each case ended; "" if it has failed once.
    """
    own = [line for line in lines if (line["code"], line["device"]) == (code, device)]
    found: Found = collections.defaultdict(dict)
    for line in own:
        if line["event"] == RESULT:
            found[line["item"], line["case"]][line["name"]] = line["found"]
    return dict(found), {key: state.settled for key, state in states(own).items()}


def table(
    items: Sequence[Item], found: Found, ended: Mapping[Key, str]
) -> Iterator[str]:
    """A line for each case that has begun, with its numbers below."""
    names = {(key.item, key.case): event for key, event in ended.items()}
    for item in items:
        yield f"{item.name}: {item.answers}"
        if item.not_built:
            yield f"  not built: {item.not_built}"
        for case in item.cases:
            begun = (item.name, case.name) in names
            event = names.get((item.name, case.name), "not begun")
            yield f"  {case.name}: {event or ('to be tried again' if begun else '')}"
            for name, numbers in found.get((item.name, case.name), {}).items():
                told = ", ".join(shown(numbers))
                if told:
                    yield f"    {name}: {told}"


def shown(numbers: Mapping[str, Any]) -> Iterator[str]:
    """The numbers that a table has, with their units."""
    for name, text in _SHOWN.items():
        if name in numbers:
            yield text.format(numbers[name])


def verdicts(found: Found) -> Iterator[str]:
    """Each mark that a result is there for: met or missed, with the numbers."""
    for item, mark in TOKENS_MARKS.items():
        yield from _training_verdicts(found, item, mark)
    for (item, case), results in found.items():
        error = results.get("predicted", {}).get("peak_error")
        if error is not None:
            told = f"{item}, {case}: predicted peak {error:+.1%} of the measured"
            yield verdict(told, abs(error) <= PEAK_MARK, f"within {PEAK_MARK:.0%}")
        tests = results.get("tests")
        if tests is not None:
            told = f"{item}, {case}: {tests['passed']} tests passed"
            yield verdict(told, not tests["failed"], f"{tests['failed']} failed")
        if item == "optimizers":
            yield from _optimizer_verdicts(f"{item}, {case}", results)
    yield from _offload_verdicts(found)
    window = found.get(("window", WINDOW_CASE), {}).get(WINDOW_CASE, {})
    for way in ("forward", "both"):
        ratio = window.get(f"sparse_of_cudnn_{way}")
        if ratio is not None:
            told = f"{WINDOW_CASE}, {way}: {ratio:.2f} x cuDNN's dense attention"
            yield verdict(told, ratio >= WINDOW_MARK, f"{WINDOW_MARK:g} x")


def _training_verdicts(found: Found, item: str, mark: int) -> Iterator[str]:
    def rate(case: str) -> float | None:
        step = found.get((item, case), {}).get("step", {})
        return step.get("tokens_per_second")

    ours = rate("engine")
    if ours is None:
        return
    told = f"{item}: {ours:,.0f} tokens/s"
    yield verdict(told, ours >= mark, f"{mark:,}")
    others = {case: rate(case) for own, case in found if own == item}
    theirs = {
        case: number
        for case, number in others.items()
        if number and not case.startswith("engine")
    }
    for case, number in sorted(theirs.items(), key=lambda each: -each[1]):
        least = 0.99 if case == "by hand" else 1.0
        told = f"{item}: {ours / number:.3f} x {case} ({number:,.0f} tokens/s)"
        yield verdict(told, ours >= least * number, f"{least:g}")
    yield from _loss_verdicts(found, item)


def _loss_verdicts(found: Found, item: str) -> Iterator[str]:
    """Whether contestants have learned as much, each from initial values of its own."""
    losses = {
        case: results["step"]["last_loss"]
        for (own, case), results in found.items()
        if own == item and "last_loss" in results.get("step", {})
    }
    ours = losses.pop("engine", None)
    if ours is None:
        return
    for case, loss in losses.items():
        told = f"{item}: the last loss is {ours:.3f}, of {case} {loss:.3f}"
        yield verdict(
            told, abs(ours / loss - 1) <= LOSS_MARK, f"within {LOSS_MARK:.0%}"
        )


def _offload_verdicts(found: Found) -> Iterator[str]:
    for name, numbers in found.get(("offload", "copies"), {}).items():
        rate = numbers["each_way_gb_per_second"]
        told = f"offload: copies {name} at {rate:.1f} GB/s each way"
        yield verdict(told, rate >= COPY_MARK, f"{COPY_MARK:g} GB/s")
    steps = {
        case: results["step"]
        for (item, case), results in found.items()
        if item == "offload" and "step" in results
    }
    plain = steps.get("1.3b, none")
    for case, step in steps.items():
        if case.startswith("13b"):
            told = (
                f"offload: {case} trains with {step['on_host_gb']:.1f} GB on the host"
            )
            yield verdict(told, step["on_host_gb"] <= HOST_GB_MARK, f"{HOST_GB_MARK:g}")
        elif plain and step is not plain and case.startswith("1.3b"):
            ratio = step["step_ms"] / plain["step_ms"]
            told = f"offload: {case} takes {ratio:.2f} x the step without"
            yield verdict(told, ratio <= OFFLOAD_MARK, f"{OFFLOAD_MARK:.2f}")


def _optimizer_verdicts(
    title: str, results: Mapping[str, Mapping[str, Any]]
) -> Iterator[str]:
    for name, mark in OPTIMIZER_MARKS.items():
        if name in results:
            share = results[name]["of_copy_bandwidth"]
            told = f"{title}: {name} at {share:.0%} of a copy's bandwidth"
            yield verdict(told, share >= mark, f"{mark:.0%}")


def verdict(told: str, is_met: bool, mark: str) -> str:
    """One line."""
    return f"{'met' if is_met else 'MISSED'}: {told} (mark: {mark})"


def proposed(found: Found, device: str, commit: str) -> str:
    """The lines of a device's file that are measured, as TOML; empty without them.

    See `jaxpar/compiled/devices/`: what programs reach of the peak rates.
    """
    rates = found.get(("ceilings", "rates"), {})
    copy = rates.get("copy", {}).get("achieved")
    matmuls = {
        name: numbers["achieved"]
        for name, numbers in rates.items()
        if name.startswith("matmul") and "achieved" in numbers
    }
    if copy is None or not matmuls:
        return ""
    best = max(matmuls, key=matmuls.__getitem__)
    versions = rates.get("machine", {})
    beside = f"benchmarks/gpu_day.py on {device}, jax {versions.get('jax')}"
    of = re.sub(r"[^\w+]", "", commit)[:12]
    return (
        "[memory]\n"
        f"achieved = {copy:.3f}\n"
        f'source = "achieved: a copy of 1 GB, {beside}, commit {of}"\n\n'
        "[peak]\n"
        f"achieved = {matmuls[best]:.3f}\n"
        f'source = "achieved: bf16 {best}, {beside}, commit {of}"\n'
    )
