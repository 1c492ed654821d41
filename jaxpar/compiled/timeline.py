"""What does a device do at each moment: compute, communicate, wait for data, or idle?

Intervals are (start, end), in seconds. Where several operations run at once, each gets
an equal share of the time, so that the shares add up to the time that is covered.
"""

import dataclasses
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import numpy as np

Interval = tuple[float, float]


@dataclasses.dataclass(frozen=True)
class Span:
    """An operation on a device.

    Attributes:
      start: when it began, in seconds.
      end: when it ended.
      op: its name.
      communicates: whether it is a collective.
    """

    start: float
    end: float
    op: Hashable
    communicates: bool = False


@dataclasses.dataclass(frozen=True)
class Account:
    """Where a device's time went, in seconds.

    Attributes:
      compute: some computation ran.
      communication: collectives ran and no computation: they were exposed.
      input: nothing ran, and the host waited for data.
      other: nothing ran for another reason, such as dispatch.
      left_out: nothing ran, and the host did what is not part of a step.
      hidden: collectives ran beside computations; a part of `compute`.
      by_op: operation -> its share of `compute` or of `communication`.
    """

    compute: float
    communication: float
    input: float
    other: float
    left_out: float
    hidden: float
    by_op: Mapping[Any, float]

    @property
    def total(self) -> float:
        """The window without what was left out."""
        return self.compute + self.communication + self.input + self.other


def account(
    spans: Sequence[Span],
    window: Interval,
    *,
    waiting: Sequence[Interval] = (),
    left_out: Sequence[Interval] = (),
) -> Account:
    """Split a window of a device's time.

    Args:
      spans: the operations of one device, in any order; they may overlap.
      window: the time to split; what is outside of it is cut off.
      waiting: when the host waited for data; intervals do not overlap.
      left_out: when the host did what is not part of a step, likewise.

    Returns:
      The account; its parts and `left_out` add up to the window.

    Example:
      >>> sent = Span(3.0, 6.0, "all-reduce", communicates=True)
      >>> spans = [Span(0.0, 4.0, "dot"), sent]
      >>> found = account(spans, (0.0, 8.0), waiting=[(5.0, 7.0)])
      >>> found.compute, found.communication, found.input, found.other
      (4.0, 2.0, 1.0, 1.0)
    """
    computes = _clipped([(s.start, s.end) for s in spans if not s.communicates], window)
    moves = _clipped([(s.start, s.end) for s in spans if s.communicates], window)
    waits, outside = _clipped(waiting, window), _clipped(left_out, window)
    ends = [
        np.asarray(window, float),
        *map(np.ravel, (computes, moves, waits, outside)),
    ]
    times = np.unique(np.concatenate(ends))
    seconds = np.diff(times)
    at_work, moving, waited, outs = (
        _running(each, times) for each in (computes, moves, waits, outside)
    )
    exposed, idle = (at_work == 0) & (moving > 0), (at_work == 0) & (moving == 0)

    def total(chosen: np.ndarray) -> float:
        return float(seconds[chosen].sum())

    shares = {
        False: _shares(computes, times, seconds, at_work),
        True: _shares(moves, times, np.where(exposed, seconds, 0.0), moving),
    }
    by_op: dict[Hashable, float] = {}
    for communicates, own in shares.items():
        named = [span.op for span in spans if span.communicates == communicates]
        for op, share in zip(named, own, strict=True):
            by_op[op] = by_op.get(op, 0.0) + float(share)
    return Account(
        compute=total(at_work > 0),
        communication=total(exposed),
        input=total(idle & (outs == 0) & (waited > 0)),
        other=total(idle & (outs == 0) & (waited == 0)),
        left_out=total(idle & (outs > 0)),
        hidden=total((at_work > 0) & (moving > 0)),
        by_op=by_op,
    )


def _clipped(intervals: Sequence[Interval], window: Interval) -> np.ndarray:
    """The intervals within the window, [n, 2]; those outside of it are empty."""
    return np.clip(np.asarray(intervals, float).reshape(-1, 2), *window)


def _running(intervals: np.ndarray, times: np.ndarray) -> np.ndarray:
    """How many intervals cover each piece between two times."""
    change = np.zeros(len(times), int)
    np.add.at(change, np.searchsorted(times, intervals[:, 0]), 1)
    np.add.at(change, np.searchsorted(times, intervals[:, 1]), -1)
    return np.cumsum(change)[:-1]


def _shares(
    intervals: np.ndarray, times: np.ndarray, seconds: np.ndarray, running: np.ndarray
) -> np.ndarray:
    """Each interval's part of the time, divided among those that run at once."""
    each = np.divide(seconds, running, out=np.zeros_like(seconds), where=running > 0)
    until = np.concatenate([[0.0], np.cumsum(each)])
    starts, ends = (np.searchsorted(times, intervals[:, i]) for i in (0, 1))
    return until[ends] - until[starts]
