"""Does a run whose parameters and gradients travel coded, in two hops, train as plain?

Splitting the state over replicas changes no number. A code is off by half of 1/127 (8
bits) or 1/7 (4 bits) of the largest in its block at most. Where that is three standard
deviations, and errors are uniform, a gradient is off by 0.7 % or 12 % of its norm in
each of two hops. Tails are heavier than that: the bounds are two to four times it.
"""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest

import jaxpar
from jaxpar import tree
from jaxpar.models import decoder_loss, make_decoder
from jaxpar.models.experts import ExpertsConfig
from jaxpar.optim import ZeroPlusPlus, diloco, fused_adamw, onebit_adam
from tests.equivalence.looped_gpt import CONFIG, batches
from tests.equivalence.perceptron import Net, loss_fn
from tests.equivalence.perceptron import batches as rows
from tests.equivalence.problems import distance

ADAMW = optax.adamw(1e-3, eps=1e-6)
SECONDARY = {"weight_bits": None, "gradient_bits": None, "secondary": True}


ONE_BIT = onebit_adam(1e-3, 2)
DILOCO = diloco(optax.adam(1e-3), replicas=2)


def make(zero: int | ZeroPlusPlus, *, tensor: int = 1, **given: Any) -> jaxpar.Engine:
    shape = given.pop("shape", jaxpar.MeshShape(replica=2, data=2, tensor=tensor))
    return jaxpar.initialize(
        model=make_decoder(CONFIG),
        loss_fn=decoder_loss,
        optimizer=given.pop("optimizer", ADAMW),
        sample_batch=batches()[0],
        mesh=jaxpar.make_mesh(shape, jax.devices()[: shape.num_devices]),
        zero=zero,
        **{"check_loss": False, **given},
    )


def length(one: Any, other: Any) -> float:
    """Of the difference of two trees."""
    one, other = jax.device_get((one, other))
    return float(optax.tree.norm(jax.tree.map(np.subtract, one, other)))


def losses_of(engine: jaxpar.Engine) -> list[float]:
    return [float(engine.step(batch)["loss"]) for batch in batches()]


@pytest.mark.parametrize(
    ("stage", "tensor", "options"),
    [
        (3, 2, {"accumulate": 2, "clip_norm": 0.5}),
        *(
            pytest.param(*case, marks=pytest.mark.thorough)
            for case in [
                (1, 1, {}),
                (2, 2, {"accumulate": 2}),
                (3, 1, {"prefetch": True}),
                (3, 1, {"precision": "fp16"}),
            ]
        ),
    ],
)
def test_replicas_that_split_the_state_change_no_number(stage, tensor, options) -> None:
    own = make(ZeroPlusPlus(stage, **SECONDARY), tensor=tensor, **options)
    plain = make(stage, tensor=tensor, **options)
    bound = 2e-3 if "precision" in options else 1e-5
    assert losses_of(own) == pytest.approx(losses_of(plain), rel=bound)
    own.verify()
    own.probe()
    held = own.state.opt_state[0].mu
    largest = max(jax.tree.leaves(held), key=lambda x: x.size)
    assert largest.addressable_shards[0].data.size * 4 * tensor == largest.size
    right = float(plain.evaluate(batches()[0])["loss"])
    assert float(own.evaluate(batches()[0])["loss"]) == pytest.approx(right, rel=bound)


@pytest.mark.thorough
def test_replicas_that_split_the_state_are_workers_of_signs_too() -> None:
    plus = ZeroPlusPlus(1, **SECONDARY)
    own, plain = make(plus, optimizer=ONE_BIT), make(1, optimizer=ONE_BIT)
    assert losses_of(own) == pytest.approx(losses_of(plain), rel=1e-5)
    own.verify()


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("optimizer", "options"),
    [
        (fused_adamw(1e-3), {}),
        (ADAMW, {"offload": jaxpar.Offload(piece_mb=0.001)}),
        (ADAMW, {"offload": jaxpar.Offload(update="host", piece_mb=0.001)}),
        (ADAMW, {"carried": [jaxpar.Ema(0.9)]}),
        (optax.lamb(1e-3), {}),
    ],
    ids=["fused", "offload", "host", "average", "lamb"],
)
def test_it_composes_with_other_updates(optimizer, options) -> None:
    options = {"optimizer": optimizer, "tensor": 2, **options}
    right = losses_of(make(3, **options))
    split = make(ZeroPlusPlus(3, **SECONDARY), **options)
    assert losses_of(split) == pytest.approx(right, rel=1e-5)
    coded = make(ZeroPlusPlus(3, secondary=True), **options)
    assert losses_of(coded) == pytest.approx(right, rel=1e-3)
    coded.verify()


@pytest.mark.thorough
def test_a_checkpoint_goes_to_replicas_that_do_not_split(tmp_path: Path) -> None:
    own, plain = make(ZeroPlusPlus(3, **SECONDARY)), make(1)
    losses_of(own)
    own.save(tmp_path)
    own.wait()
    plain.restore(tmp_path)
    assert distance(own.state.params, plain.state.params) == 0
    assert losses_of(own) == pytest.approx(losses_of(plain), rel=1e-5)


ALL = {"stage": 3, "gradient_bits": 4, "secondary": True}
IN_8 = {"stage": 3, "secondary": True}


