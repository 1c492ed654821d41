"""Do names and rules become the specs they say, or an error that says why not?"""

import pytest
from jax.sharding import PartitionSpec as P

from jaxpar.sharding.rules import compute_specs
from jaxpar.sharding.tensor import LOGICAL_RULES

SIZES = {"data": 2, "pipe": 1, "tensor": 2}
SHAPES = {"attn/q/kernel": (4, 8), "mlp/up/kernel": (4, 6), "mlp/up/bias": (6,)}
UNNAMED = dict.fromkeys(SHAPES)
NAMED = {
    "attn/q/kernel": ("embed", "heads"),
    "mlp/up/kernel": ("embed", "mlp"),
    "mlp/up/bias": ("mlp",),
}


def specs_of(rules, names=NAMED, shapes=SHAPES):
    return compute_specs(shapes, names, rules, SIZES)


def test_unannotated_model_without_rules_is_kept_whole():
    assert specs_of({}, UNNAMED) == {
        "attn/q/kernel": (None, None),
        "mlp/up/kernel": (None, None),
        "mlp/up/bias": (None,),
    }


@pytest.mark.parametrize("name", sorted(LOGICAL_RULES))
def test_every_logical_name_goes_where_the_table_says(name):
    axis = LOGICAL_RULES[name]
    sizes = SIZES | {"pipe": 2, "expert": 2}
    assert compute_specs({"w": (3, 8)}, {"w": (None, name)}, {}, sizes) == {
        "w": (None, axis)
    }


def test_vocabulary_is_tensors_alone_where_there_is_one_stage():
    specs = compute_specs({"w": (8, 3)}, {"w": ("vocab", "embed")}, {}, SIZES)
    assert specs == {"w": ("tensor", None)}


def test_vocabulary_that_the_stages_do_not_divide_is_refused():
    with pytest.raises(ValueError, match=r"which pipe x tensor=6 does not divide"):
        compute_specs(
            {"w": (8, 3)}, {"w": ("vocab", None)}, {}, {"pipe": 3, "tensor": 2}
        )


def test_column_and_row_products_split_the_dim_between_them():
    shapes = {"up": (4, 8), "down": (8, 4), "table": (10, 4)}
    names = {
        "up": ("embed", "mlp"),
        "down": ("mlp", "embed"),
        "table": ("vocab", "embed"),
    }
    assert compute_specs(shapes, names, {}, SIZES) == {
        "up": (None, "tensor"),
        "down": ("tensor", None),
        "table": ("tensor", None),
    }


def test_users_rule_wins_over_the_table():
    found = specs_of({"mlp": None, "embed": "tensor"})
    assert found["mlp/up/kernel"] == ("tensor", None)
    assert found["mlp/up/bias"] == (None,)


def test_path_rule_wins_over_names():
    found = specs_of({"mlp/*": P(), "mlp": "tensor"})
    assert found["mlp/up/kernel"] == (None, None)
    assert found["mlp/up/bias"] == (None,)


def test_first_of_two_path_rules_wins():
    rules = {"mlp/up/kernel": P("tensor"), "*/kernel": P(None, "tensor")}
    found = specs_of(rules, UNNAMED)
    assert found["mlp/up/kernel"] == ("tensor", None)
    assert found["attn/q/kernel"] == (None, "tensor")


def test_short_spec_is_padded_with_whole_dims():
    assert specs_of({"*/kernel": P("tensor")}, UNNAMED)["attn/q/kernel"] == (
        "tensor",
        None,
    )


def test_mesh_axis_is_its_own_logical_name():
    assert compute_specs({"w": (3, 4)}, {"w": (None, "tensor")}, {}, SIZES) == {
        "w": (None, "tensor")
    }


def test_axis_that_two_dims_name_splits_the_first():
    assert compute_specs({"w": (4, 8)}, {"w": ("heads", "mlp")}, {}, SIZES) == {
        "w": ("tensor", None)
    }


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ({"mlp": "tenser"}, r"rules: 'mlp' maps to 'tenser', which is not a mesh axis\."
         r" Use 'tensor', 'expert' or None\. Did you mean 'tensor'\?"),
        ({"*/kernel": P("rows")}, r"rules: '\*/kernel' maps to 'rows', which is not a"),
        ({"*/kernel": P(("data", "tensor"))}, r"maps to \('data', 'tensor'\), which"),
        ({"mlp": "data"}, r"rules: 'mlp' maps to 'data', but parameters are sharded "
         r"over data by zero=1, 2 or 3.* Use 'tensor', 'expert' or None"),
        ({"mlp": "pipe"}, r"rules: 'mlp' maps to 'pipe'; only 'tensor' and 'ex"
         r"pert' can split"),
        ({"mpl": "tensor"}, r"rules: 'mpl' names no dim of any parameter\. Known "
         r"names: embed, heads, mlp\. Did you mean 'mlp'\? Correct it or remove it"),
        ({"mlp/up/kernle": P()}, r"rules: 'mlp/up/kernle' matches no parameter\. Known "
         r"paths: .* Did you mean 'mlp/up/kernel'\? Correct it or remove it"),
        ({"*/kernel": None}, r"rules: '\*/kernel' names no dim of any parameter, but "
         r"matches paths, which take a PartitionSpec"),
        ({"*/bias": P(None, "tensor")}, r"rules: '\*/bias' gives P.*None, 'tensor'\) "
         r"to mlp/up/bias, which has 1 dims \(shape \(6,\)\)\. Give at most one entry"),
        ({"mlp/*": P("tensor"), "*/kernel": P("tensor", "tensor")},
         r"rules: '\*/kernel' gives P.*'tensor', 'tensor'\) to attn/q/kernel, but an "
         r"axis can split only one dim\. Keep one 'tensor'"),
    ],
    ids=lambda x: None if isinstance(x, str) else ",".join(x),
)  # fmt: skip
def test_wrong_rule_says_what_is_wrong(rules, message):
    with pytest.raises(ValueError, match=message):
        specs_of(rules)


