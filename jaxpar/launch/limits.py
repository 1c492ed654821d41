"""How long may a worker be in one phase before it counts as hung?"""

import dataclasses
from collections.abc import Sequence

from jaxpar.launch.heartbeat import Beat


@dataclasses.dataclass(frozen=True)
class Limits:
    """Limits in seconds; 0 for no limit, except for the last two."""

    start: float = 600.0
    """From a worker's start to its first restore or step: imports, joining the others,
    initializing the state."""
    compile: float = 1800.0
    """The first step, an evaluation and a replay of a step, including compilation."""
    step: float = 300.0
    """A step, and waiting for its batch."""
    save: float = 1800.0
    """Waiting for a checkpoint to be saved, or restoring one."""
    rendezvous: float = 600.0
    """For the hosts to find each other."""
    lost: float = 60.0
    """Silence of another host's supervisor, after which it counts as lost; and of
    whoever else runs this run, after which it is taken over."""

    def __post_init__(self):
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value < 0:
                raise ValueError(
                    f"limits: {field.name}={value:g} must be seconds, at least 0 (no "
                    "limit)"
                )
        for name in ("rendezvous", "lost"):
            if getattr(self, name) == 0:
                raise ValueError(f"limits: {name}=0 must be seconds, above 0")

    def of(self, phase: str) -> float:
        """The limit of a phase."""
        return {
            "start": self.start,
            "compile": self.compile,
            "evaluate": self.compile,
            "replay": self.compile,
            "step": self.step,
            "data": self.step,
        }.get(phase, self.save)

    def late(self, beats: Sequence[Beat], now: float) -> list[tuple[int, str]]:
        """Find the workers that exceed the limit of their phase.

        Args:
          beats: of each worker.
          now: on this host's monotonic clock, in seconds.

        Returns:
          (position, description) of each, least progress first.
        """
        found = [
            (beat.step if beat.step is not None else -1, beat.since, place)
            for place, beat in enumerate(beats)
            if 0 < self.of(beat.phase) < now - beat.since
        ]
        return [
            (
                place,
                f"was at {beats[place]} for {now - since:.1f} s, above the limit of "
                f"{self.of(beats[place].phase):g} s",
            )
            for _, since, place in sorted(found)
        ]
