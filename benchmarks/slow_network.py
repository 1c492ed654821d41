"""How much faster is a step on a slow network, if gradients are compressed?

Two and four processes, each on a host of its own: a network namespace with one link to
a switch, whose rate `tc` limits both ways. They train an MLP of 8.4 million parameters
on CPUs by jaxpar at ZeRO 0, with gloo between them: plain Adam, gradients in 8 and in 4
bits, and 1-bit Adam in its compressed phase. All engines are made once; then they take
their turns in every round, at every rate, while the rate changes under the processes.

Printed are the median of a step's seconds (and its smallest and largest turn), how many
times plain's speed that is, and the bytes that a host's link counted. A fit, seconds =
compute + bytes / bandwidth, says from which bandwidth on plain Adam is faster. The
mark: on the slowest link 1-bit Adam is three times as fast as plain Adam.

Needs Linux and root, for namespaces and tc; without them it ends with code 2 before it
starts anything. Takes 5 to 10 minutes on two cores.

    python benchmarks/slow_network.py
    python benchmarks/slow_network.py --toy                  # seconds, no numbers
    python benchmarks/slow_network.py --processes 2 --megabits 50 200 --no-write

Another technique is another line in benchmarks/network/techniques.py.
"""

import dataclasses
import math
import os
import signal
import statistics
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import jax
from rich.console import Console
from rich.table import Table

from benchmarks.network.fit import Fit, crossover, fit
from benchmarks.network.group import Group, Turn
from benchmarks.network.hosts import Network, NetworkError, check_possible
from benchmarks.network.techniques import ONE_BIT, PLAIN, TECHNIQUES, WARM_STEPS
from benchmarks.record import write_result
from jaxpar.cli.recipe_flags import parse
from jaxpar.progress import counting, waiting

MARK = 3.0
"""Times plain's speed that 1-bit Adam should have on the slowest link."""


@dataclasses.dataclass(frozen=True)
class Config:
    """What to measure."""

    processes: tuple[int, ...] = (2, 4)
    """Hosts, of one process and one CPU device each."""
    megabits: tuple[float, ...] = (100.0, 1000.0)
    """Rates of the links, 10^6 bits a second; links without a limit are added."""
    rounds: int = 5
    """Turns of each technique at each rate; the median counts."""
    steps: int = 2
    """Timed steps a turn, behind one that is not."""
    width: int = 1024
    """Of the MLP's layers."""
    layers: int = 8
    """Of the MLP; it has so many times width^2 parameters."""
    rows: int = 8
    """Of each process, in a step."""
    only: str = ""
    """Techniques whose names contain this, beside plain Adam; empty: all."""
    toy: bool = False
    """Two processes, 100 Mb/s, a small model, two rounds; nothing is written."""
    write: bool = True
    """Write benchmarks/results/slow_network.json."""


TOY = Config((2,), (100.0,), rounds=2, steps=1, layers=2, toy=True, write=False)

Rates = dict[float, list[Turn]]
"""Rate of the links, infinite for no limit -> turns."""


def check(config: Config) -> None:
    """Raise ValueError for numbers that nothing can be measured with."""
    for name in ("rounds", "steps", "width", "layers", "rows"):
        if getattr(config, name) < 1:
            raise ValueError(f"--{name} {getattr(config, name)} must be at least 1.")
    if not config.megabits or min(config.megabits) <= 0:
        raise ValueError(f"--megabits {config.megabits} must be rates above 0.")
    if not config.processes or not all(2 <= n <= 200 for n in config.processes):
        raise ValueError(f"--processes {config.processes} must be from 2 to 200.")
    if not any(config.only in name for name in TECHNIQUES):
        names = ", ".join(map(repr, TECHNIQUES))
        raise ValueError(f"--only {config.only!r} must be in one of {names}.")


def measure(config: Config, num_hosts: int) -> dict[str, Rates]:
    """Time all techniques in turns, on so many hosts: by technique."""
    names = [name for name in TECHNIQUES if config.only in name or name == PLAIN]
    rates = [*config.megabits, math.inf]
    found: dict[str, Rates] = {name: {rate: [] for rate in rates} for name in names}
    model = {"width": config.width, "layers": config.layers, "rows": config.rows}
    with Network(num_hosts) as network:
        with waiting(f"starting {num_hosts} processes"):
            group = Group(network, **model)
        with group:
            for name in names:
                with waiting(f"{num_hosts} processes compile {name}"):
                    group.take(name, WARM_STEPS, TECHNIQUES[name].steps(1))
            what, total = f"rounds of {num_hosts} processes", config.rounds * len(rates)
            with counting(what, total) as advance:
                for _ in range(config.rounds):
                    for rate in rates:
                        network.limit(None if math.isinf(rate) else rate)
                        for name in names:
                            steps = TECHNIQUES[name].steps
                            turn = group.take(name, steps(1), steps(config.steps))
                            found[name][rate].append(turn)
                        advance(1)
    return found


