"""Which device is a program for, while it is traced?"""

import jax


def device_kind() -> str:
    """The kind of device that the traced program will run on.

    That of the abstract mesh where the program is for GPUs or TPUs that are not here;
    else of this process's devices.

    Example:
      >>> device_kind()
      'cpu'
    """
    device = jax.sharding.get_abstract_mesh().abstract_device or jax.devices()[0]
    return device.device_kind
