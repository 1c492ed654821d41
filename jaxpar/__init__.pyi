"""Public names, each with the module that it is loaded from when it is first used."""

from . import data, models, optim, sparse_attention
from .checkpoint import DamagedError, Keep
from .cli.recipe_flags import run_recipe
from .compiled.budget import Budget, BudgetExceeded
from .engine.engine import Engine
from .engine.initialize import initialize
from .engine.replicas import CorruptionError
from .launch.devices import choose_mesh, cpu_devices, scaled_accumulation
from .mesh import MeshShape, make_mesh
from .model.blocks import PipelineModel
from .model.remat import remat
from .model.step_number import Step
from .offload import Offload
from .optim.ema import Ema
from .pipeline.schedules.catalog import make_schedule
from .pipeline.schedules.table import Schedule
from .planner.plan_step import plan
from .sharding.constrain import constrain
from .sharding.exchange import all_to_all, batch_mean
from .step.inputs import Packed, Replicated
from .step.precision import Precision, make_precision
from .step.state import TrainState
from .step.weighted import Max, Sum, Weighted
from .training.loop import train
from .training.opening import open_run
from .training.options import StartOptions
from .training.recovery import Recovery
from .training.run import check_reopened, mean_loss

__all__ = [
    "Budget",
    "BudgetExceeded",
    "CorruptionError",
    "DamagedError",
    "Ema",
    "Engine",
    "Keep",
    "Max",
    "MeshShape",
    "Offload",
    "Packed",
    "PipelineModel",
    "Precision",
    "Recovery",
    "Replicated",
    "Schedule",
    "StartOptions",
    "Step",
    "Sum",
    "TrainState",
    "Weighted",
    "all_to_all",
    "batch_mean",
    "check_reopened",
    "choose_mesh",
    "constrain",
    "cpu_devices",
    "data",
    "initialize",
    "make_mesh",
    "make_precision",
    "make_schedule",
    "mean_loss",
    "models",
    "open_run",
    "optim",
    "plan",
    "remat",
    "run_recipe",
    "scaled_accumulation",
    "sparse_attention",
    "train",
]
