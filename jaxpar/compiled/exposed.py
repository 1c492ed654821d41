"""Which communication does a scheduled GPU program wait for: what is exposed.

The schedule is followed in the order of its lines. Kernels run one after the other; a
collective is sent from its start on, and its done waits for what is left of it. Nothing
between the two depends on the collective, so all kernels there hide it. Each kind of
link carries one collective at a time: two that are in flight at once wait for each
other, and the same kernels hide only one of them at a time.

Limits: rates are those of large transfers, without a latency, so small collectives look
too cheap. Collectives slow down none of the kernels beside them. Sends and receives of
XLA's own pipelining, and slices that XLA copies beside the kernels (asynchronous
fusions) take no time and hide nothing. Copies between the device and its host are timed
as collectives are, each direction a link of its own.
"""

import collections
import dataclasses
from collections.abc import Iterable, Mapping

from jaxpar.compiled.collectives import Site, find_sites
from jaxpar.compiled.hlo import Computation, Instruction, Module, trip_count
from jaxpar.compiled.host_copies import find_host_copies
from jaxpar.compiled.kernel_time import Rates, kernel_seconds
from jaxpar.compiled.link_rates import LinkRates
from jaxpar.compiled.memory_traffic import is_free
from jaxpar.jaxprs.branches import fractions_in

_Lag = tuple[tuple[str, float], ...]
"""(link, seconds from now until it is free), for the links that are not."""

_SYNC = '"is_sync":true'

_BESIDE = ("send", "recv")

_SAME = 1e-12
"""Lags of less than a picosecond are rounding errors."""


@dataclasses.dataclass(frozen=True)
class Waited:
    """One collective instruction, over all its runs in a step.

    Attributes:
      name: of the instruction.
      kind: such as "all-gather".
      axes: the mesh axes that its groups span.
      count: how often it runs.
      is_sync: whether the kernels wait from its start to its end.
      sent_bytes: bytes that one device sends.
      wire_seconds: time to send them.
      exposed_seconds: time that the kernels wait for it; also for collectives before it
        on the same link.
    """

    name: str
    kind: str
    axes: tuple[str, ...]
    count: int
    is_sync: bool
    sent_bytes: int
    wire_seconds: float
    exposed_seconds: float


@dataclasses.dataclass(frozen=True)
class Exposed:
    """Collectives of one kind over one set of axes.

    Attributes:
      kind: such as "all-gather".
      axes: mesh axes.
      count: how often they run in a step.
      num_sync: how many of these are synchronous.
      sent_bytes: bytes that one device sends.
      wire_seconds: time to send them.
      exposed_seconds: time that the kernels wait for them.
    """

    kind: str
    axes: tuple[str, ...]
    count: int
    num_sync: int
    sent_bytes: int
    wire_seconds: float
    exposed_seconds: float


@dataclasses.dataclass(frozen=True)
class Communication:
    """The time of a program's collectives, as scheduled, on one device.

    Attributes:
      kernel_seconds: time of the kernels.
      collectives: the collectives, most exposed first.
      devices_per_host: devices that were taken to share a host.
    """

    kernel_seconds: float
    collectives: tuple[Waited, ...]
    devices_per_host: int = 1

    @property
    def wire_seconds(self) -> float:
        """Time to send everything, one collective after the other."""
        return sum((each.wire_seconds for each in self.collectives), 0.0)

    @property
    def exposed_seconds(self) -> float:
        """Time that the kernels wait for collectives."""
        return sum((each.exposed_seconds for each in self.collectives), 0.0)

    @property
    def by_kind(self) -> tuple[Exposed, ...]:
        """The collectives summed by kind and axes, most exposed first."""
        alike = collections.defaultdict(list)
        for each in self.collectives:
            alike[each.kind, each.axes].append(each)
        rows = [
            Exposed(
                *key,
                count=sum(each.count for each in found),
                num_sync=sum(each.count for each in found if each.is_sync),
                sent_bytes=sum(each.sent_bytes for each in found),
                wire_seconds=sum(each.wire_seconds for each in found),
                exposed_seconds=sum(each.exposed_seconds for each in found),
            )
            for key, found in alike.items()
        ]
        return tuple(sorted(rows, key=lambda row: -row.exposed_seconds))


