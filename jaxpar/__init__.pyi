"""Public names, each with the module that it is loaded from when it is first used."""

from . import data, optim
from .checkpoint import DamagedError, Keep
from .engine import Engine
from .initialization import initialize
from .inputs import Packed, Replicated
from .mesh import MeshShape, make_mesh
from .parts.model import PipelineModel
from .pipeline.schedule import Schedule
from .plan.budget import Budget, BudgetExceeded
from .plan.explain import Explanation
from .precision import Precision, make_precision
from .remat_policy import remat
from .replicas import CorruptionError
from .sharding.constrain import constrain
from .state import TrainState
from .weighted import Max, Sum, Weighted

__all__ = [
    "Budget",
    "BudgetExceeded",
    "CorruptionError",
    "DamagedError",
    "Engine",
    "Explanation",
    "Keep",
    "Max",
    "MeshShape",
    "Packed",
    "PipelineModel",
    "Precision",
    "Replicated",
    "Schedule",
    "Sum",
    "TrainState",
    "Weighted",
    "constrain",
    "data",
    "initialize",
    "make_mesh",
    "make_precision",
    "optim",
    "remat",
]
