"""Can a limit of exposed communication be checked, for these devices?"""

import math

from jax.sharding import Mesh

from jaxpar.compiled.hardware import kinds, load_hardware
from jaxpar.compiled.program import scheduled_hardware


def check_exposed_ms(exposed_ms: float | None, mesh: Mesh) -> None:
    """Reject a limit of exposed communication that can't be checked.

    Args:
      exposed_ms: as in `Budget`.
      mesh: the devices that the step is compiled for.

    Raises:
      ValueError: if it is negative, or the mesh is not of GPUs of known rates.
    """
    if exposed_ms is None:
        return
    if not 0 <= exposed_ms < math.inf:
        raise ValueError(
            f"verify: exposed_ms={exposed_ms!r} must be a number of milliseconds, 0 or "
            "more; None for no limit."
        )
    if scheduled_hardware(mesh) is None:
        kind = mesh.devices.flat[0].device_kind
        raise ValueError(
            f"verify: exposed_ms={exposed_ms!r} needs a step compiled for GPUs whose "
            f"rates are known ({', '.join(_gpus())}), whose schedule says what is "
            f"exposed; this mesh is of {kind!r} devices. Make the mesh of GPUs, which "
            "may be absent (docs/planning.md), or leave exposed_ms out."
        )


def _gpus() -> list[str]:
    return [kind for kind in kinds() if load_hardware(kind).platform == "cuda"]