@pytest.mark.parametrize(
    ("given", "tensor", "options", "bound"),
    [
        (ALL, 2, {"accumulate": 2}, 0.3),
        *(
            pytest.param(*case, marks=pytest.mark.thorough)
            for case in [
                ({"stage": 3, "gradient_bits": None}, 1, {}, 3e-2),
                ({"stage": 1, "weight_bits": None}, 1, {"clip_norm": 0.5}, 3e-2),
                ({"stage": 2, "weight_bits": None, "gradient_bits": 4}, 2, {}, 0.3),
                (IN_8, 1, {"precision": "fp16"}, 5e-2),
                (IN_8, 1, {"precision": "bf16"}, 5e-2),
                ({"stage": 3}, 1, {"prefetch": True}, 3e-2),
                ({**ALL, "inside_bits": 8}, 2, {}, 0.2),
            ]
        ),
    ],
)
def test_coded_runs_train_nearly_as_plain_ones(given, tensor, options, bound) -> None:
    """And keep to the bytes that are said."""
    options = {"optimizer": optax.sgd(0.1), **options}
    own = make(ZeroPlusPlus(**{"block": 64, **given}), tensor=tensor, **options)
    plain = make(given["stage"], tensor=tensor, **options)
    first = jax.device_get(plain.state.params)
    losses, right = losses_of(own), losses_of(plain)
    assert losses == pytest.approx(right, rel=2e-2)
    moved = length(plain.state.params, first)
    assert 1e-4 < length(own.state.params, plain.state.params) / moved < bound
    own.verify()
    own.probe()


def test_between_hosts_a_quarter_is_sent() -> None:
    """In 4 bits; ZeRO 3 over all devices crosses hosts at each use."""
    own = make(ZeroPlusPlus(3, gradient_bits=4, secondary=True))
    plain = make(3, shape=jaxpar.MeshShape(data=4))
    between = sum(own.closed_form_budget().communicated["replica"].values())
    whole = sum(plain.closed_form_budget().communicated["data"].values())
    assert between * 4 < whole


@pytest.mark.filterwarnings("ignore::jaxpar.engine.run_ahead.SkippedStepWarning")
def test_a_gradient_that_is_not_finite_skips_the_step() -> None:
    """Though codes hold no NaN, their scales do."""
    shape = jaxpar.MeshShape(replica=2, data=2)
    engine = jaxpar.initialize(
        model=lambda rngs: Net(rngs),
        loss_fn=loss_fn,
        optimizer=ADAMW,
        sample_batch=rows()[0],
        mesh=jaxpar.make_mesh(shape, jax.devices()[:4]),
        zero=ZeroPlusPlus(3, gradient_bits=4),
    )
    engine.step(rows()[0])
    before = jax.device_get((engine.state.params, engine.state.carried["reduction"]))
    for wrong in (np.inf, np.nan):
        bad = {name: x.copy() for name, x in rows()[0].items()}
        bad["x"][-1] = wrong  # Of one data shard alone.
        metrics = engine.step(bad)
    assert int(metrics["skipped"]) == 2
    after = jax.device_get((engine.state.params, engine.state.carried["reduction"]))
    jax.tree.map(np.testing.assert_array_equal, before, after)


@pytest.mark.parametrize(
    ("given", "options", "said"),
    [
        ({"secondary": True, "shape": 4}, {}, "secondary=True .* but the mesh has one"),
        ({}, {"coupled_batch": True}, "can't run with examples that are coupled"),
        ({}, {"optimizer": ONE_BIT}, "gradient_bits=8 must be None with an optimizer"),
        (SECONDARY, {"optimizer": DILOCO}, "each with all of the state, and zero="),
    ],
)
def test_where_it_can_not_run_is_refused(given, options, said) -> None:
    if "shape" in given:
        given = {name: x for name, x in given.items() if name != "shape"}
        options = {**options, "shape": jaxpar.MeshShape(data=4)}
    with pytest.raises(ValueError, match=said):
        make(ZeroPlusPlus(1, **given), **options)


def test_names_of_what_is_kept() -> None:
    engine = make(ZeroPlusPlus(3, gradient_bits=4, secondary=True))
    carry = engine.state.carried["reduction"]
    assert set(carry) == {"count", "errors"}
    held = tree.named_leaves(carry["errors"])
    shapes = tree.named_leaves(engine.state.params)
    largest = max(shapes, key=lambda name: shapes[name].size)
    # One data shard's, of each of four; two inside a replica.
    assert held[largest].size == 4 * shapes[largest].size // 2


@pytest.mark.thorough
def test_experts_on_an_axis_train_as_on_plain_replicas() -> None:
    """DiLoCo of SGD that averages after each step is plain SGD, too."""
    config = dataclasses.replace(CONFIG, experts=ExpertsConfig(num=4, top_k=2))
    shape = jaxpar.MeshShape(replica=2, data=2, expert=2)

    def losses_with(optimizer: Any, zero: int | ZeroPlusPlus) -> list[float]:
        engine = jaxpar.initialize(
            model=make_decoder(config),
            loss_fn=decoder_loss,
            optimizer=optimizer,
            sample_batch=batches()[0],
            mesh=shape,
            zero=zero,
        )
        return losses_of(engine)

    sgd = optax.sgd(0.1)
    right = losses_with(sgd, 3)
    assert losses_with(sgd, ZeroPlusPlus(3, **SECONDARY)) == pytest.approx(right)
    coded = losses_with(sgd, ZeroPlusPlus(3, secondary=True))
    assert coded == pytest.approx(right, rel=1e-3)
    averaged = diloco(sgd, replicas=2, every=1, outer=optax.sgd(1.0))
    assert losses_with(averaged, 3) == pytest.approx(right, rel=1e-6)
