"""Are leaves named, counted and picked as errors, rules and checkpoints say them?"""

import jax
import jax.numpy as jnp
import pytest

from jaxpar import tree


def test_path_name_joins_keys_indices_and_attributes():
    nested = {"blocks": [(1, {"kernel": 2})]}
    assert list(tree.named_leaves(nested)) == ["blocks/0/0", "blocks/0/1/kernel"]


def test_path_name_of_a_bare_leaf_is_empty():
    assert tree.named_leaves(3) == {"": 3}


def test_named_leaves_are_in_flattening_order():
    nested = {"b": 1, "a": {"z": 2, "y": 3}}
    assert list(tree.named_leaves(nested).values()) == jax.tree.leaves(nested)


def test_named_leaves_take_inner_nodes_as_leaves():
    nested = {"a": ("x", "y"), "b": None}
    named = tree.named_leaves(nested, is_leaf=lambda x: isinstance(x, tuple))
    assert named == {"a": ("x", "y")}


@pytest.mark.parametrize(
    ("pattern", "name", "fits"),
    [
        ("kernel", "kernel", True),
        ("kernel", "mlp/kernel", False),
        ("*kernel", "blocks/mlp/kernel", True),
        ("*/kernel", "blocks/mlp/kernel", True),
        ("*/kernel", "kernel", True),
        ("*/kernel", "my_kernel", False),
        ("*/attn/*/kernel", "blocks/attn/q/kernel", True),
        ("*/attn/*/kernel", "attn/q/kernel", True),
        ("*/attn/*/kernel", "blocks/mlp/up/kernel", False),
        ("Dense_?/kernel", "Dense_0/kernel", True),
        ("dense_?/kernel", "Dense_0/kernel", False),
        ("blocks/[01]/w", "blocks/2/w", False),
    ],
)
def test_matches_is_shell_style_over_whole_names(pattern, name, fits):
    assert tree.matches(pattern, name) is fits


def test_counts_are_of_whole_leaves():
    leaves = {
        "a": jnp.zeros((2, 3), jnp.bfloat16),
        "b": jax.ShapeDtypeStruct((5,), jnp.float32),
        "c": jnp.int32(0),
    }
    assert tree.num_elements(leaves) == 6 + 5 + 1
    assert tree.num_bytes(leaves) == 6 * 2 + 5 * 4 + 4


def test_near_match_suggests_only_what_is_near():
    known = ["tensor", "data"]
    assert tree.near_match("tenser", known) == " Did you mean 'tensor'?"
    assert tree.near_match("zzz", known) == ""
