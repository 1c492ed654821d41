"""Does the engine refuse a batch that differs, and a run that fp16 cannot hold?

Whatever is refused leaves the state as it was.
"""

import copy
import pickle
import threading
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxpar
from jaxpar.step import loss_scale

ROWS = 16


def sample(rows=ROWS, dtype: Any = np.float32):
    return {"x": np.ones((rows, 4), dtype)}


RIGHT: dict[str, Any] = {
    "model": lambda rngs: nnx.Linear(4, 6, rngs=rngs),
    "loss_fn": lambda model, batch: jnp.mean((model(batch["x"]) - 1.0) ** 2),
    "optimizer": optax.sgd(0.1),
    "sample_batch": sample(),
    "mesh": jaxpar.MeshShape(data=4, tensor=2),
}


def make_engine(**change: Any) -> jaxpar.Engine:
    return jaxpar.initialize(**(RIGHT | change))


@pytest.fixture(scope="module")
def engine():
    return make_engine()


BATCHES = {
    "nothing": (
        None,
        r"batch: its structure PyTreeDef\(None\) differs from the sample",
    ),
    "other leaves": (
        {"x": np.ones((ROWS, 4), np.float32), "y": np.ones(ROWS)},
        r"batch: its structure .* differs from the sample batch's .*\. Pass the same "
        r"leaves as in sample_batch",
    ),
    "fewer rows": (
        sample(8),
        r"batch: leaf x is float32\[8, 4\], but must be float32\[16, 4\], as in "
        r"sample_batch\.",
    ),
    "other dtype": (
        sample(dtype=np.int32),
        r"leaf x is int32\[16, 4\], but must be",
    ),
    "a number": ({"x": 1.0}, r"batch: leaf x is float, not an array of numbers; con"),
}


@pytest.mark.parametrize("case", BATCHES)
def test_batch_that_differs_is_said_and_the_state_kept(case, engine, compiled):
    batch, message = BATCHES[case]
    before = jax.device_get(engine.state.params)
    with pytest.raises(ValueError, match=message):
        engine.step(batch)
    with pytest.raises(ValueError, match="batch: "):
        engine.train_step(engine.state, batch)
    assert compiled == []
    assert int(engine.state.step) == 0
    after = jax.device_get(engine.state.params)
    assert jax.tree.all(jax.tree.map(np.array_equal, before, after))


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (sample(0), r"batch: it has no rows, on any process; pass one or more"),
        ({"x": np.ones((8, 5), np.float32)}, r"leaf x is float32\[8, 5\], but must be"),
    ],
)
def test_batch_to_evaluate_that_does_not_fit_is_said(batch, message, engine, compiled):
    with pytest.raises(ValueError, match=message):
        engine.evaluate(batch)
    assert compiled == []


def test_parameters_of_a_half_precision_model_rest_as_fp32_masters():
    engine = make_engine(
        **{"model": lambda rngs: nnx.Linear(4, 6, param_dtype=jnp.bfloat16, rngs=rngs)}
    )
    dtypes = {leaf.dtype for leaf in jax.tree.leaves(engine.state.params)}
    assert dtypes == {jnp.dtype(jnp.float32)}


def test_overflow_at_the_least_loss_scale_stops_the_run(monkeypatch):
    """The scale starts at its minimum, with no overflow left to forgive."""
    monkeypatch.setattr(loss_scale, "START", 1.0)
    monkeypatch.setattr(loss_scale, "HYSTERESIS", 1)
    engine = make_engine(**{"precision": "fp16", "zero": 0})
    batch = {"x": np.full((ROWS, 4), np.inf, np.float32)}
    message = (
        r"loss scale: gradients overflowed with the scale at its minimum of 1, so "
        r"fp16 cannot hold them\. Lower the learning rate, look for non-finite inputs, "
        r"or use precision='bf16'"
    )
    before = jax.device_get(engine.state.params)
    engine.step(batch)
    engine.step(batch)
    with pytest.raises(FloatingPointError, match=message):
        engine.step(batch)
    after = jax.device_get(engine.state.params)
    assert jax.tree.all(jax.tree.map(np.array_equal, before, after))