def read_communication(module: Module, rates: Rates, links: LinkRates) -> Communication:
    """Time the collectives of a scheduled GPU program.

    A loop counts as often as its trip count says, once where it is unknown. A
    conditional takes the time of its longest branch; each branch's own collectives are
    exposed as often as `Module.taken_by` says.

    Args:
      module: the program, its instructions in scheduled order.
      rates: of the device.
      links: the links of the mesh.

    Returns:
      What is exposed.
    """
    # Weighted by `taken`, what runs less than half a time would not be found.
    whole = dataclasses.replace(module, taken=1.0)
    sites = [*find_sites(whole, links.sizes)[0], *find_host_copies(whole)]
    timer = _Timer(module, rates, links, sites)
    found = timer.run(module.entry, ())
    counted = [*find_sites(module, links.sizes)[0], *find_host_copies(module)]
    counts = {site.instruction.name: site.times for site in counted}
    rows = [timer.row(site, counts, found.waits) for site in timer.sites.values()]
    return Communication(
        kernel_seconds=found.kernels,
        collectives=tuple(sorted(rows, key=lambda each: -each.exposed_seconds)),
        devices_per_host=links.devices_per_host,
    )


def join_communication(parts: Iterable[Communication]) -> Communication:
    """Sum the programs of one step, which run one after the other."""
    every = list(parts)
    rows = [each for part in every for each in part.collectives]
    return Communication(
        kernel_seconds=sum(part.kernel_seconds for part in every),
        collectives=tuple(sorted(rows, key=lambda each: -each.exposed_seconds)),
        devices_per_host=max(part.devices_per_host for part in every),
    )


@dataclasses.dataclass(frozen=True)
class _Pass:
    """One run of a computation.

    Attributes:
      seconds: from its first kernel to its last, waits included.
      kernels: of these, kernels.
      waits: collective -> seconds that the kernels waited for it.
    """

    seconds: float
    kernels: float
    waits: Mapping[str, float]


class _Clock:
    """The time within one run of a computation, and when its links are free."""

    def __init__(self, lag: _Lag):
        self.now, self.kernels = 0.0, 0.0
        self.free: dict[str, float] = dict(lag)
        self.ends: dict[str, tuple[str, float]] = {}
        self.waits: dict[str, float] = collections.defaultdict(float)

    @property
    def lag(self) -> _Lag:
        left = ((link, end - self.now) for link, end in self.free.items())
        return tuple(sorted((link, s) for link, s in left if s > _SAME))

    def send(self, link: str, seconds: float) -> float:
        """Send on a link, after what is on it; return the time of the end."""
        self.free[link] = max(self.now, self.free.get(link, 0.0)) + seconds
        return self.free[link]

    def wait(self, name: str, end: float) -> None:
        """Wait for a collective."""
        self.waits[name] += max(0.0, end - self.now)
        self.now = max(self.now, end)

    def add(self, found: _Pass, times: float = 1) -> None:
        """Let runs of another computation pass."""
        self.now += times * found.seconds
        self.kernels += times * found.kernels
        for name, seconds in found.waits.items():
            self.waits[name] += times * seconds


def _is_kernel(instruction: Instruction) -> bool:
    """Whether an instruction takes the time of kernels."""
    beside = instruction.opcode.endswith("-start") or instruction.opcode in _BESIDE
    return not is_free(instruction) and not beside


