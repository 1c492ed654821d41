"""What is there to learn on a machine with a GPU, in the order of what it tells us?

Made for machines that are lent for minutes. Each call works through a list of items
until its minutes are over, and writes every result at once; the next call, with
--done, goes on where it ended, on the same code and the same kind of GPU.

    python3 benchmarks/gpu_day.py --list
    python3 benchmarks/gpu_day.py --minutes 9 --out first
    python3 benchmarks/gpu_day.py --minutes 9 --out second --done first
    python3 benchmarks/gpu_day.py --dry-run --out dry       # no GPU: all at toy size
    python3 benchmarks/gpu_day.py --wheels                  # what has to be carried

--out then has results.jsonl (a line a result, those of earlier calls first),
summary.txt, artefacts1.tar (programs as compiled, kernels' times, logs),
autotune-*.txt (what XLA chose by timing; XLA_FLAGS can load it without a GPU)
and achieved.toml (rates to propose for jaxpar/compiled/devices). docs/gpu.md says what
each item answers.
"""

import argparse
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.gpu import lines, machine, summary
from benchmarks.gpu.day import Day, go, open_results
from benchmarks.gpu.imports import wheels
from benchmarks.gpu.items import ITEMS, Item, dry_items

NO_GPU = (
    "no GPU here (nvidia-smi finds none): nothing is measured. --dry-run --out DIR "
    "runs every item's path at toy size on the CPU."
)


def parse_arguments(args: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--minutes", type=float, default=9.0, help="until the call ends (default: 9)")
    add("--out", type=Path, help="the folder for what is found; may be empty")
    add("--done", type=Path, help="the --out folder of the call before")
    names = ", ".join(item.name for item in ITEMS)
    add("--only", nargs="+", metavar="ITEM", default=[], help=f"some of: {names}")
    add("--again", action="store_true", help="run what is done once more")
    add("--torch-python", default=sys.executable, help="an interpreter with torch")
    add("--dry-run", action="store_true", help="toy sizes, CPU; needs no GPU")
    add("--list", action="store_true", help="print the items, and what is done")
    add("--wheels", action="store_true", help="print the packages to carry")
    found = parser.parse_args(args)
    unknown = set(found.only) - {item.name for item in ITEMS}
    if unknown:
        parser.error(f"--only {' '.join(sorted(unknown))}: must be among {names}")
    if found.minutes <= 0:
        parser.error(f"--minutes {found.minutes:g}: must be more than 0")
    if found.out is None and not (found.list or found.wheels):
        parser.error("--out DIR is needed: the folder for what is found")
    return found


def main(args: Sequence[str] | None = None) -> int:
    """Measure, list, or name what to carry.

    Returns:
      The exit status: 1 if there is no GPU, or a case of the dry run is not done.
    """
    asked = parse_arguments(args)
    if asked.wheels:
        print(*wheels(), sep="\n")
        return 0
    device = machine.DRY if asked.dry_run else machine.find_gpu()
    every = tuple(dry_items()) if asked.dry_run else ITEMS
    items = [item for item in every if not asked.only or item.name in asked.only]
    if asked.list:
        print(*listed(asked, items, device), sep="\n")
        return 0
    if device is None:
        print(NO_GPU)
        return 1
    # Else the process of a case would go on without the one that reads it.
    signal.signal(signal.SIGTERM, _end)
    day = Day(
        out=asked.out,
        device=device,
        code=machine.digest(),
        commit=machine.commit(),
        minutes=asked.minutes,
        dry=asked.dry_run,
        torch_python=asked.torch_python,
        again=asked.again or asked.dry_run,
    )
    try:
        open_results(day, asked.done)
    except ValueError as error:
        raise SystemExit(str(error)) from None
    print(f"{device.name}, code {day.code}, commit {day.commit}", flush=True)
    go(day, items, lambda text: print(text, flush=True))
    print(*finish(day, items), sep="\n", flush=True)
    return dry_status(day, items) if asked.dry_run else 0


def _end(*_: object) -> NoReturn:
    raise SystemExit("ended by SIGTERM; what was found is written")


def listed(
    asked: argparse.Namespace, items: Sequence[Item], device: machine.Device | None
) -> list[str]:
    """The items: question, minutes, and the cases that are done."""
    folders = [folder for folder in (asked.out, asked.done) if folder is not None]
    known = [line for folder in folders for line in lines.read(folder / lines.FILE)]
    code, name = machine.digest(), device.name if device else None
    found = []
    for item in items:
        minutes = f"{item.minutes:g} min" if item.cases else "not built"
        found.append(f"{item.name} ({minutes}): {item.answers}")
        for case in item.cases:
            ended = {
                key.device: state.settled
                for key, state in lines.states(known).items()
                if (key.item, key.case, key.code) == (item.name, case.name, code)
                and (name is None or key.device == name)
            }
            told = ", ".join(f"{event} on {own}" for own, event in ended.items())
            needs = f", {case.needs_gb:g} GB" if case.needs_gb else ""
            found.append(f"  {case.name} ({case.minutes:g} min{needs}) {told}".rstrip())
    return found


def finish(day: Day, items: Sequence[Item]) -> list[str]:
    """Write and return the summary, and the command for the next call."""
    known = lines.read(day.results)
    found, ended = summary.of_day(known, day.code, day.device.name)
    told = ["", *summary.table(items, found, ended)]
    if not day.dry:  # What a toy takes on a CPU meets no mark.
        told += ["", *summary.verdicts(found)]
    (day.out / "summary.txt").write_text("\n".join(told) + "\n", encoding="utf-8")
    achieved = summary.proposed(found, day.device.name, day.commit)
    if achieved:
        (day.out / "achieved.toml").write_text(achieved, encoding="utf-8")
    if day.dry:
        return told
    settled = {(key.item, key.case) for key, event in ended.items() if event}
    left = [
        (item, case)
        for item in items
        for case in item.cases
        if (item.name, case.name) not in settled
    ]
    if not left:
        return [*told, "", f"The list is done on {day.device.name}."]
    minutes = sum(case.minutes for _, case in left)
    command = "python3 benchmarks/gpu_day.py --minutes 9 --out NEW_FOLDER --done"
    return [
        *told,
        "",
        f"Left: {len(left)} cases, about {minutes:.0f} min; next:",
        f"  {command} {day.out}",
    ]


def dry_status(day: Day, items: Sequence[Item]) -> int:
    """1 if a case of the dry run failed, or was not begun."""
    _, ended = summary.of_day(lines.read(day.results), day.code, day.device.name)
    by_name = {(key.item, key.case): event for key, event in ended.items()}
    wrong = [
        f"{item.name}, {case.name}"
        for item in items
        for case in item.cases
        if by_name.get((item.name, case.name)) not in (lines.DONE, lines.SKIPPED)
    ]
    if wrong:
        print(f"not done: {'; '.join(wrong)}: see artefacts1.tar for their output")
    return bool(wrong)


if __name__ == "__main__":
    raise SystemExit(main())
