"""Are the named sizes the published ones?"""

import pytest

from jaxpar.models import T5_PRESETS
from jaxpar.models.t5.config import num_params

COUNTS = {
    "small": 76_961_152,
    "base": 247_577_856,
    "large": 783_150_080,
    "xl": 2_849_757_184,
    "xxl": 11_135_332_352,
}


@pytest.mark.parametrize("name", COUNTS)
def test_published_sizes_have_their_numbers_of_parameters(name: str) -> None:
    """As transformers counts them on the meta device, with an untied head."""
    assert num_params(T5_PRESETS[name]) == COUNTS[name]


def test_sizes_for_a_cpu_are_small() -> None:
    assert num_params(T5_PRESETS["tiny"]) < 400_000
    assert 1_000_000 < num_params(T5_PRESETS["1m"]) < 1_500_000
