"""Does mutable state of a model's parts change on stages as a plain loop changes it?

It does not depend on examples: power iterations, moving averages of sizes, counts. The
oracle calls the modules by Flax alone (`stateful.trained_plainly`).
"""

from typing import Any

import jax
import numpy as np
import pytest

import jaxpar
from tests.equivalence.stateful import (
    ACCUMULATE,
    BATCHES,
    STEPS,
    loss_fn,
    make_engine,
    start,
    trained_plainly,
)

Mesh = jaxpar.MeshShape
PIPE = Mesh(data=1, pipe=2)


def assert_near(found: Any, right: Any) -> None:
    """Counts are equal, other leaves equal to 1e-5 of their norm."""
    found = jax.tree_util.tree_leaves_with_path(jax.device_get(found))
    for (path, leaf), other in zip(found, jax.tree.leaves(right), strict=True):
        name = jax.tree_util.keystr(path)
        assert (leaf.shape, leaf.dtype) == (other.shape, other.dtype), name
        if leaf.dtype == np.int32:
            np.testing.assert_array_equal(leaf, other, err_msg=name)
        error = np.linalg.norm((leaf - other).ravel())
        assert error <= 1e-5 * np.linalg.norm(np.ravel(other)), name


def thorough(*case: Any) -> Any:
    return pytest.param(*case, marks=pytest.mark.thorough)


CASES = [
    ("nnx", PIPE, {"zero": 0}),
    thorough("nnx", Mesh(data=4), {"zero": 3}),
    thorough("nnx", Mesh(data=1), {}),
    thorough("nnx", Mesh(data=2), {"zero": 1, "unroll": 4, "remat": "none"}),
    thorough("nnx", PIPE, {"schedule": "gpipe", "remat": "none"}),
    thorough("nnx", Mesh(data=2, pipe=2), {"schedule": "gpipe", "zero": 3}),
    thorough("nnx", Mesh(data=2, pipe=2, tensor=2), {"zero": 1, "remat": "none"}),
    thorough("nnx", Mesh(data=1, pipe=2, tensor=2), {"remat": "dots"}),
    thorough("nnx", Mesh(data=2, pipe=2), {"schedule": "interleaved", "zero": 1}),
    thorough("nnx", PIPE, {"schedule": "interleaved", "remat": "none"}),
    thorough("nnx", Mesh(data=2, pipe=2), {"schedule": "zero_bubble", "zero": 0}),
    thorough("nnx", Mesh(data=1, pipe=4), {"schedule": "zero_bubble", "remat": "none"}),
    thorough("linen", PIPE, {}),
    thorough("linen", Mesh(data=4), {"zero": 3}),
    thorough("linen", Mesh(data=2, pipe=2), {"zero": 3, "remat": "none"}),
    thorough("linen", PIPE, {"schedule": "interleaved"}),
    thorough("linen", Mesh(data=2, pipe=2), {"schedule": "zero_bubble"}),
    thorough("sections", Mesh(data=2), {"remat": "none"}),
    thorough("sections", Mesh(data=2, pipe=2), {}),
    thorough("sections", PIPE, {"schedule": "interleaved", "remat": "none"}),
    thorough("sections", PIPE, {"schedule": "gpipe", "zero": 3}),
]


@pytest.mark.parametrize(("name", "mesh", "options"), CASES)
def test_state_changes_as_in_the_plain_loop(
    name: str, mesh: Mesh, options: dict
) -> None:
    engine, right = make_engine(name, mesh, **options), trained_plainly(name)
    assert not engine.spec.coupled
    params, state = start(name)
    engine.load_params(params)
    assert_near(engine.state.model_state, state)
    losses = [float(engine.step(batch)["loss"]) for batch in BATCHES]
    assert losses == pytest.approx(right.losses, rel=1e-5)
    assert_near(engine.state.params, right.params)
    assert_near(engine.state.model_state, right.state)
    before = jax.device_get(engine.state.model_state)
    evaluated = float(engine.evaluate(BATCHES[0])["loss"])
    assert evaluated == pytest.approx(right.evaluated, rel=1e-5)
    after = jax.device_get(engine.state.model_state)
    jax.tree.map(np.testing.assert_array_equal, before, after)


def test_state_of_the_plain_loop_matters() -> None:
    """So that another order, or another state in the backward pass, would be seen."""
    right, (_, state) = trained_plainly("nnx"), start("nnx")
    counts = right.state["blocks"]["down"]["calls"]
    np.testing.assert_array_equal(counts, np.full(4, STEPS * ACCUMULATE))
    for part, own in state.items():
        changed = right.state[part]
        for old, new in zip(
            jax.tree.leaves(own), jax.tree.leaves(changed), strict=True
        ):
            assert np.linalg.norm(new - old) > 0.1 * np.linalg.norm(old), part


@pytest.mark.thorough
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved"])
def test_checkpoint_with_state_goes_on_without_stages(schedule, tmp_path) -> None:
    """And ends as the plain loop does, which never stopped."""
    right = trained_plainly("nnx")
    cut = make_engine("nnx", Mesh(data=2, pipe=2), schedule=schedule)
    cut.load_params(start("nnx")[0])
    for batch in BATCHES[:2]:
        cut.step(batch)
    cut.save(tmp_path)
    cut.wait()
    one = make_engine("nnx", Mesh(data=1))
    one.restore(tmp_path)
    jax.tree.map(
        np.testing.assert_array_equal, one.state.model_state, cut.state.model_state
    )
    for engine in (one, cut):
        for batch in BATCHES[2:]:
            engine.step(batch)
        assert_near(engine.state.params, right.params)
        assert_near(engine.state.model_state, right.state)


@pytest.mark.thorough
@pytest.mark.parametrize("mesh", [Mesh(data=2), Mesh(data=2, pipe=2)])
def test_loss_with_state_is_checked_and_state_is_not_changed_by_it(
    mesh, checked_losses
) -> None:
    engine = make_engine("nnx", mesh)
    assert "loss_fn: checked to be a mean over rows" in str(engine.explain())
    engine.step(BATCHES[0])
    calls = engine.state.model_state["blocks"]["down"]["calls"]
    np.testing.assert_array_equal(calls, np.full(4, ACCUMULATE))


@pytest.mark.thorough
def test_model_of_an_engine_with_stages_has_the_state() -> None:
    engine = make_engine("nnx", PIPE)
    engine.step(BATCHES[0])
    model = engine.model()
    assert_near(model.state, jax.device_get(engine.state.model_state))
    loss = float(loss_fn(model, BATCHES[1]))
    assert loss == pytest.approx(float(engine.evaluate(BATCHES[1])["loss"]), rel=1e-5)
