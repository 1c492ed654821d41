"""Is a leaf read by the name that it had when the checkpoint was written?"""

import jax.numpy as jnp
import pytest

from jaxpar.checkpoint import Checkpoints
from jaxpar.checkpoint.former_names import as_stored, former_names

PAIRS = [("head/norm/*", "norm/*"), ("table", "embed/table"), ("table", "old/table")]


def test_leaves_of_a_parameter_have_the_names_that_it_had():
    leaves = ["params/table", "opt_state/0/mu/head/norm/scale", "opt_state/0/count"]
    assert former_names(leaves, ["table", "head/norm/scale"], PAIRS) == {
        "params/table": ("params/embed/table", "params/old/table"),
        "opt_state/0/mu/head/norm/scale": ("opt_state/0/mu/norm/scale",),
    }


def test_leaf_that_only_ends_like_a_pattern_keeps_its_name():
    assert former_names(["params/other/table"], ["other/table"], PAIRS) == {}
    assert former_names(["params/my_table"], ["my_table"], PAIRS) == {}


def test_name_of_today_goes_before_earlier_ones():
    former = {"a": ("x", "y")}
    assert as_stored({"a": "a"}, former, {"a", "x"}) == {"a": "a"}
    assert as_stored({"a": "a"}, former, {"y"}) == {"a": "y"}
    assert as_stored({"a": "a"}, former, {"z"}) == {"a": "a"}, "missing under its name"


def test_checkpoint_of_earlier_names_is_read_and_continued(tmp_path):
    old = Checkpoints(tmp_path)
    old.save(1, {"before": jnp.arange(3.0)})
    old.close()
    new = Checkpoints(tmp_path, former={"now": ("before",)})
    target = {"now": jnp.zeros(3)}
    assert new.restore(target).tree["now"].tolist() == [0, 1, 2]
    new.save(2, {"now": jnp.ones(3)})
    new.wait()
    assert new.restore(target).tree["now"].tolist() == [1, 1, 1]
    assert new.restore(target, step=1).tree["now"].tolist() == [0, 1, 2]
    new.close()
    with pytest.raises(ValueError, match=r"1 leaf is not in the checkpoint:\n    now"):
        Checkpoints(tmp_path).restore(target, step=1)
