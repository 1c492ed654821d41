"""Do several models with several losses train in one engine as in a plain loop?"""

import itertools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxpar
from jaxpar import tree
from jaxpar.models import make_decoder
from jaxpar.models.decoder.config import DecoderConfig
from jaxpar.optim import fused_adamw
from tests.equivalence.several_losses import (
    ROWS,
    RUNS,
    STATE,
    STEPS,
    batches,
    disc_loss,
    gen_loss,
    make_engine,
    perceptron,
    plain_run,
    trained,
)

CASES = [
    pytest.param(
        name,
        jaxpar.MeshShape(data=4, tensor=tensor),
        zero,
        id=f"{name}-zero{zero}-tensor{tensor}",
        marks=[]
        if (name, zero, tensor) == ("adversarial", 3, 2)
        else [pytest.mark.thorough],
    )
    for name, zero, tensor in itertools.product(RUNS, range(4), (1, 2))
]


def check_equals_plain(name: str, engine: Any) -> None:
    rounds, params = plain_run(name)
    found = trained(engine, list(RUNS[name].losses))
    # Losses are means of terms near 1, which may cancel.
    np.testing.assert_allclose(found, rounds, rtol=1e-5, atol=1e-6)
    weights = tree.merged(*engine.state.weights)
    for model in RUNS[name].models:
        for path, right in tree.named_leaves(params[model]).items():
            leaf = tree.named_leaves(weights[model])[path]
            np.testing.assert_allclose(leaf, right, rtol=2e-5, atol=2e-6)
    for path, right in tree.named_leaves(params.get("target", {})).items():
        average = engine.state.carried["critic"]["target"]["critic"]
        leaf = tree.named_leaves(average)[path]
        np.testing.assert_allclose(leaf, right, rtol=2e-5, atol=2e-6)


@pytest.mark.usefixtures("checked_losses")
@pytest.mark.parametrize(("name", "shape", "zero"), CASES)
def test_losses_in_turn_equal_a_plain_loop(name, shape, zero):
    engine = make_engine(name, shape, zero)
    check_equals_plain(name, engine)
    assert engine.steps == STEPS * len(RUNS[name].losses)
    for loss in RUNS[name].losses:
        assert int(engine.state.carried[loss]["step"]) == STEPS
        engine.loss(loss).verify()


@pytest.mark.thorough
@pytest.mark.parametrize("name", RUNS)
@pytest.mark.parametrize(
    "change",
    [
        {"accumulate": 2},
        {"coupled_batch": True},
        {"mesh": jaxpar.MeshShape(data=2, replica=2)},
    ],
    ids=str,
)
def test_micro_batches_coupling_and_replicas_change_nothing(name, change):
    check_equals_plain(name, make_engine(name, jaxpar.MeshShape(data=4), 2, **change))


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["adversarial", "actor and critic"])
def test_fused_optimizers_keep_their_own_form(name):
    """One loss's parameters are packed in buckets, another's are not."""
    losses = list(RUNS[name].losses)
    fused = fused_adamw(1e-2, weight_decay=0.0)
    optimizer = {losses[0]: fused, losses[1]: optax.adam(1e-2)}
    engine = make_engine(
        name, jaxpar.MeshShape(data=4, tensor=2), 2, optimizer=optimizer
    )
    check_equals_plain(name, engine)


def test_a_loss_changes_what_it_trains_and_nothing_else():
    engine = make_engine("adversarial", jaxpar.MeshShape(data=4), 1)
    for loss, other in (("disc", "gen"), ("gen", "disc")):
        before = jax.device_get(engine.state)
        engine.step(batches()[0], loss=loss)
        after = jax.device_get(engine.state)
        jax.tree.map(
            np.testing.assert_array_equal, before.params[other], after.params[other]
        )
        assert before.opt_state[other] is not after.opt_state[other]
        jax.tree.map(
            np.testing.assert_array_equal,
            before.opt_state[other],
            after.opt_state[other],
        )
        assert int(after.carried[other]["step"]) == int(before.carried[other]["step"])
        leaf = after.params[loss]["up"]["kernel"] - before.params[loss]["up"]["kernel"]
        assert np.abs(leaf).max() > 1e-3


