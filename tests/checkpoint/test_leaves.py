"""Are leaves named by their paths, and trees that can't be saved refused?"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpar.checkpoint import leaves


@pytest.mark.parametrize("leaf", [np.ones(2), 3, 0.5, "text"])
def test_a_leaf_that_is_no_array_is_refused(leaf: Any) -> None:
    with pytest.raises(TypeError, match=r"tree leaf 'a/b' is \w+; every leaf must be"):
        leaves.array_leaves({"a": {"b": leaf}}, "tree")


def test_two_leaves_of_one_name_are_refused() -> None:
    tree = {"a/b": jnp.ones(1), "a": {"b": jnp.ones(1)}}
    with pytest.raises(ValueError, match=r"tree has two leaves named 'a/b'; .*rename"):
        leaves.array_leaves(tree, "tree")


def test_a_tree_without_leaves_is_refused() -> None:
    with pytest.raises(ValueError, match="target has no leaves; give a tree with arr"):
        leaves.array_leaves({"a": None}, "target")


def test_a_struct_is_refused_where_values_are_needed() -> None:
    with pytest.raises(TypeError, match=r"tree leaf 'a' is a jax\.ShapeDtypeStruct"):
        leaves.require_global({"a": jax.ShapeDtypeStruct((2,), jnp.float32)})


def test_an_array_of_one_process_of_several_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(ValueError, match=r"leaf 'a' is only on .* one process of 2"):
        leaves.require_global({"a": jnp.ones(2)})


def test_equal_tables_have_no_mismatch() -> None:
    tree = {"a": jnp.ones(2), "key": jax.random.key(0)}
    table = leaves.leaf_specs(tree)
    assert leaves.describe_mismatch(table, dict(reversed(table.items()))) is None


def test_a_tree_that_is_one_array_has_a_name() -> None:
    assert list(leaves.array_leaves(jnp.ones(2), "tree")) == ["value"]
