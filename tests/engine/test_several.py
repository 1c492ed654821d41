"""Which arguments for several models and losses are refused, and what does each get?"""

import re
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import linen, nnx

import jaxpar
from jaxpar.optim import WithReduction
from jaxpar.tree import named_leaves
from tests.equivalence.several_losses import (
    RUNS,
    STATE,
    batches,
    disc_loss,
    gen_loss,
    make_engine,
    perceptron,
)
from tests.optim.int8_reduction import Int8Reduction
from tests.optim.numpy_adam import NumpyAdam

ADAM = optax.adam(1e-3)
BAD: dict[str, tuple[dict[str, Any], str]] = {
    "pipe": (
        {"mesh": jaxpar.MeshShape(data=2, pipe=2)},
        "mesh: pipe=2 cuts one model into stages, but model has 2 (gen, disc)",
    ),
    "one loss": ({"loss_fn": disc_loss}, "loss_fn: with several models (gen, disc)"),
    "no loss at all": ({"loss_fn": {}}, "loss_fn={} is empty; give at least one"),
    "no model at all": ({"model": {}}, "model={} is empty; give at least one"),
    "slash": (
        {"loss_fn": {"gen/one": gen_loss}},
        "loss_fn: the name 'gen/one' must be a word without a slash.",
    ),
    "no optimizer": (
        {"optimizer": {"gen": ADAM}},
        "optimizer: it has none for the loss 'disc'",
    ),
    "unknown loss": (
        {"optimizer": {"gen": ADAM, "disc": ADAM, "dics": ADAM}},
        "optimizer: 'dics' is none of the losses (disc, gen).",
    ),
    "no model": (
        {"loss_fn": {"both": gen_loss}, "optimizer": ADAM},
        "trains: the loss 'both' has no model of its name (gen, disc)",
    ),
    "twice": (
        {"trains": {"gen": ["*/up/*"]}},
        "trains: disc/up/bias is trained by the losses 'disc' and 'gen'",
    ),
    "nothing": (
        {"trains": {"gen": ["gen/down/*"]}},
        "trains['gen']: 'gen/down/*' matches no parameter",
    ),
    "no loss": (
        {"trains": {"other": ["gen/*"]}},
        "trains: 'other' is none of the losses (disc, gen)",
    ),
    "trainable": ({"trainable": ["gen/*"]}, "trainable: with several models each loss"),
    "copy": (
        {"init_from": {"gen": "disc"}},
        "init_from: 'gen' begins as a copy of 'disc', but they differ in",
    ),
    "copy of none": (
        {"init_from": {"gen": "dis"}},
        "init_from: 'dis' is none of the models (gen, disc).",
    ),
    "copy of itself": ({"init_from": {"gen": "gen"}}, "init_from: 'gen' copies 'gen'"),
    "host": (
        {"optimizer": {"gen": ADAM, "disc": NumpyAdam(1e-3)}},
        "optimizer: NumpyUpdate of the loss 'disc' works on the host between two",
    ),
    "per shard": (
        {"optimizer": {"gen": ADAM, "disc": WithReduction(ADAM, Int8Reduction())}},
        "carried: 'reduction' of the loss 'disc' is of each data shard, or not saved",
    ),
    "average": (
        {"carried": {"gen": [jaxpar.Ema(0.9, name="disc")]}},
        "carried: the average 'disc' of the loss 'gen' has the name of a model",
    ),
    "two averages": (
        {"carried": [jaxpar.Ema(0.9)]},
        "carried: the average 'ema' of the loss 'gen' has the name of a model or of "
        "another average, by which losses call it; give each loss its own, by another "
        "name: carried={'gen': [jaxpar.Ema(..., name='gen_average')]}.",
    ),
    "a batch like losses": (
        {"sample_batch": {"gen": jnp.ones((8, STATE)), "noise": jnp.ones((8, STATE))}},
        "sample_batch: it has none for the loss 'disc'; give one for each of disc, "
        "gen, or one for all (a batch with a loss's name among its keys: {'disc': "
        "batch, ...}).",
    ),
    "count": (
        {"carried": {"gen": [jaxpar.Ema(0.9, name="step")]}},
        "carried: 'step' is the name of two parts (loss_scale, reduction and step are",
    ),
    "copy of another state": (
        {
            "model": {
                "gen": lambda rngs: nnx.BatchNorm(STATE, rngs=rngs),
                "disc": lambda rngs: nnx.LayerNorm(STATE, rngs=rngs),
            },
            "init_from": {"disc": "gen"},
        },
        "init_from: 'disc' begins as a copy of 'gen', but they differ in mean, var",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_arguments_are_named(case):
    change, message = BAD[case]
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        make_engine("adversarial", jaxpar.MeshShape(data=4), 1, rules={}, **change)


def test_unknown_models_and_losses_are_named():
    def wrong(models: Any, batch: Any) -> Any:
        return disc_loss({"gen": models["gan"], "disc": models["disc"]}, batch)

    with pytest.raises(KeyError, match="there is no model 'gan'; the models are 'gen'"):
        make_engine(
            "adversarial",
            jaxpar.MeshShape(data=4),
            1,
            loss_fn={"disc": wrong, "gen": gen_loss},
        )
    engine = make_engine("adversarial", jaxpar.MeshShape(data=4), 1)
    with pytest.raises(ValueError, match="this engine has 2 losses; name one"):
        engine.step(batches()[0])
    with pytest.raises(ValueError, match="loss='dics' is none of this engine's losses"):
        engine.step(batches()[0], loss="dics")
    with pytest.raises(ValueError, match=r"engine\.loss\('disc'\)\.explain"):
        engine.explain()


def test_arguments_for_several_are_refused_for_one():
    one: dict[str, Any] = {
        "model": perceptron(STATE, 1),
        "loss_fn": lambda model, batch: jnp.mean(model(batch["state"])),
        "optimizer": ADAM,
        "sample_batch": batches()[0],
    }
    with pytest.raises(ValueError, match=r"trains=.* is for several models"):
        jaxpar.initialize(**one, trains={"a": ["*"]})
    with pytest.raises(ValueError, match=r"init_from=.* is for several models"):
        jaxpar.initialize(**one, init_from={"a": "b"})
    engine = jaxpar.initialize(**one)
    with pytest.raises(ValueError, match="this engine has one loss, which has no name"):
        engine.step(batches()[0], loss="a")


def test_each_loss_knows_what_it_trains_and_what_it_communicates():
    """The closed form of a loss has its own gradients, and gathers everything."""
    engine = make_engine("adversarial", jaxpar.MeshShape(data=8), 1)
    for loss, other in (("gen", "disc"), ("disc", "gen")):
        seen = engine.loss(loss).seen
        assert {leaf.name for leaf in seen.trained} == {
            f"{loss}/{name}" for name in named_leaves(engine.state.params[loss])
        }
        assert {leaf.name.split("/")[0] for leaf, _ in seen.frozen} == {other}
        assert {dtype for _, dtype in seen.frozen} == {jnp.dtype("float32")}
    assert {leaf.name.split("/")[0] for leaf in engine.placement.trained} == set(
        RUNS["adversarial"].models
    )


def test_what_another_loss_trains_is_stored_in_fp32_whatever_its_own_dtype():
    def half(rngs: nnx.Rngs) -> nnx.Module:
        return nnx.Linear(STATE, STATE, param_dtype=jnp.bfloat16, rngs=rngs)

    models = {**RUNS["adversarial"].models, "gen": half}
    shape = jaxpar.MeshShape(data=8)
    engine = make_engine("adversarial", shape, 1, model=models, rules={})
    assert {dtype for _, dtype in engine.loss("disc").seen.frozen} == {
        jnp.dtype("float32")
    }
    engine.loss("disc").verify()


def test_overflows_at_the_least_scale_are_each_losss_own():
    shape = jaxpar.MeshShape(data=4)
    engine = make_engine("adversarial", shape, 1, precision="fp16")
    own = engine.loss("gen")
    shown = jax.eval_shape(
        own.program.step.step, jax.tree.leaves(engine.placement.packed), batches()[0]
    )
    assert [flag.shape for flag in shown[2]] == [()]
    bad = {**batches()[0], "noise": batches()[0]["noise"] * float("inf")}

    def overflow() -> None:
        for _ in range(60):
            engine.step(bad, loss="gen")

    with pytest.raises(FloatingPointError, match=r"least scale|loss scale"):
        overflow()


@pytest.mark.thorough
def test_linen_models_are_planned_too():
    """They are initialised by the losses again, in the process that compiles."""
    models = {"gen": linen.Dense(STATE), "disc": linen.Dense(1)}
    shape = jaxpar.MeshShape(data=8)
    engine = make_engine("adversarial", shape, 1, model=models, rules={})
    again = jaxpar.initialize(**{**engine.arguments, "mesh": engine.mesh})
    assert again.placement.abstract == engine.placement.abstract


def test_an_average_is_stored_and_gathered_as_what_it_averages():
    engine = make_engine("actor and critic", jaxpar.MeshShape(data=4, tensor=2), 3)
    own = engine.loss("actor").seen.leaves
    for name in named_leaves(engine.state.params["critic"]):
        assert own[f"target/{name}"].stored_spec == own[f"critic/{name}"].stored_spec
    kernels = (
        engine.state.carried["critic"]["target"]["critic"]["up"]["kernel"],
        engine.state.params["critic"]["up"]["kernel"],
    )
    assert kernels[0].sharding == kernels[1].sharding
    assert "tensor" in jax.tree.leaves(tuple(kernels[0].sharding.spec))


def test_explanation_and_plan_of_a_loss():
    engine = make_engine("preferences", jaxpar.MeshShape(data=8), 3)
    rows = {row.name: row for row in engine.loss("preference").explain().leaves}
    own = rows["params/preference/policy/out/kernel"]
    base = rows["frozen/reference/out/kernel"]
    assert own.why == base.why == "zero: data splits dim 0"
    assert own.bytes_per_device == base.bytes_per_device
    assert not any("/reference/" in name for name in rows if "opt_state" in name)
    plan = jaxpar.plan(engine.loss("preference"), "cpu:8")
    assert plan.num_params == sum(
        leaf.size for leaf in jax.tree.leaves(engine.state.params)
    )


class Doubled(nnx.Module):
    """An augmentation: a model without parameters."""

    def __init__(self, rngs: nnx.Rngs):
        del rngs

    def __call__(self, x: jax.Array) -> jax.Array:
        return 2 * x


class DoubledLinen(linen.Module):
    @linen.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return 2 * x


@pytest.mark.parametrize("doubled", [Doubled, DoubledLinen()], ids=["nnx", "linen"])
def test_model_without_parameters_may_be_among_them(doubled):
    def double_gen(models: Any, batch: Any) -> Any:
        own = {**models, "gen": lambda x: models["doubled"](models["gen"](x))}
        return gen_loss(own, batch)

    engine = make_engine(
        "adversarial",
        jaxpar.MeshShape(data=4),
        1,
        model={**RUNS["adversarial"].models, "doubled": doubled},
        loss_fn={"disc": disc_loss, "gen": double_gen},
        carried={"disc": [jaxpar.Ema(0.9)]},
    )
    for loss in ("disc", "gen"):
        assert jnp.isfinite(engine.step(batches()[0], loss=loss)["loss"])
    assert set(engine.model()) == {"gen", "disc", "doubled"}


def test_parameters_of_every_model_are_loaded_from_their_states():
    engine = make_engine("adversarial", jaxpar.MeshShape(data=4), 1)
    states = {name: nnx.state(m, nnx.Param) for name, m in engine.model().items()}
    zeros = jax.tree.map(jnp.zeros_like, states)
    engine.load_params(zeros)
    assert not any(map(jnp.any, jax.tree.leaves(engine.state.params)))


def test_average_of_a_part_is_said_not_to_be_callable():
    def student(models: Any, batch: Any) -> Any:
        return jnp.mean(models["slow"](batch["noise"]) - models["gen"](batch["noise"]))

    with pytest.raises(KeyError, match="if its loss trains one model, and all of it"):
        make_engine(
            "adversarial",
            jaxpar.MeshShape(data=4),
            1,
            rules={},
            loss_fn={"gen": student},
            optimizer=ADAM,
            trains={"gen": ["gen/up/*"]},
            carried={"gen": [jaxpar.Ema(0.9, name="slow")]},
        )


def test_linen_model_that_no_loss_calls_is_named():
    models = {**RUNS["adversarial"].models, "unused": linen.Dense(3)}
    with pytest.raises(TypeError, match=r"^model 'unused': loss_fn: it never called"):
        make_engine("adversarial", jaxpar.MeshShape(data=4), 1, model=models)


@pytest.mark.usefixtures("checked_losses")
def test_loss_that_is_a_sum_is_named():
    def total(models: Any, batch: Any) -> Any:
        return 8 * gen_loss(models, {"noise": batch["noise"] - 0}) * len(batch["noise"])

    losses = {"disc": disc_loss, "gen": total}
    engine = make_engine("adversarial", jaxpar.MeshShape(data=4), 1, loss_fn=losses)
    engine.step(batches()[0], loss="disc")
    with pytest.raises(ValueError, match=r"^loss_fn\['gen'\]: the loss is not a mean"):
        engine.step(batches()[0], loss="gen")
