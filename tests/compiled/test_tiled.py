"""Does a device hold tiles of a large layer, and not the layer, at ZeRO 3?"""

import pytest

from tests.compiled.tiled import WEIGHTS, compile_mlp


@pytest.mark.parametrize(
    ("target", "devices", "gathered"),
    [
        ("h200:1x8", 8, 0.9),
        pytest.param("v5p:2x2x1", 4, 0.4, marks=pytest.mark.slow),
    ],
)
def test_a_device_holds_tiles_of_the_layer(target, devices, gathered, compiled) -> None:
    whole, tiled = (compiled(compile_mlp, target, tiles) for tiles in (0, 64))
    # The shards in bf16, and those of the gradients, are there in both.
    shards = 2 * WEIGHTS / devices
    assert whole >= shards + gathered * WEIGHTS
    assert tiled <= shards + 0.1 * WEIGHTS
