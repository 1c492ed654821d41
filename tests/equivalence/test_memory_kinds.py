"""Does an optimizer whose state is in host memory train, save and report as without?

To the bit: inside the step, the same update sees the same numbers. On CPUs the memory
kinds are real, and the bytes of both are the same memory: what is tested is which
leaves are counted where, never the sum.
"""

import functools
import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest
from jax.sharding import SingleDeviceSharding

import jaxpar
from jaxpar.compiled.budget import Budget, BudgetExceeded
from jaxpar.tree import named_leaves
from tests.equivalence.perceptron import batches, make_engine
from tests.optim.moments_on_host import MomentsOnHost

INNER = optax.adamw(1e-2)
COUNT = 4
"""Bytes of Adam's step count."""


def run(optimizer: Any, zero: int) -> jaxpar.Engine:
    engine = make_engine(optimizer, 4, 2, zero)
    for batch in batches():
        engine.step(batch)
    return engine


trained = functools.cache(run)


def kinds(state: Any) -> set[str]:
    return {leaf.sharding.memory_kind for leaf in jax.tree.leaves(state)}


def are_equal(one: jaxpar.Engine, other: jaxpar.Engine) -> bool:
    trees = [(e.state.params, e.state.opt_state, e.state.step) for e in (one, other)]
    return jax.tree.all(jax.tree.map(np.array_equal, *jax.device_get(trees)))


@pytest.mark.parametrize(
    "zero",
    [
        pytest.param(0, marks=pytest.mark.thorough),
        pytest.param(2, marks=pytest.mark.slow),
        3,
    ],
)
def test_trains_to_the_bit_as_on_the_device(zero: int) -> None:
    engine = trained(MomentsOnHost(INNER), zero)
    assert are_equal(engine, trained(INNER, zero))
    assert kinds(engine.state.opt_state) == {"pinned_host"}
    assert kinds(engine.state.params) == {"device"}


@pytest.mark.parametrize(
    ("before", "after", "kind"),
    [
        pytest.param(INNER, MomentsOnHost(INNER), "pinned_host", id="to the host"),
        pytest.param(
            MomentsOnHost(INNER),
            INNER,
            "device",
            id="to the device",
            marks=pytest.mark.thorough,
        ),
    ],
)
def test_checkpoint_moves_between_the_two(before, after, kind, tmp_path: Path) -> None:
    engine, other = trained(before, 3), make_engine(after, 8, 1, zero=1)
    engine.save(tmp_path)
    engine.wait()
    other.restore(tmp_path)
    assert are_equal(engine, other)
    assert kinds(other.state.opt_state) == {kind}
    other.step(batches()[0])
    assert kinds(other.state.opt_state) == {kind}


@pytest.mark.thorough
def test_calls_that_take_a_state_keep_its_memory() -> None:
    engine, plain = run(MomentsOnHost(INNER), 1), run(INNER, 1)
    params = jax.device_get(engine.state.params)
    engine.load_params(params)
    assert kinds(engine.state.opt_state) == {"pinned_host"}
    given = [jax.tree.map(lambda x: x, e.state) for e in (engine, plain)]
    new, _ = engine.train_step(given[0], batches()[0])
    right, _ = plain.train_step(given[1], batches()[0])
    assert kinds(new.opt_state) == {"pinned_host"}
    pairs = jax.device_get(
        ((new.opt_state, new.params), (right.opt_state, right.params))
    )
    assert jax.tree.all(jax.tree.map(np.array_equal, *pairs))
    assert engine.evaluate(batches()[0])["loss"] == plain.evaluate(batches()[0])["loss"]


def test_packed_state_alone_may_be_on_the_host(tmp_path: Path) -> None:
    """What is restored or given to the engine is moved there."""
    engine = run(MomentsOnHost(INNER, packed_only=True), 1)
    assert are_equal(engine, trained(INNER, 1))
    engine.save(tmp_path)
    engine.wait()
    engine.restore(tmp_path)
    for _ in range(2):
        assert kinds(engine._packed.opt_state) == {"pinned_host"}
        assert kinds(engine.state.opt_state) == {"device"}
        engine.load_params(jax.device_get(engine.state.params))
    engine.step(batches()[0])


