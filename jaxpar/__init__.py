"""jaxpar: sharded training for Flax models on a named mesh."""

from jaxpar import data
from jaxpar.checkpoint import DamagedError, Keep
from jaxpar.engine import Engine
from jaxpar.initialization import initialize
from jaxpar.mesh import MeshShape, make_mesh
from jaxpar.parts.model import PipelineModel
from jaxpar.pipeline.schedule import Schedule
from jaxpar.plan.budget import Budget, BudgetExceeded
from jaxpar.plan.explain import Explanation
from jaxpar.precision import Precision, make_precision
from jaxpar.remat import remat
from jaxpar.replicas import CorruptionError
from jaxpar.sharding.constrain import constrain
from jaxpar.state import TrainState
from jaxpar.weighted import Weighted

__all__ = [
    "Budget",
    "BudgetExceeded",
    "CorruptionError",
    "DamagedError",
    "Engine",
    "Explanation",
    "Keep",
    "MeshShape",
    "PipelineModel",
    "Precision",
    "Schedule",
    "TrainState",
    "Weighted",
    "constrain",
    "data",
    "initialize",
    "make_mesh",
    "make_precision",
    "remat",
]
