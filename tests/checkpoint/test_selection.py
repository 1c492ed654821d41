"""Are the leaves read that the patterns name, by their names in the checkpoint?"""

import pytest

from jaxpar.checkpoint.selection import select

LEAVES = ["params/a/kernel", "params/a/bias", "opt_state/mu/a", "step"]


def chosen(**options):
    given = {"only": None, "reset": (), "rename": {}} | options
    return select(LEAVES, **given)


def test_all_are_read_by_their_own_names_unless_told_otherwise():
    assert chosen() == {name: name for name in LEAVES}


@pytest.mark.parametrize(
    ("options", "left"),
    [
        ({"only": ["params/*"]}, LEAVES[:2]),
        ({"only": ["*/kernel", "step"]}, [LEAVES[0], "step"]),
        ({"reset": ["opt_state/*"]}, [*LEAVES[:2], "step"]),
        ({"only": ["params/*"], "reset": ["*/bias"]}, LEAVES[:1]),
    ],
)
def test_patterns_choose(options, left):
    assert list(chosen(**options)) == left


def test_a_folder_of_leaves_is_renamed_at_once():
    found = chosen(rename={"params/a/*": "params/old/*", "step": "count"})
    assert found["params/a/kernel"] == "params/old/kernel"
    assert found["params/a/bias"] == "params/old/bias"
    assert found["step"] == "count"
    assert found["opt_state/mu/a"] == "opt_state/mu/a"


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (
            {"only": ["param/*"]},
            r"only: 'param/\*' matches no leaf of this .*Did",
        ),
        ({"reset": ["nothing"]}, "reset: 'nothing' matches no leaf"),
        ({"only": ["step"], "reset": ["step"]}, "leave nothing to read"),
        ({"rename": {"stop": "step"}}, "rename: 'stop' is not a leaf.* mean 'step'"),
        (
            {"rename": {"step": "opt_state/mu/a"}},
            "and 'step' would both be",
        ),
        ({"rename": {"params/*": "old"}}, "must both name a leaf, or both end in"),
    ],
)
def test_what_fits_no_leaf_is_refused(options, text):
    with pytest.raises(ValueError, match=text):
        chosen(**options)
