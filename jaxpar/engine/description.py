"""What is said of an engine in a line: its model, its mesh, how its step is taken."""

from jaxpar.engine.compiled_step import StepSpec
from jaxpar.engine.placement import Placement
from jaxpar.mesh import axes_text
from jaxpar.model.bridge import Network
from jaxpar.model.class_names import class_names
from jaxpar.tree import num_elements


def describe(
    network: Network, placement: Placement, spec: StepSpec, num_rows: int
) -> str:
    """Name the model, its parameters, the ZeRO stage and mesh, dtype and batch.

    Args:
      network: the model.
      placement: where the state is stored.
      spec: of the step.
      num_rows: of the global batch.
    """
    return (
        f"{class_names(network)}, "
        f"{num_elements(placement.abstract.params):,} parameters, "
        f"ZeRO {placement.zero.number} on {axes_text(placement.mesh.shape)}, "
        f"{spec.precision.compute_dtype}, accumulate {spec.accumulate}, "
        f"{num_rows} rows a step"
    )
