"""Which steps gather a layer ahead, and are the compiler's options theirs?"""

import dataclasses
from typing import Any

import jax
import numpy as np
import optax
import pytest
from flax import nnx

import jaxpar
from jaxpar.mesh import MeshShape
from jaxpar.models import DecoderConfig, decoder_loss, make_decoder
from jaxpar.optim import PlainReduction, Reduction, WithReduction

CONFIG = DecoderConfig(vocab_size=32, seq_len=8, num_layers=4, num_heads=2, width=32)
BATCH = {"tokens": np.zeros((8, 9), np.int32)}


def spec_of(**given: Any) -> Any:
    shape = given.pop("mesh", MeshShape(data=4))
    engine = jaxpar.initialize(
        **{
            "model": make_decoder(CONFIG),
            "loss_fn": decoder_loss,
            "optimizer": optax.sgd(0.1),
            "sample_batch": BATCH,
            "mesh": jaxpar.make_mesh(shape, jax.devices()[: shape.num_devices]),
            **given,
        }
    )
    return engine.spec


def notes_of(spec: Any) -> list[str]:
    return [line for line in spec.remarks if line.startswith("prefetch:")]


def test_by_default_a_cpu_gathers_nothing_ahead():
    spec = spec_of(zero=3)
    assert not notes_of(spec)
    assert not spec.zero.keep


@pytest.mark.parametrize("zero", [1, pytest.param(2, marks=pytest.mark.thorough), 3])
def test_asked_for_it_is_said_of_the_loop(zero):
    spec = spec_of(zero=zero, prefetch=True)
    (line,) = notes_of(spec)
    assert "4 layers (blocks/" in line
    assert (spec.zero.gather, spec.zero.reduce) == ("use", "microbatch")
    assert spec.zero.keep == (zero < 3), "ZeRO 1 and 2 keep what they gather"
    assert spec.zero.number == zero


CASES: dict[str, dict[str, Any]] = {
    "nothing is gathered": {"zero": 0},
    "several micro-batches": {"zero": 1, "accumulate": 2},
    "a pipeline": {"zero": 3, "mesh": MeshShape(data=2, pipe=2), "accumulate": 2},
    "coupled examples": {"zero": 3, "coupled_batch": True},
    "one data shard": {"zero": 3, "mesh": MeshShape(data=1, tensor=2)},
}


@pytest.mark.parametrize("case", CASES)
def test_where_it_can_not_it_is_as_without(case):
    given = CASES[case]
    spec = spec_of(prefetch=True, **given)
    assert not notes_of(spec)
    assert not spec.zero.keep
    assert spec.zero == spec_of(prefetch=False, **given).zero


@pytest.mark.parametrize("zero", [1, 3])
def test_without_a_loop_nothing_changes(zero):
    unrolled = dataclasses.replace(CONFIG, unroll=CONFIG.num_layers)
    assert notes_of(spec_of(model=make_decoder(unrolled), zero=zero, prefetch=True))
    given = {"model": lambda rngs: nnx.Linear(32, 32, rngs=rngs), "zero": zero}
    given |= {"loss_fn": lambda model, batch: (model(batch["x"]) ** 2).mean()}
    given |= {"sample_batch": {"x": np.zeros((8, 32), np.float32)}}
    spec = spec_of(prefetch=True, **given)
    assert not notes_of(spec)
    assert spec.zero == spec_of(prefetch=False, **given).zero


def test_a_reduction_of_an_update_keeps_whole_gradients():
    class Own(Reduction):
        def reduce(self, leaves, grads, carry, collectives):
            return PlainReduction().reduce(leaves, grads, carry, collectives)

        def communicated(self, leaves, wire):
            return PlainReduction().communicated(leaves, wire)

    optimizer = WithReduction(optax.sgd(0.1), Own())
    spec = spec_of(optimizer=optimizer, zero=1, prefetch=True)
    assert spec.zero.reduce == "step"