def test_state_moves_to_another_mesh_and_goes_on(tmp_path):
    name = "actor and critic"
    engine = make_engine(name, jaxpar.MeshShape(data=4, tensor=2), 3)
    losses = list(RUNS[name].losses)
    trained(engine, losses)
    engine.save(tmp_path)
    engine.wait()
    other = make_engine(name, jaxpar.MeshShape(data=2), 1)
    other.restore(tmp_path)
    own, found = (tree.named_leaves(x.state) for x in (engine, other))
    assert own.keys() == found.keys()
    for path, leaf in own.items():
        if not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            np.testing.assert_array_equal(np.asarray(leaf), np.asarray(found[path]))
    np.testing.assert_allclose(
        trained(engine, losses), trained(other, losses), rtol=1e-5
    )


@pytest.mark.thorough
def test_options_are_each_losss_own():
    """Another batch, another number of micro-batches, another limit of the norm."""
    few = {"noise": batches()[0]["noise"][:8]}
    change = {
        "sample_batch": {"disc": batches()[0], "gen": few},
        "accumulate": {"disc": 2},
        "clip_norm": {"gen": 1e-3},
        "optimizer": {"disc": optax.adam(1e-2), "gen": optax.sgd(1.0)},
    }
    engine = make_engine("adversarial", jaxpar.MeshShape(data=4), 2, **change)
    assert [engine.loss(k).spec.accumulate for k in ("disc", "gen")] == [2, 1]
    loss = float(engine.step(batches()[0], loss="disc")["loss"])
    assert loss == pytest.approx(plain_run("adversarial")[0][0][0], rel=1e-5)
    before = jax.device_get(engine.state.params["gen"])
    assert float(engine.step(few, loss="gen")["grad_norm"]) > 1e-3
    moved = jax.tree.map(
        lambda a, b: np.sum((a - b) ** 2),
        before,
        jax.device_get(engine.state.params["gen"]),
    )
    assert sum(jax.tree.leaves(moved)) ** 0.5 == pytest.approx(1e-3, rel=1e-3)
    with pytest.raises(ValueError, match="batch"):
        engine.step(batches()[0], loss="gen")


def test_scale_and_skipped_steps_are_each_losss_own():
    engine = make_engine("adversarial", jaxpar.MeshShape(data=4), 1, precision="fp16")
    bad = {**batches()[0], "noise": np.full((ROWS, STATE), np.inf, np.float32)}
    engine.step(bad, loss="gen")
    metrics = engine.step(batches()[0], loss="disc")
    assert float(metrics["skipped"]) == 0
    assert float(engine.step(batches()[0], loss="gen")["skipped"]) == 1
    carried = engine.state.carried
    scales = {k: carried[k]["loss_scale"] for k in ("gen", "disc")}
    assert int(scales["gen"].skipped) == 1
    assert int(scales["disc"].skipped) == 0


