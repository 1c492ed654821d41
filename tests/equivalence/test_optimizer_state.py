"""Is any kind of leaf in an optimizer's state trained with, explained and restored?"""

from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests.equivalence.perceptron import STEPS, batches, make_engine, run_plainly
from tests.equivalence.problems import distance


class Odd(NamedTuple):
    """One leaf of every kind; three are not arrays, two are no leaves."""

    count: Any
    rate: Any
    decay: Any
    key: Any
    raw_key: Any
    keys: Any
    flag: Any
    empty: Any
    nothing: Any
    masked: Any
    half: Any
    table: Any


def init(params: dict) -> Odd:
    half = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.bfloat16), params)
    return Odd(
        count=0,
        rate=0.1,
        decay=np.float64(0.9),
        key=jax.random.key(1),
        raw_key=jax.random.PRNGKey(2),
        keys=jax.random.split(jax.random.key(3), 4),
        flag=True,
        empty=jnp.zeros((0, 3)),
        nothing=None,
        masked=optax.MaskedNode(),
        half=half,
        table=np.arange(512.0),
    )


def update(grads: dict, state: Odd, params: dict | None = None) -> tuple[dict, Odd]:
    """Gradients with noise of three keys, at a rate that falls; every leaf is used."""
    del params
    key, own = jax.random.split(state.key)
    keys = jax.vmap(lambda key: jax.random.fold_in(key, state.count))(state.keys)
    raw = jax.random.fold_in(state.raw_key, state.count)
    noises = [
        optax.tree.random_like(key, grads, jax.random.uniform)
        for key in (own, keys[1], raw)
    ]
    half = jax.tree.map(
        lambda x, grad: (0.5 * x + grad).astype(x.dtype), state.half, grads
    )
    rate = state.rate * (1 + state.table[7] / 100 + state.empty.sum())
    updates = jax.tree.map(
        lambda grad, mean, *noise: jnp.where(
            state.flag, -rate * (grad + 1e-3 * sum(noise)), -1e-2 * mean
        ),
        grads,
        half,
        *noises,
    )
    return updates, state._replace(
        count=state.count + 1,
        rate=state.rate * state.decay,
        key=key,
        keys=keys,
        flag=~state.flag,
        half=half,
        table=state.table + 1,
    )


ODD = optax.GradientTransformation(init, update)


def plain(leaf: jax.Array) -> np.ndarray:
    is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(leaf) if is_key else leaf, np.float64)


@pytest.mark.slow
def test_leaves_of_every_kind_go_on_elsewhere(tmp_path: Path) -> None:
    losses, params = run_plainly(ODD, takes_value=False)
    engine = make_engine(ODD, 4, 2, zero=3)
    # Restored leaves are not weak: the step would compile again for them.
    assert not any(getattr(x, "weak_type", False) for x in engine._leaves)
    found = [float(engine.step(batch)["loss"]) for batch in batches()[: STEPS // 2]]
    engine.probe()
    engine.save(tmp_path)
    engine.wait()
    other = make_engine(ODD, 8, 1, zero=1)
    other.restore(tmp_path)
    for a, b in zip(*map(jax.tree.leaves, (engine.state, other.state)), strict=True):
        np.testing.assert_array_equal(plain(a), plain(b))
    found += [float(other.step(batch)["loss"]) for batch in batches()[STEPS // 2 :]]
    assert found == pytest.approx(losses, rel=1e-5)
    assert distance(other.state.params, params) <= 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("zero", [0, 2])
def test_leaves_of_every_kind_at_every_stage(zero: int) -> None:
    losses, params = run_plainly(ODD, takes_value=False)
    engine = make_engine(ODD, 4, 2, zero)
    assert [float(engine.step(batch)["loss"]) for batch in batches()] == pytest.approx(
        losses, rel=1e-5
    )
    assert distance(engine.state.params, params) <= 1e-5


@pytest.mark.slow
def test_leaves_of_every_kind_are_explained() -> None:
    rows = {row.name: row for row in make_engine(ODD, 4, 2, zero=3).explain().leaves}
    sizes = {"key": 8, "raw_key": 8, "keys": 32, "flag": 1, "empty": 0, "table": 256}
    for name, size in sizes.items():
        assert rows[f"opt_state/{name}"].bytes_per_device == size, name
