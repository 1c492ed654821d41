"""Which configs of CoAtNets are refused, and what does one that is accepted hold?"""

from typing import Any

import pytest

from jaxpar.models.coatnet.config import CoatnetConfig

# fields that do not fit, and what the error says
WRONG = [
    ({"num_classes": 0}, r"num_classes=0 must be at least 1"),
    ({"norm": "layer"}, r"norm='layer' must be one of 'batch', 'group'"),
    ({"norm": "bach"}, r"norm='bach' must be .* Did you mean 'batch'"),
    ({"stride_in": "first"}, r"stride_in='first' must be one of 'depthwise', 'widen'"),
    ({"attention": "flash"}, r"attention='flash' must be one of 'auto', 'xla'"),
    ({"remat": "ful"}, r"policy='ful' must be one of .* Did you mean 'full'"),
    ({"stochastic_depth": 1.0}, r"stochastic_depth=1.0 must be at least 0 and below 1"),
    ({"squeeze": 0.0}, r"squeeze=0.0 must be above 0 and at most 1"),
    ({"widths": (96, 192)}, r"widths=\(96, 192\) must be 4 numbers, for S1 to S4"),
    ({"depths": (2, 1, 2, 2)}, r"depths=\(2, 1, 2, 2\) must be 4 .* of at least 2"),
    ({"unroll": 5}, r"unroll=5 must be at most 4, the blocks of the longest section"),
    ({"image_size": 200}, r"image_size=200 must be a multiple of 32, .*; use 224"),
    ({"head_size": 48, "widths": (96, 192, 384, 760)}, r"of head_size=48; 760 is not"),
    (
        {"norm": "group", "norm_groups": 48},
        r"norm_groups=48 must divide .*, and 64 is not a multiple of it; use 32",
    ),
]


@pytest.mark.parametrize(("fields", "message"), WRONG)
def test_config_that_does_not_fit_raises(fields: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        CoatnetConfig(**fields)


def test_batch_norm_has_no_groups_that_could_not_fit():
    assert CoatnetConfig(norm="batch", norm_groups=48).norm_groups == 48


def test_maps_are_halved_by_the_stem_and_each_level():
    assert CoatnetConfig(image_size=384).map_sizes == (96, 48, 24, 12)
    assert CoatnetConfig(image_size=32, stem_stride=1).map_sizes == (16, 8, 4, 2)


def test_first_block_is_given_the_width_of_the_level_before():
    config = CoatnetConfig()
    assert [config.width_before(level) for level in range(4)] == [64, 96, 192, 384]
