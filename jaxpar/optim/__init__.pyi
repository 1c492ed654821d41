"""Public names, each with the module that it is loaded from when it is first used."""

from .communication import CommunicationConfig
from .decay import decayed
from .diloco import diloco
from .fused import fused_adamw, fused_lamb, fused_lion
from .fused_update import FusedOptimizer
from .make_update import HostUpdate, MakesUpdate, Update, UpdateSpec
from .onebit_adam import onebit_adam
from .onebit_lamb import onebit_lamb
from .quantized_reduction import QuantizedReduction
from .quantized_sums import ZeroPlusPlus
from .schedules import (
    Decay,
    lr_range_test,
    one_cycle,
    one_cycle_momentum,
    warmup_then,
)
from .settings import OPTIMIZERS, OptimizerSettings
from .soap import soap
from .with_reduction import (
    LocalGradients,
    PlainReduction,
    Reduction,
    Wire,
    WithReduction,
)
from .zero_one_adam import zero_one_adam

__all__ = [
    "OPTIMIZERS",
    "CommunicationConfig",
    "Decay",
    "FusedOptimizer",
    "HostUpdate",
    "LocalGradients",
    "MakesUpdate",
    "OptimizerSettings",
    "PlainReduction",
    "QuantizedReduction",
    "Reduction",
    "Update",
    "UpdateSpec",
    "Wire",
    "WithReduction",
    "ZeroPlusPlus",
    "decayed",
    "diloco",
    "fused_adamw",
    "fused_lamb",
    "fused_lion",
    "lr_range_test",
    "one_cycle",
    "one_cycle_momentum",
    "onebit_adam",
    "onebit_lamb",
    "soap",
    "warmup_then",
    "zero_one_adam",
]
