"""Which optimizers can a recipe's flag name, and with which settings?

``--optimizer lion --optimizer.bits 8``: a preset, with fields over it
(`jaxpar.config.preset`).
"""

import dataclasses
from typing import Any, ClassVar

import optax

from jaxpar.optim import fused
from jaxpar.optim.fused_update import Schedule
from jaxpar.optim.onebit_adam import onebit_adam
from jaxpar.optim.onebit_lamb import onebit_lamb
from jaxpar.optim.soap import soap
from jaxpar.optim.zero_one_adam import zero_one_adam


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerSettings:
    """An optimizer but for its learning rate.

    Attributes:
      kind: its name among `OPTIMIZERS`.
      weight_decay: times the parameter it is added to the update.
    """

    kind: str = dataclasses.field(default="", init=False)
    weight_decay: float = 0.1
    _optax: ClassVar[Any]
    _fused: ClassVar[Any] = None

    def make(self, learning_rate: float | Schedule) -> Any:
        """Make the optimizer.

        Args:
          learning_rate: a number, or a schedule of the steps taken; in the metrics as
            ``learning_rate``.

        Returns:
          An optimizer for ``jaxpar.initialize``.

        Raises:
          ValueError: if a number is out of its range.
        """
        given = _given(self)
        bits = given.pop("bits", 32)
        if bits != 32:
            return type(self)._fused(learning_rate, **given, bits=bits)
        switches = [name for name, value in given.items() if isinstance(value, bool)]
        make = optax.inject_hyperparams(type(self)._optax, static_args=switches)
        return make(learning_rate, **given)


def _given(settings: OptimizerSettings) -> dict[str, Any]:
    """The fields that are an optimizer's arguments."""
    fields = dataclasses.fields(settings)
    return {x.name: getattr(settings, x.name) for x in fields if x.init}


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdamWSettings(OptimizerSettings):
    """AdamW.

    Attributes:
      weight_decay: times the parameter it is added to the update.
      b1: decay rate of the mean of gradients.
      b2: decay rate of the mean of squared gradients.
      eps: added to the square root.
      bits: bits of a moment: 32, or 8 (a fused optimizer).
    """

    kind: str = dataclasses.field(default="adamw", init=False)
    b1: float = 0.9
    b2: float = 0.95
    eps: float = 1e-8
    bits: int = 32
    _optax: ClassVar[Any] = staticmethod(optax.adamw)
    _fused: ClassVar[Any] = staticmethod(fused.fused_adamw)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LionSettings(OptimizerSettings):
    """Lion; its rate is a third to a tenth of AdamW's.

    Attributes:
      weight_decay: times the parameter it is added to the update.
      b1: decay rate of the mean whose sign is taken.
      b2: decay rate of the stored mean.
      bits: bits of a moment: 32, or 8 (a fused optimizer).
    """

    kind: str = dataclasses.field(default="lion", init=False)
    b1: float = 0.9
    b2: float = 0.99
    bits: int = 32
    _optax: ClassVar[Any] = staticmethod(optax.lion)
    _fused: ClassVar[Any] = staticmethod(fused.fused_lion)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LambSettings(AdamWSettings):
    """LAMB, for large batches.

    Attributes:
      weight_decay: times the parameter it is added to the update.
      b1: decay rate of the mean of gradients.
      b2: decay rate of the mean of squared gradients.
      eps: added to the square root.
      bits: bits of a moment: 32, or 8 (a fused optimizer).
    """

    kind: str = dataclasses.field(default="lamb", init=False)
    b2: float = 0.999
    eps: float = 1e-6
    _optax: ClassVar[Any] = staticmethod(optax.lamb)
    _fused: ClassVar[Any] = staticmethod(fused.fused_lamb)


