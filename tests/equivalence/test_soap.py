"""Does SOAP train at every ZeRO stage, and composed, as its rule on one device?

Losses of 20 steps, in which the bases turn six times, and parameters by leaf, to 1e-5.
"""

import functools
from pathlib import Path

import jax
import numpy as np
import pytest

import jaxpar
from jaxpar.optim import soap
from jaxpar.tree import named_leaves
from tests.equivalence.perceptron import batches, make_piped_engine, run_blocks_plainly
from tests.equivalence.problems import distance

OPTIMIZER = soap(1e-3, eps=1e-6, every=3)
RULES = {"*/kernel": jax.sharding.PartitionSpec(None, "tensor")}

pytestmark = pytest.mark.thorough


def steps() -> list[dict]:
    return (4 * batches())[:20]


def make_engine(zero: int, **mesh: int) -> jaxpar.Engine:
    shape = jaxpar.MeshShape(**mesh)
    devices = jax.devices()[: int(np.prod(list(mesh.values())))]
    options = {"mesh": jaxpar.make_mesh(shape, devices), "rules": RULES}
    return make_piped_engine(OPTIMIZER, zero=zero, accumulate=2, **options)


@functools.cache
def right() -> tuple[list[float], dict]:
    engine = make_engine(0, data=1)
    return run_blocks_plainly(OPTIMIZER, jax.device_get(engine.state.params), steps())


def leaves_of(engine: jaxpar.Engine) -> list[np.ndarray]:
    state = engine.state
    return jax.tree.leaves(jax.device_get((state.params, state.opt_state)))


@pytest.mark.parametrize(
    ("zero", "mesh"),
    [
        (0, {"data": 4, "tensor": 2}),
        (1, {"data": 4}),
        (2, {"data": 4, "tensor": 2}),
        (1, {"data": 2, "pipe": 2}),
    ],
    ids=["0", "1", "2", "pipe"],
)
def test_trains_like_the_plain_rule(zero: int, mesh: dict[str, int]) -> None:
    engine = make_engine(zero, **mesh)
    losses, params = right()
    assert [float(engine.step(x)["loss"]) for x in steps()] == pytest.approx(
        losses, rel=1e-5
    )
    assert distance(engine.state.params, params) <= 1e-5


def test_goes_on_from_a_checkpoint(tmp_path: Path) -> None:
    """To the bit; at ZeRO 3, where bases and means are stored sharded."""
    engine = make_engine(3, data=4, tensor=2)
    losses, params = right()
    found = [float(engine.step(x)["loss"]) for x in steps()[:10]]
    engine.save(tmp_path)
    engine.wait()
    rest = steps()[10:]
    found += [float(engine.step(x)["loss"]) for x in rest]
    after = leaves_of(engine)
    engine.restore(tmp_path)
    again = [float(engine.step(x)["loss"]) for x in rest]
    assert again == found[10:]
    assert all(map(np.array_equal, after, leaves_of(engine)))
    assert found == pytest.approx(losses, rel=1e-5)
    assert distance(engine.state.params, params) <= 1e-5
    _check_what_is_stored_and_sent(engine)


def _check_what_is_stored_and_sent(engine: jaxpar.Engine) -> None:
    stored = named_leaves(engine.state.opt_state[0])
    for part in ("means", "bases"):
        leaf = stored[f"{part}/blocks/up/kernel/left"]
        assert leaf.addressable_shards[0].data.size * 4 <= leaf.size
    report = engine.explain()
    assert "the optimizer's update sends, beyond the closed form of ZeRO 3" in str(
        report
    )
    # Matrices are gathered a few times each, not in loops: at most ten times all that
    # the optimizer stores of them, means and bases.
    matrices = sum(
        x.size * 4 for name, x in stored.items() if name.endswith(("left", "right"))
    )
    gathered = sum(row.bytes for row in report.program.of_update)
    assert 0 < gathered <= 10 * matrices
    engine.verify()
