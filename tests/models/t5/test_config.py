"""Does a T5's config resolve and refuse what it says?"""

import re
from typing import Any

import pytest

from jaxpar.models import T5Config


def test_what_is_left_out_is_resolved() -> None:
    config = T5Config(width=96, num_heads=6, num_layers=3)
    assert (config.head_size, config.hidden_width, config.decoder_layers) == (
        16,
        256,
        3,
    )
    other = T5Config(width=96, activation="relu", head_width=5, num_decoder_layers=2)
    assert (other.head_size, other.hidden_width, other.decoder_layers) == (5, 384, 2)
    assert T5Config(mlp_width=7).hidden_width == 7


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"vocab_size": 0}, "vocab_size=0 must be at least 1"),
        ({"num_decoder_layers": 0}, "num_decoder_layers=0 must be at least 1"),
        ({"head_width": -1}, "head_width=-1 must be at least 1"),
        ({"norm_epsilon": 0.0}, "norm_epsilon=0.0 must be above 0"),
        ({"dropout": 1.0}, "dropout=1.0 must be at least 0 and below 1"),
        ({"unroll": 5}, "unroll=5 must be between 1 and 4, the blocks of the longer"),
        (
            {"width": 30, "num_heads": 4},
            "width=30 must be a multiple of num_heads=4 (the nearest is 32)",
        ),
        ({"num_buckets": 7}, "num_buckets=7 must be even and at least 4"),
        ({"max_distance": 16}, "max_distance=16 must be above 16, half of num_buckets"),
        ({"activation": "gegl"}, "activation='gegl' must be one of"),
        ({"attention": "cudnn"}, "attention='cudnn' must be one of"),
        ({"remat": "ful"}, "policy='ful' must be one of"),
        (
            {"remat": "save-names", "remat_names": ("qk",)},
            "remat_names='qk' must be one of",
        ),
    ],
)
def test_what_is_out_of_range_is_named(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        T5Config(**fields)