def _sgd(
    learning_rate: Any, momentum: Any, nesterov: bool, weight_decay: Any
) -> optax.GradientTransformation:
    return optax.chain(
        optax.add_decayed_weights(weight_decay),
        optax.sgd(learning_rate, momentum, nesterov),
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class SgdSettings(OptimizerSettings):
    """Gradient descent with momentum.

    Attributes:
      weight_decay: times the parameter it is added to the update.
      momentum: decay rate of the sum of gradients.
      nesterov: look ahead.
    """

    kind: str = dataclasses.field(default="sgd", init=False)
    weight_decay: float = 0.0
    momentum: float = 0.9
    nesterov: bool = False
    _optax: ClassVar[Any] = staticmethod(_sgd)


def _adafactor(learning_rate: Any, weight_decay: Any) -> Any:
    return optax.adafactor(learning_rate, weight_decay_rate=weight_decay)


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdafactorSettings(OptimizerSettings):
    """Adafactor: second moments by row and column.

    Attributes:
      weight_decay: fraction of a parameter that is taken off at each step.
    """

    kind: str = dataclasses.field(default="adafactor", init=False)
    weight_decay: float = 0.0
    _optax: ClassVar[Any] = staticmethod(_adafactor)


@dataclasses.dataclass(frozen=True, kw_only=True)
class OneBitAdamSettings(OptimizerSettings):
    """1-bit Adam: momenta are exchanged by their signs, after a warm-up.

    Attributes:
      weight_decay: times the parameter it is added to the update.
      freeze_step: steps of the warm-up: 15 to 20 % of the run.
      b1: decay rate of the mean of gradients.
      b2: decay rate of the mean of squared gradients, which is frozen: 0.95 would keep
        the noise of its last twenty steps.
      eps: added to the square root.
    """

    kind: str = dataclasses.field(default="onebit_adam", init=False)
    freeze_step: int = 100
    b1: float = 0.9
    b2: float = 0.999
    eps: float = 1e-8

    def make(self, learning_rate: float | Schedule) -> Any:
        """See `OptimizerSettings`."""
        return onebit_adam(learning_rate, **_given(self))


@dataclasses.dataclass(frozen=True, kw_only=True)
class OneBitLambSettings(OptimizerSettings):
    """1-bit LAMB: momenta are exchanged by their signs, after a warm-up.

    Attributes:
      weight_decay: times the parameter it is added to the update.
      freeze_step: steps of the warm-up: 15 to 20 % of the run.
      b1: decay rate of the mean of gradients.
      b2: decay rate of the means of squared gradients.
      eps: added to their square roots.
      coeff_bounds: least and largest trust ratio.
      coeff_beta: decay rate of the mean of trust ratios.
      factor_bounds: least and largest factor of a frozen trust ratio.
      factor_threshold: the fraction by which a factor may change in a step.
    """

    kind: str = dataclasses.field(default="onebit_lamb", init=False)
    freeze_step: int = 100
    b1: float = 0.9
    b2: float = 0.999
    eps: float = 1e-6
    coeff_bounds: tuple[float, float] = (0.01, 10.0)
    coeff_beta: float = 0.9
    factor_bounds: tuple[float, float] = (0.5, 4.0)
    factor_threshold: float = 0.1

    def make(self, learning_rate: float | Schedule) -> Any:
        """See `OptimizerSettings`."""
        return onebit_lamb(learning_rate, **_given(self))


@dataclasses.dataclass(frozen=True, kw_only=True)
class ZeroOneAdamSettings(OptimizerSettings):
    """0/1 Adam: little is exchanged, and after a warm-up nothing in many steps.

    Attributes:
      weight_decay: times the parameter it is added to the update.
      var_freeze_step: steps in which the second moment changes: 15 to 20 % of the run.
      var_update_scaler: whole gradients at each interval, which then doubles.
      local_step_scaler: steps at each interval between exchanges, which then doubles.
      local_step_clipper: the longest of these: a power of two.
      b1: decay rate of the mean of gradients.
      b2: decay rate of the mean of squared gradients.
      eps: added to the square root.
    """

    kind: str = dataclasses.field(default="zero_one_adam", init=False)
    var_freeze_step: int = 100
    var_update_scaler: int = 16
    local_step_scaler: int = 100
    local_step_clipper: int = 16
    b1: float = 0.9
    b2: float = 0.999
    eps: float = 1e-8

    def make(self, learning_rate: float | Schedule) -> Any:
        """See `OptimizerSettings`."""
        given = dataclasses.asdict(self)
        del given["kind"]
        return zero_one_adam(learning_rate, given.pop("var_freeze_step"), **given)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SoapSettings(OptimizerSettings):
    """SOAP: Adam in the eigenbasis of Shampoo's preconditioner.

    Attributes:
      weight_decay: times the parameter it is added to the update.
      b1: decay rate of the mean of gradients.
      b2: decay rate of the mean of squared gradients, and of their products.
      eps: added to the square root.
      every: steps between two turns of the bases.
      max_dim: a dim of more than this has no basis.
    """

    kind: str = dataclasses.field(default="soap", init=False)
    b1: float = 0.95
    b2: float = 0.95
    eps: float = 1e-8
    every: int = 10
    max_dim: int = 10_000

    def make(self, learning_rate: float | Schedule) -> Any:
        """See `OptimizerSettings`."""

        def of_rate(learning_rate: Any) -> optax.GradientTransformation:
            return soap(learning_rate, **_given(self))

        return optax.inject_hyperparams(of_rate)(learning_rate)


OPTIMIZERS: dict[str, OptimizerSettings] = {
    each.kind: each
    for each in (
        AdamWSettings(),
        LionSettings(),
        LambSettings(),
        SgdSettings(),
        SoapSettings(),
        AdafactorSettings(),
        OneBitAdamSettings(),
        OneBitLambSettings(),
        ZeroOneAdamSettings(),
    )
}
"""Name -> an optimizer's usual settings."""
