"""Does a query see the keys of the calls before, and no others?"""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxpar.models.attention import Attention, Heads
from jaxpar.models.blocked_attention import Scoring
from jaxpar.models.cached_attention import CachedAttention

X = jnp.asarray(np.random.default_rng(0).normal(size=(2, 9, 8)), jnp.float32)


@pytest.mark.parametrize(
    "scoring", [Scoring(), Scoring(window=3), Scoring(softcap=1.0)]
)
@pytest.mark.parametrize("parts", [(9,), (4, 1, 1, 3)])
def test_parts_of_a_row_see_what_the_whole_row_sees(scoring, parts):
    how: dict[str, Any] = {
        "biases": ("query", "value"),
        "output_stddev": 0.5,
        "scoring": scoring,
    }
    whole = Attention(8, Heads(4, 2, 4), **how, rngs=nnx.Rngs(0))(X)
    cached = CachedAttention(2, 12, 8, Heads(4, 2, 4), **how, rngs=nnx.Rngs(0))
    ends = np.cumsum(parts)
    found = [cached(X[:, end - n : end]) for n, end in zip(parts, ends, strict=True)]
    np.testing.assert_allclose(jnp.concatenate(found, 1), whole, atol=1e-6)
    assert int(cached.first[...]) == 9
    assert not np.asarray(cached.keys[:, 9:]).any()