def test_parameters_on_the_host_are_evaluated_with() -> None:
    engine = trained(INNER, 1)
    here = jax.devices()[0]
    there = SingleDeviceSharding(here, memory_kind="pinned_host")
    params = jax.device_put(jax.device_get(engine.state.params), there)
    expected = engine.evaluate(batches()[0])["loss"]
    assert engine.evaluate(batches()[0], params=params)["loss"] == expected


def test_bytes_on_the_host_are_apart() -> None:
    engine, plain = trained(MomentsOnHost(INNER), 1), trained(INNER, 1)
    report, without = engine.explain(), plain.explain()
    own = report.host_bytes_per_device
    assert own == sum(
        leaf.bytes_per_device
        for leaf in without.leaves
        if leaf.name.startswith("opt_state/")
    )
    assert report.bytes_per_device == without.bytes_per_device - own
    assert "on host" in report.details
    assert f", and {own:,} in host memory" in report.details
    assert "in host memory" in report.summary
    read = {leaf["name"]: leaf for leaf in json.loads(report.as_json())["leaves"]}
    count = read["opt_state/0/count"]
    assert (count["bytes_per_device"], count["host_bytes_per_device"]) == (0, COUNT)
    for text in (str(without), without.details):
        assert "host memory" not in text
    assert "bytes/device   why" in without.details


def test_budget_has_the_hosts_bytes_apart() -> None:
    engine, plain = trained(MomentsOnHost(INNER), 1), trained(INNER, 1)
    budget, without = engine.verify(), plain.verify()
    assert without.host_state_bytes == 0
    assert budget.host_state_bytes > 0
    total = budget.state_bytes + budget.host_state_bytes
    assert total == without.state_bytes
    assert engine.closed_form_budget().host_state_bytes == budget.host_state_bytes
    older = json.loads(without.as_json())
    del older["host_state_bytes"]
    with pytest.raises(BudgetExceeded) as caught:
        engine.verify(Budget.from_json(json.dumps(older)))
    (said,) = caught.value.violations
    assert said.startswith(
        f"host state: {budget.host_state_bytes:,} bytes in host memory for each "
        "device, but the budget is 0."
    )
    assert "opt_state/0/mu/up/kernel (float32[16, 64]): 512 bytes" in said
    assert "params/" not in said


@pytest.mark.thorough
def test_plan_counts_host_bytes_apart() -> None:
    found = [
        jaxpar.plan(trained(optimizer, 1), "cpu:8")
        for optimizer in (INNER, MomentsOnHost(INNER))
    ]
    without, plan = (plan.memory for plan in found)
    assert without.host_state == 0
    assert plan.host_state == without.optimizer
    assert plan.state == without.state - without.optimizer
    assert (plan.optimizer, plan.padding) == (0, 0)


def test_probe_compares_what_is_on_the_host() -> None:
    engine = run(MomentsOnHost(INNER), 1)
    engine.probe()
    names = list(named_leaves(engine.placement.packed))
    number = names.index("opt_state/0/mu/up/bias")
    leaf = engine._leaves[number]
    assert leaf.sharding.memory_kind == "pinned_host"
    pieces = [np.array(shard.data) for shard in leaf.addressable_shards]
    pieces[3].view(np.uint32)[5] ^= 1
    places = [shard.data.sharding for shard in leaf.addressable_shards]
    copies = [jax.device_put(a, place) for a, place in zip(pieces, places, strict=True)]
    engine._leaves[number] = jax.make_array_from_single_device_arrays(
        leaf.shape, leaf.sharding, copies
    )
    with pytest.raises(jaxpar.CorruptionError, match=r"mu/up/bias on device 3 \("):
        engine.probe()
