"""Are wrong numbers refused, and fragments about as large as each other?

What it computes is in tests/equivalence/test_diloco.py.
"""

import jax.numpy as jnp
import optax
import pytest

from jaxpar import tree
from jaxpar.optim import diloco

INNER = optax.adamw(1e-3)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"replicas": 1}, "replicas=1 must be at least 2"),
        ({"every": 0}, "every=0 must be at least 1"),
        ({"every": 4, "fragments": 5}, "fragments=5 must be from 1 to every=4"),
    ],
)
def test_numbers_out_of_range_are_refused(given, said) -> None:
    with pytest.raises(ValueError, match=said):
        diloco(INNER, **{"replicas": 2, **given})


def test_fragments_share_the_parameters() -> None:
    params = {"a": jnp.zeros((4, 8)), "b": {"c": jnp.zeros(30), "d": jnp.zeros(2)}}
    names = diloco(INNER, replicas=2, fragments=2).names(params)
    assert names == [["a"], ["b/c", "b/d"]]
    whole = diloco(INNER, replicas=2).names(params)
    assert whole == [list(tree.named_leaves(params))]


def test_replicas_have_a_state_each() -> None:
    state = diloco(INNER, replicas=3, fragments=2).init({"w": jnp.ones((2, 5))})
    assert state.inner[0].mu["w"].shape == (3, 2, 5)
    assert state.inner[0].count.shape == (3,)
    assert not state.moved["w"].any()
    assert len(state.outer) == 2