@pytest.mark.parametrize("copied", [pickle.dumps, copy.deepcopy])
def test_engine_is_not_pickled_or_copied(engine, copied):
    with pytest.raises(TypeError, match=r"Write its state with engine\.save\(folder\)"):
        copied(engine)


def test_second_thread_is_refused(engine):
    """One thread stands in the middle of a step when the other begins."""
    entered, done, caught = threading.Event(), threading.Event(), []

    class Slow(dict):
        """A batch whose flattening waits."""

    def flatten(slow):
        entered.set()
        assert done.wait(30)
        return tuple(slow.values()), tuple(slow)

    jax.tree_util.register_pytree_node(Slow, flatten, lambda k, v: dict(zip(k, v)))  # noqa: B905

    def first():
        with pytest.raises(ValueError, match="batch: its structure"):
            engine.step(Slow(sample()))

    thread = threading.Thread(target=first)
    thread.start()
    assert entered.wait(30)
    with pytest.raises(RuntimeError, match=r"engine\.step: another thread is in a"):
        engine.step(sample())
    done.set()
    thread.join()
    assert not caught
    engine.step(sample())


def test_train_step_leaves_the_engine_whole():
    engine, other = make_engine(), make_engine()
    state, found = engine.train_step(engine.state, sample())
    _, second = engine.train_step(state, sample())
    assert [engine.step(sample())["loss"] for _ in range(2)] == [
        found["loss"],
        second["loss"],
    ]
    assert other.step(sample())["loss"] == found["loss"]


CALLS_OF_THE_STATE = {
    "step": lambda engine, folder: engine.step(sample()),
    "train_step": lambda engine, folder: engine.train_step(engine.state, sample()),
    "evaluate": lambda engine, folder: engine.evaluate(sample()),
    "model": lambda engine, folder: engine.model(),
    "save": lambda engine, folder: engine.save(folder),
    "restore": lambda engine, folder: engine.restore(folder),
    "probe": lambda engine, folder: engine.probe(),
}


@pytest.mark.parametrize("call", CALLS_OF_THE_STATE)
def test_setting_a_leaf_of_the_state_is_noticed_once(engine, call, tmp_path):
    before = jax.device_get(engine.state.params)
    engine.save(tmp_path)
    engine.wait()
    engine.state.params["kernel"] = jnp.zeros((4, 6))
    with pytest.raises(ValueError, match=r"params/kernel was set.*load_params\(params"):
        CALLS_OF_THE_STATE[call](engine, tmp_path)
    CALLS_OF_THE_STATE[call](engine, tmp_path / "other" if call == "save" else tmp_path)
    engine.load_params(before)


def test_state_that_was_set_may_be_loaded():
    engine = make_engine()
    engine.state.params["kernel"] = jnp.zeros((4, 6))
    engine.load_params(engine.state.params)
    assert not np.any(engine.state.params["kernel"])


def test_model_is_gone_after_the_next_step_even_if_numpy_saw_it():
    """Of device 0 alone it was there still, and a call of it stopped for ever."""
    engine = make_engine()
    model = engine.model()
    np.asarray(model.kernel[...])
    engine.step(sample())
    with pytest.raises(RuntimeError, match="deleted"):
        model(sample()["x"])
    engine.step(sample())
    engine.wait()


def test_loaded_parameters_stay_the_users():
    engine = make_engine()
    given = jax.tree.map(jnp.copy, engine.state.params)
    engine.load_params(given)
    engine.step(sample())
    assert np.isfinite(jax.device_get(given["kernel"])).all()


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"kernel": np.ones((4, 6))}, r"params: missing \['bias'\] and unknown \[\]"),
        ({"kernel": np.ones((4, 6)), "bias": np.ones(7)}, r"bias is float.*\[7\], but"),
        ({"kernel": np.ones((4, 6)), "bias": np.ones(6, np.int32)}, "bias is int32"),
    ],
)
def test_params_that_do_not_fit_are_refused(engine, params, message):
    with pytest.raises(ValueError, match=message):
        engine.load_params(params)
    with pytest.raises(ValueError, match=message):
        engine.evaluate(sample(), params=params)