class Noisy(nnx.Module):
    """Dropout and batch statistics."""

    def __init__(self, rngs: nnx.Rngs):
        self.inner = nnx.Linear(STATE, STATE, rngs=rngs)
        self.norm = nnx.BatchNorm(STATE, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.dropout(self.norm(self.inner(x)))


@pytest.mark.thorough
def test_only_the_state_of_what_a_loss_trains_changes():
    models = {**RUNS["adversarial"].models, "gen": lambda rngs: Noisy(rngs)}
    engine = make_engine(
        "adversarial", jaxpar.MeshShape(data=4), 1, model=models, rules={}
    )
    assert set(engine.state.model_state) == {"gen"}
    before = jax.device_get(engine.state.model_state)
    engine.step(batches()[0], loss="disc")
    jax.tree.map(np.testing.assert_array_equal, engine.state.model_state, before)
    engine.step(batches()[0], loss="gen")
    mean = engine.state.model_state["gen"]["norm"]["mean"]
    assert np.abs(np.asarray(mean) - before["gen"]["norm"]["mean"]).max() > 1e-3


class Dropping(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.inner = nnx.Linear(STATE, STATE, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.dropout(self.inner(x))


@pytest.mark.thorough
def test_masks_are_those_of_one_device_and_none_in_what_nothing_trains():
    def losses(shape: jaxpar.MeshShape, **change: Any) -> list[list[float]]:
        models = {**RUNS["adversarial"].models, "gen": lambda rngs: Dropping(rngs)}
        given = "adversarial", shape, 2
        engine = make_engine(*given, **({"model": models, "rules": {}} | change))
        return trained(engine, list(change.get("loss_fn", RUNS["adversarial"].losses)))

    one, many = (losses(jaxpar.MeshShape(data=data)) for data in (1, 8))
    np.testing.assert_allclose(one, many, rtol=1e-5)

    def twice(models: Any, batch: Any) -> Any:
        """Two calls of the generator agree only without dropout."""
        found = [models["gen"](batch["noise"]) for _ in range(2)]
        return disc_loss(models, batch), {"gap": jnp.abs(found[0] - found[1]).mean()}

    models = {**RUNS["adversarial"].models, "gen": lambda rngs: Dropping(rngs)}
    for loss_fn, dropped in (
        ({"disc": twice}, False),
        ({"disc": twice, "gen": gen_loss}, True),
    ):
        optimizer = dict.fromkeys(loss_fn, optax.adam(1e-2))
        change = {"model": models, "loss_fn": loss_fn, "optimizer": optimizer}
        shape = jaxpar.MeshShape(data=4)
        engine = make_engine("adversarial", shape, 1, rules={}, **change)
        gap = float(engine.step(batches()[0], loss="disc")["gap"])
        assert (gap > 0) == dropped


@pytest.mark.thorough
def test_linen_models_are_initialised_by_the_losses():
    class Dense(nn.Module):
        features: int

        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            return nn.Dense(self.features)(jnp.tanh(nn.Dense(64)(x)))

    models = {"gen": Dense(STATE), "disc": perceptron(STATE, 1)}

    def losses(data: int, zero: int) -> list[list[float]]:
        shape = jaxpar.MeshShape(data=data)
        engine = make_engine("adversarial", shape, zero, model=models, rules={})
        assert list(engine.state.params["gen"]) == ["Dense_0", "Dense_1"]
        return trained(engine, ["disc", "gen"])

    np.testing.assert_allclose(losses(1, 0), losses(8, 3), rtol=1e-5)


@pytest.mark.thorough
def test_a_gpt_is_tuned_beside_its_reference():
    config = DecoderConfig(
        num_layers=2, num_heads=2, width=32, seq_len=8, vocab_size=32
    )
    gpt = make_decoder(config)
    tokens = np.random.default_rng(1).integers(0, 32, (2, 8, 9)).astype(np.int32)
    batch = {"chosen": tokens[0], "rejected": tokens[1]}

    def score(model: Any, tokens: jax.Array) -> jax.Array:
        found = jax.nn.log_softmax(model(tokens[:, :-1]))
        return jnp.take_along_axis(found, tokens[:, 1:, None], -1).sum((1, 2))

    def preference(models: Any, batch: Any) -> jax.Array:
        both = {
            name: score(model, batch["chosen"]) - score(model, batch["rejected"])
            for name, model in models.items()
        }
        return jnp.mean(jax.nn.softplus(both["reference"] - both["policy"]))

    def losses(data: int, zero: int) -> list[float]:
        engine = jaxpar.initialize(
            model={"policy": gpt, "reference": gpt},
            loss_fn={"policy": preference},
            optimizer=optax.adam(1e-2),
            sample_batch=batch,
            mesh=jaxpar.make_mesh(jaxpar.MeshShape(data=data), jax.devices()[:data]),
            zero=zero,
            init_from={"reference": "policy"},
        )
        found = [float(engine.step(batch, loss="policy")["loss"]) for _ in range(3)]
        assert set(engine.state.frozen) == {"reference"}
        return found

    right = losses(1, 0)
    assert right[0] == pytest.approx(np.log(2), rel=1e-6)
    assert right[2] < 0.9 * right[0]
    np.testing.assert_allclose(losses(8, 3), right, rtol=1e-5)


def test_models_are_handed_out_evaluated_and_loaded():
    engine = make_engine("adversarial", jaxpar.MeshShape(data=4), 3)
    right = plain_run("adversarial")[0][0][0]
    models = engine.model()
    assert list(models) == ["gen", "disc"]
    assert float(disc_loss(models, batches()[0])) == pytest.approx(right, rel=1e-5)
    found = float(engine.evaluate(batches()[0], loss="disc")["loss"])
    assert found == pytest.approx(right, rel=1e-5)
    params = jax.device_get(engine.state.params)
    engine.load_params(jax.tree.map(np.zeros_like, params))
    zero = float(engine.evaluate(batches()[0], loss="disc")["loss"])
    assert zero == pytest.approx(2 * np.log(2), rel=1e-5)
    given = {"params": {"disc": params["disc"]}, "loss": "disc"}
    assert float(engine.evaluate(batches()[0], **given)["loss"]) != zero