class _Timer:
    """Runs the computations of a program on paper.

    Args:
      module: the program.
      rates: of the device.
      links: of the mesh.
      sites: the program's collectives.

    Attributes:
      sites: name of a collective -> itself.
      in_background: names of those that kernels run beside.
    """

    def __init__(
        self, module: Module, rates: Rates, links: LinkRates, sites: Iterable[Site]
    ):
        self.module, self.rates, self.links = module, rates, links
        self.sites = {site.instruction.name: site for site in sites}
        self.in_background: set[str] = set()
        self._known: dict[tuple[str, _Lag], _Pass] = {}

    def wire_seconds(self, site: Site) -> float:
        """Time to send one run of a collective."""
        return site.sent_bytes / self.links.rate(site.axes)

    def row(
        self, site: Site, counts: Mapping[str, int], waits: Mapping[str, float]
    ) -> Waited:
        """What was found of a collective."""
        name = site.instruction.name
        count = counts.get(name, 0)
        return Waited(
            name=name,
            kind=site.kind,
            axes=site.axes,
            count=count,
            is_sync=name not in self.in_background,
            sent_bytes=count * site.sent_bytes,
            wire_seconds=count * self.wire_seconds(site),
            exposed_seconds=waits.get(name, 0.0),
        )

    def run(self, computation: Computation, lag: _Lag) -> _Pass:
        """Run a computation once, its links busy at the start as `lag` says."""
        key = computation.name, lag
        if key not in self._known:
            clock = _Clock(lag)
            for instruction in computation.instructions.values():
                self._step(instruction, computation, clock)
            for name, end in clock.ends.values():  # Done outside, if anywhere.
                clock.wait(name, end)
            self._known[key] = _Pass(clock.now, clock.kernels, dict(clock.waits))
        return self._known[key]

    def _step(
        self, instruction: Instruction, around: Computation, clock: _Clock
    ) -> None:
        site = self._site(instruction)
        ended = [name for name in instruction.operands if name in clock.ends]
        if site is not None:
            self._send(instruction, site, clock)
        elif instruction.opcode.endswith("-done"):
            for name in ended:
                clock.wait(*clock.ends.pop(name))
        elif instruction.opcode == "async-update" and ended:
            clock.ends[instruction.name] = clock.ends.pop(ended[0])
        elif instruction.opcode == "while":
            self._loop(instruction, around, clock)
        elif instruction.opcode == "conditional":
            self._branch(instruction, clock)
        elif instruction.opcode == "call":
            clock.add(self._called(instruction, clock)[0])
        elif _is_kernel(instruction):
            run = kernel_seconds(instruction, around, self.module, self.rates)
            clock.add(_Pass(run, run, {}))

    def _site(self, instruction: Instruction) -> Site | None:
        """The collective that an instruction starts, itself or wrapped."""
        if instruction.name in self.sites:
            return self.sites[instruction.name]
        if instruction.opcode not in ("async-start", "fusion", "fusion-start"):
            return None
        inner = self.module.computations[instruction.called[0]].instructions
        return next((self.sites[name] for name in inner if name in self.sites), None)

    def _send(self, start: Instruction, site: Site, clock: _Clock) -> None:
        end = clock.send(self.links.link(site.axes), self.wire_seconds(site))
        name = site.instruction.name
        if start.opcode.endswith("-start") and _SYNC not in start.attributes:
            self.in_background.add(name)
            clock.ends[start.name] = name, end
        else:
            clock.wait(name, end)

    def _loop(self, loop: Instruction, around: Computation, clock: _Clock) -> None:
        body = self.module.computations[loop.attribute("body").lstrip("%")]
        left = trip_count(self.module, around, loop)
        left = 1.0 if left is None else left
        while left:
            # A trip waits for all that it sends: once what was in flight around the
            # loop has ended, all trips are alike.
            times = min(1.0, left) if clock.lag else left
            clock.add(self.run(body, clock.lag), times)
            left -= times

    def _branch(self, conditional: Instruction, clock: _Clock) -> None:
        branches = self._called(conditional, clock)
        often = self.module.taken_by(conditional)
        waits: dict[str, float] = collections.defaultdict(float)
        for found, each in zip(branches, often, strict=True):
            for name, seconds in found.waits.items():
                waits[name] += each * seconds
        said = fractions_in(conditional.op_name)
        if len(said) > 1:
            pairs = list(zip(branches, often, strict=True))
            seconds = sum(each * found.seconds for found, each in pairs)
            kernels = sum(each * found.kernels for found, each in pairs)
            clock.add(_Pass(seconds, kernels, waits))
            return
        # A stage without work waits for those that have some: its time passes too.
        longest = max(branches, key=lambda found: found.seconds)
        share = said[0] if said else 1.0
        seconds, kernels = share * longest.seconds, share * longest.kernels
        clock.add(_Pass(seconds, kernels, waits))

    def _called(self, instruction: Instruction, clock: _Clock) -> list[_Pass]:
        names = instruction.called or (instruction.attribute("to_apply").lstrip("%"),)
        return [self.run(self.module.computations[n], clock.lag) for n in names]
