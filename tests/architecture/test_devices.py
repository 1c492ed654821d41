"""Do tests run on the devices that they are written for?"""

import jax


def test_devices_are_eight_cpus():
    assert [device.platform for device in jax.devices()] == ["cpu"] * 8
