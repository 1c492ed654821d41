"""How fast is a step, and how much memory does it take?"""

from collections.abc import Callable

import jax
import psutil

from jaxpar.compiled.hardware import hardware_of
from jaxpar.engine.engine import Engine
from jaxpar.types import Batch

Spent = Callable[[str], float]


class Performance:
    """The numbers of ``perf/``, from one step to the next.

    ``perf/step_seconds`` is the time from one step's numbers to the next one's, without
    evaluations, saves and compilation; ``perf/data_seconds`` the part of it that was
    spent waiting for a batch.

    Args:
      engine: of the run.
      spent: returns the seconds that the run has spent in a phase (`Clock.spent`).
      tokens_per_step: of a global batch, as `sample_batch`; None to leave tokens/s out.
        A batch of another shape has a share of it, by the elements of its arrays.
    """

    def __init__(self, engine: Engine, spent: Spent, tokens_per_step: int | None):
        self._of_phase, self._tokens = spent, tokens_per_step
        self._peak, self._step = _peak_flops(engine), engine.loss()
        self._since = self._spent()

    def _spent(self) -> tuple[float, float]:
        return self._of_phase("step"), self._of_phase("data")

    def read(self, batch: Batch | None = None) -> dict[str, float]:
        """The numbers of the step that was completed now.

        Args:
          batch: the step's; None for one of `sample_batch`.

        Returns:
          Name -> value: seconds, tokens per second over all devices, 1e9 bytes (the
          peak of a device; of CPU devices, what the process has now), MFU as a
          fraction.
        """
        (step, data), now = self._since, self._spent()
        self._since = now
        waited = now[1] - data
        seconds = now[0] - step + waited
        numbers = {
            "perf/step_seconds": seconds,
            "perf/data_seconds": waited,
            "perf/memory_gb": memory_bytes() / 1e9,
        }
        if seconds <= 0:
            return numbers
        own = self._step if batch is None else self._step.of_shapes(batch)
        if self._tokens is not None:
            share = own.batch_spec.num_elements / self._step.batch_spec.num_elements
            numbers["perf/tokens_per_second"] = share * self._tokens / seconds
        if self._peak:
            numbers["perf/mfu"] = own.spec.model_flops / seconds / self._peak
        return numbers


def _peak_flops(engine: Engine) -> float | None:
    """Peak FLOP/s of the mesh in the dtype of the model; None where it is unknown."""
    devices = engine.mesh.devices
    hardware = hardware_of(devices.flat[0].device_kind)
    if hardware is None:
        return None
    return devices.size * hardware.peak[str(engine.spec.precision.compute_dtype)]


def memory_bytes() -> int:
    """Peak memory of one device; for CPU devices, memory of the process."""
    stats = [device.memory_stats() or {} for device in jax.local_devices()]
    peaks = [each.get("peak_bytes_in_use", 0) for each in stats]
    return max(peaks) or psutil.Process().memory_info().rss
