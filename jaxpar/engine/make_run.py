"""How are the steps of an engine's losses made on a mesh: traced, and sharded?

Nothing is compiled, and no state is made: a step is made again on other devices by the
same arguments.
"""

from collections.abc import Mapping
from typing import Any

from jax.sharding import Mesh

from jaxpar.engine.focus import Focus
from jaxpar.engine.loss_step import LossStep, make_loss_step
from jaxpar.engine.make_step import MadeRun, MadeStep, make_step
from jaxpar.engine.other_shapes import with_other_shapes
from jaxpar.engine.read_arguments import RunSpec, read_loss
from jaxpar.engine.several import check_one, make_several
from jaxpar.model.bridge import UnderAxisRules, make_network
from jaxpar.sharding.zero import zero_stage
from jaxpar.step.precision import make_precision


def make_run(arguments: Mapping[str, Any], mesh: Mesh) -> MadeRun:
    """Make the steps of an engine's losses.

    Args:
      arguments: those of `jaxpar.initialize`.
      mesh: the mesh, in place of the arguments' own.

    Raises:
      ValueError: if arguments are inconsistent.
    """
    same = (
        *("schedule", "coupled_batch", "check_loss", "allow_whole"),
        *("prefetch", "two_batch_overlap", "xla_options"),
    )
    run = RunSpec(
        mesh=mesh,
        zero=zero_stage(arguments["zero"]),
        precision=make_precision(arguments["precision"]),
        rules=arguments["rules"] or {},
        **{name: arguments[name] for name in same},
    )
    several = isinstance(arguments["model"], Mapping)
    return (make_several if several else _make_one)(run, arguments)


def make_losses(
    made: MadeRun, arguments: Mapping[str, Any]
) -> dict[str | None, LossStep]:
    """Make the jitted functions of an engine's losses, by their names.

    Args:
      made: their steps.
      arguments: those of `jaxpar.initialize` that rebuild the engine.
    """
    return {
        name: make_loss_step(made.placement, made.steps[name], focus, arguments)
        for name, focus in made.focuses.items()
    }


def _make_one(run: RunSpec, arguments: Mapping[str, Any]) -> MadeRun:
    """The step of a single loss."""
    check_one(arguments)
    own, model = read_loss(run, arguments), arguments["model"]
    network = make_network(model, own.loss.on_sample, own.rows)
    made = make_step(run, own, network)
    made = with_other_shapes(run, own, made, arguments)
    rebuilt = {
        "other_shapes": (),
        "sample_batch": own.batch_spec.rows(own.batch_spec.num_rows),
        "model": UnderAxisRules(model, network.axis_rules),
    }
    steps: dict[str | None, MadeStep] = {None: made}
    focuses: dict[str | None, Focus] = {None: Focus()}
    given = made.placement, made.traced.init, steps, focuses
    return MadeRun(network, *given, rebuilt)