def test_rule_for_names_of_an_unannotated_model_says_so():
    message = r"'mlp' names no dim.* Known names: none: the model is unannotated"
    with pytest.raises(ValueError, match=message):
        specs_of({"mlp": "tensor"}, UNNAMED)


def test_unknown_names_of_all_leaves_are_in_one_message():
    message = (
        r"rules: the model gives dims names that no rule knows: 'mlpp' \(a; did you "
        r"mean 'mlp'\?\), 'kv' \(b and 1 more\)\. Pass rules=\{'mlpp': None, 'kv': None"
        r"\} to leave those dims unsharded, 'tensor' for None to split one; with "
        r"tensor=1 and pipe=1 no name needs a rule\."
    )
    shapes = {"a": (4,), "b": (4,), "c": (4, 4)}
    names = {"a": ("mlpp",), "b": ("kv",), "c": (None, "kv")}
    with pytest.raises(ValueError, match=message):
        compute_specs(shapes, names, {}, SIZES)
    found = compute_specs(shapes, names, {"mlpp": None, "kv": "tensor"}, SIZES)
    assert found == {"a": (None,), "b": ("tensor",), "c": (None, "tensor")}


def test_unknown_names_cost_nothing_where_no_axis_is_split():
    sizes = {"data": 8, "pipe": 1, "tensor": 1}
    assert compute_specs({"w": (3, 5)}, {"w": ("kv", "X")}, {}, sizes) == {
        "w": (None, None)
    }


@pytest.mark.parametrize(
    ("names", "spec"),
    [
        (("fsdp", "tp"), (None, "tensor")),
        (("model", "data"), ("tensor", None)),
        ((None, ("fsdp", "tp")), (None, "tensor")),
        ((("data", "fsdp"), P.UNCONSTRAINED), (None, None)),
        ((("embed", "mlp"), "tp"), ("tensor", None)),
        (("pipe", "tensor"), (None, "tensor")),
    ],
    ids=str,
)
def test_axes_of_another_mesh_are_those_of_this_one(names, spec):
    assert compute_specs({"w": (4, 8)}, {"w": names}, {}, SIZES) == {"w": spec}


def test_pipe_axis_alone_splits_no_layer():
    with pytest.raises(
        ValueError, match="'w' maps to 'pipe'; only 'tensor' and 'expert' can split"
    ):
        compute_specs({"w": (4,)}, {"w": ("pipe",)}, {}, SIZES | {"pipe": 2})


def test_rules_may_call_the_tensor_axis_by_its_other_names():
    rules = {"mlp/*": P(None, "tp"), "heads": "model", "mlp": None}
    shapes = {"attn/q/kernel": (4, 8), "mlp/up/kernel": (4, 6)}
    assert specs_of(rules, shapes=shapes) == {
        "attn/q/kernel": (None, "tensor"),
        "mlp/up/kernel": (None, "tensor"),
    }


def test_rule_for_an_axis_that_the_model_names_wins():
    names = {"w": ("model", "embed")}
    assert compute_specs({"w": (4, 4)}, names, {"model": None}, SIZES) == {
        "w": (None, None)
    }


@pytest.mark.parametrize(
    ("names", "axis_rules", "rules", "spec"),
    [
        (("kv", "out"), (("kv", "model"), ("out", "fsdp")), {}, ("tensor", None)),
        # Of two rules for a name, the first whose axes are free in the array.
        (("embed", "mlp"), (("mlp", "model"), ("embed", "model"), ("embed", "data")),
         {}, (None, "tensor")),
        (("embed", "mlp"), (("embed", ["data", "model"]),), {}, ("tensor", None)),
        # As in Flax, a name without a rule is whole.
        (("embed", "mlp"), (("embed", None),), {}, (None, None)),
        (("embed", "tensor"), (("embed", None),), {}, (None, "tensor")),
        (("embed", "kv"), (("kv", "model"),), {"embed": "tensor", "kv": None},
         ("tensor", None)),
    ],
    ids=str,
)  # fmt: skip
def test_axis_rules_of_flax_are_understood(names, axis_rules, rules, spec):
    assert compute_specs({"w": (4, 8)}, {"w": names}, rules, SIZES, axis_rules) == {
        "w": spec
    }


def test_axis_of_flax_rules_that_is_unknown_is_named_by_its_dim():
    with pytest.raises(ValueError, match=r"no rule knows: 'kv' \(w\)\. Pass rules="):
        compute_specs({"w": (4,)}, {"w": ("kv",)}, {}, SIZES, (("kv", "X"),))


def test_more_names_than_dims_raises():
    message = r"names 3 dims of w, .*'heads'\), but it has 2 \(shape \(4, 8\)\)\. Name"
    with pytest.raises(ValueError, match=message):
        compute_specs({"w": (4, 8)}, {"w": ("embed", "mlp", "heads")}, {}, SIZES)


def test_dim_that_its_axis_does_not_divide_raises():
    message = (
        r"rules: dim 1 of w \(shape \(4, 7\)\) has 7 elements, which tensor=2 does not "
        r"divide\. Pad the dim to a multiple of 2, change the mesh, or map it to None"
    )
    with pytest.raises(ValueError, match=message):
        compute_specs({"w": (4, 7)}, {"w": ("embed", "mlp")}, {}, SIZES)
