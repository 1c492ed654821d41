"""Is a pattern's layout made once, and refused for a length that it does not divide?"""

import pytest

from jaxpar.sparse_attention import (
    Dense,
    make_layout,
)
from jaxpar.sparse_attention.layouts import first_blocks

UNI = "unidirectional"


def test_layout_is_made_once() -> None:
    layout = make_layout(Dense(2), 64)
    assert make_layout(Dense(2), 64) is layout
    assert first_blocks(layout, 2) is first_blocks(layout, 2)
    assert first_blocks(layout, 4) is layout


def test_length_that_blocks_do_not_divide_is_refused() -> None:
    with pytest.raises(ValueError, match=r"seq_len=250.*block=16; pad.* 256"):
        make_layout(Dense(1), 250)
