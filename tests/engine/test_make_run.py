"""Is a step made on any mesh from the same arguments?"""

import jax
import optax

import jaxpar
from jaxpar.engine.make_run import make_losses, make_run
from jaxpar.tree import named_leaves
from tests.equivalence import several_losses
from tests.equivalence.perceptron import make_engine


def test_steps_are_made_on_another_mesh_without_a_state() -> None:
    engine = make_engine(optax.adamw(1e-2), 2, 2, 3)
    mesh = jaxpar.make_mesh(jaxpar.MeshShape(data=8))
    before = len(jax.live_arrays())
    made = make_run(engine.arguments, mesh)
    losses = make_losses(made, engine.arguments)
    assert made.placement.mesh == mesh
    assert named_leaves(made.placement.abstract) == named_leaves(
        engine.placement.abstract
    )
    assert list(losses) == [None]
    assert len(jax.live_arrays()) == before


def test_each_of_several_losses_has_a_step() -> None:
    shape = jaxpar.MeshShape(data=2)
    engine = several_losses.make_engine("adversarial", shape, 1)
    made = make_run(engine.arguments, engine.mesh)
    assert list(make_losses(made, engine.arguments)) == ["disc", "gen"]
