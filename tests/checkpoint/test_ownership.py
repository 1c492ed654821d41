"""Is a folder of another run refused, or one with other leaves?"""

import pytest

from jaxpar.checkpoint.leaves import LeafSpec
from jaxpar.checkpoint.manifest import Manifest
from jaxpar.checkpoint.ownership import Owner, require_newer
from jaxpar.checkpoint.shard_parts import ShardParts

SPECS = {"w": LeafSpec((2,), "float32")}
CONTENT = Manifest(4, "one", SPECS, [], {}, None, {})


def owner(run: str, *, force: bool = False) -> Owner:
    return Owner(run, {}, ShardParts(), force=force)


def test_run_owns_what_it_has_saved() -> None:
    assert owner("one").require("runs/a", CONTENT, SPECS, has_changed=False)


def test_another_run_is_refused_unless_forced() -> None:
    with pytest.raises(ValueError, match="holds another run, up to step 4"):
        owner("two").require("runs/a", CONTENT, SPECS, has_changed=False)
    forced = owner("two", force=True)
    assert not forced.require("runs/a", CONTENT, SPECS, has_changed=False)


def test_other_leaves_are_refused_unless_they_were_reset() -> None:
    other = {"w": LeafSpec((3,), "float32")}
    with pytest.raises(ValueError, match="another model or optimizer; those of step 4"):
        owner("one").require("runs/a", CONTENT, other, has_changed=False)
    assert owner("one").require("runs/a", CONTENT, other, has_changed=True)


def test_step_must_be_newer() -> None:
    require_newer("runs/a", 5, 4)
    with pytest.raises(ValueError, match="step is 4, and folder 'runs/a' already has"):
        require_newer("runs/a", 4, 4)
