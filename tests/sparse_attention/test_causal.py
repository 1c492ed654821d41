"""Are patterns by name those of the same sizes in blocks, and causal?"""

import numpy as np
import pytest

from jaxpar.sparse_attention import causal_pattern, make_layout
from jaxpar.sparse_attention.causal import SIZES

NAMES = ("dense", *SIZES)


@pytest.mark.parametrize("name", NAMES)
def test_every_block_sees_itself_and_none_sees_the_future(name):
    pattern = causal_pattern(name, num_heads=2, block=16, window=32, global_tokens=16)
    layout = np.asarray(make_layout(pattern, 128).blocks)
    heads = layout if layout.ndim == 3 else layout[None]
    for blocks in heads:
        causal = np.tril(blocks)
        assert np.diagonal(causal).all()
    assert pattern.attention == "unidirectional"


def test_sizes_in_tokens_are_blocks_of_the_pattern():
    size = {"num_heads": 2, "block": 16, "window": 64, "global_tokens": 32}
    sliding = causal_pattern("sliding", **size)
    assert sliding.num_sliding_window_blocks == 2 * 4 + 1, "four before, and its own"
    fixed = causal_pattern("fixed", **size)
    assert (fixed.num_local_blocks, fixed.num_global_blocks) == (4, 2)
    longformer = causal_pattern("longformer", **size)
    assert longformer.global_block_indices == (0,)
    assert longformer.global_block_end_indices == (2,)
    bigbird = causal_pattern("bigbird", **size, num_random_blocks=3, seed=5)
    assert (bigbird.num_random_blocks, bigbird.seed) == (3, 5)
    assert causal_pattern("variable", **size).local_window_blocks == (4,)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"name": "slidng"}, "pattern='slidng': must be one of dense, .*sliding"),
        ({"window": 40}, "window=40: must be a positive multiple of block=16; .* 32"),
        ({"window": 8}, "window=8: .* the nearest is 16"),
        ({"name": "fixed", "global_tokens": 0}, "global_tokens=0: must be a positive"),
        ({"num_heads": 0}, "num_heads=0: must be 1 or more"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(given, message):
    with pytest.raises(ValueError, match=message):
        causal_pattern(**{"name": "sliding", "num_heads": 2, "block": 16, **given})


def test_size_that_a_pattern_does_not_have_is_not_checked():
    causal_pattern("dense", num_heads=1, block=16, window=40)
    causal_pattern("sliding", num_heads=1, block=16, window=32, global_tokens=40)