def median(turns: list[Turn]) -> float:
    """Seconds of a step."""
    return statistics.median(turn.seconds for turn in turns)


def sent(turns: list[Turn]) -> float:
    """Bytes that a host sent in a step."""
    return statistics.median(turn.sent for turn in turns)


def fits(found: dict[str, Rates]) -> dict[str, Fit]:
    """By technique."""
    return {
        name: fit({rate: median(turns) for rate, turns in rates.items()})
        for name, rates in found.items()
    }


def rate_text(megabits: float) -> str:
    """A rate with its unit."""
    if math.isinf(megabits):
        return "no limit"
    return f"{megabits:g} Mb/s" if megabits < 1000 else f"{megabits / 1000:.3g} Gb/s"


def show(console: Console, num_hosts: int, found: dict[str, Rates]) -> None:
    """Print a table of seconds, and one of fits."""
    rates = list(found[PLAIN])
    columns = [column for rate in rates for column in (rate_text(rate), "x plain")]
    table = Table(f"{num_hosts} processes: s", "MB sent", *columns)
    fitted = Table(
        f"{num_hosts} processes, fitted",
        *("compute, s", "MB", "largest error", "plain is faster from"),
    )
    by_name = fits(found)
    for name, of_rates in found.items():
        cells = []
        for rate, turns in of_rates.items():
            taken = sorted(turn.seconds for turn in turns)
            spread = f"({taken[0]:.3f}-{taken[-1]:.3f})"
            ratio = median(found[PLAIN][rate]) / median(turns)
            cells += [f"{median(turns):.3f} {spread}", f"{ratio:.2f}"]
        table.add_row(name, f"{sent(of_rates[rates[0]]) / 1e6:.2f}", *cells)
        own, since = by_name[name], crossover(by_name[PLAIN], by_name[name])
        where = "never" if math.isinf(since) else rate_text(round(since))
        numbers = f"{own.compute:.3f}", f"{own.sent / 1e6:.2f}", f"{own.error:.1%}"
        fitted.add_row(name, *numbers, "" if name == PLAIN else where)
    console.print(table)
    console.print(fitted)


def verdict(found: dict[str, Rates], num_hosts: int) -> str:
    """Whether 1-bit Adam reaches the mark on the slowest link, in a line."""
    slowest = min(found[PLAIN])
    ratio = median(found[PLAIN][slowest]) / median(found[ONE_BIT][slowest])
    said = "reached" if ratio >= MARK else "MISSED"
    return (
        f"{num_hosts} processes, {rate_text(slowest)}: {ONE_BIT} has {ratio:.2f} x "
        f"plain's speed (mark {MARK:g} x: {said})"
    )


def as_json(found: dict[str, Rates]) -> dict[str, Any]:
    """What is recorded of a number of processes."""
    by_name = fits(found)
    return {
        name: {
            "seconds": {
                rate_text(rate): [turn.seconds for turn in turns]
                for rate, turns in rates.items()
            },
            "median_seconds": {rate_text(r): median(t) for r, t in rates.items()},
            "sent_bytes": {rate_text(r): sent(t) for r, t in rates.items()},
            "fit": dataclasses.asdict(by_name[name]),
            "plain_is_faster_from_megabits": (
                since
                if math.isfinite(since := crossover(by_name[PLAIN], by_name[name]))
                else None
            ),
        }
        for name, rates in found.items()
    }


def main(config: Config) -> None:
    """Measure, print and write."""
    if config.toy:
        config = dataclasses.replace(TOY, only=config.only)
    try:
        check(config)
        check_possible()
    except (ValueError, NetworkError) as error:
        print(f"slow_network.py: {error} Nothing was started.", file=sys.stderr)
        raise SystemExit(2) from None
    # So that the hosts are removed.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    jax.config.update("jax_platforms", "cpu")
    console = Console(width=150, highlight=False)
    load = os.getloadavg()[0]
    console.print(f"load of this machine before: {load:.1f} on {os.cpu_count()} cores")
    measured, verdicts = {}, []
    for num_hosts in config.processes:
        found = measure(config, num_hosts)
        show(console, num_hosts, found)
        measured[f"{num_hosts} processes"] = as_json(found)
        if ONE_BIT in found:
            verdicts.append(verdict(found, num_hosts))
    console.print("fit: seconds = compute + bytes / bandwidth, by least squares of")
    console.print("relative errors of the medians; no limit is an infinite bandwidth")
    console.print("\n".join(verdicts))
    if config.write:
        settings = dataclasses.asdict(config)
        measured |= {"config": settings, "load_before": load, "mark": verdicts}
        console.print(f"written: {write_result('slow_network', measured).name}")


if __name__ == "__main__":
    main(parse(Config, __doc__))
