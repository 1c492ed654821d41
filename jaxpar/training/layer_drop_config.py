"""Which flags does a recipe have that leaves layers out of its training steps?"""

import dataclasses

from jaxpar.model.blocks import PipelineModel
from jaxpar.model.layer_drop import LayerDrop
from jaxpar.training.rate_config import RateConfig
from jaxpar.training.recovery import Recovery

GAMMA_STEPS = 10.0
"""By default gamma is this over the run's steps: 4 % of the way is left at a third."""


@dataclasses.dataclass(frozen=True)
class LayerDropFlags:
    """Which share of the blocks training steps run; see `LayerDrop`."""

    theta: float = 1.0
    """Share of steps that run the last block in the end; 1 leaves no block out."""
    gamma: float | None = None
    """How fast it gets there, 1 / steps; by default 10 / steps of the schedule."""


@dataclasses.dataclass(frozen=True)
class LayerDropConfig(RateConfig):
    """Fields for a recipe's config to inherit: its rate's, and layers left out."""

    layer_drop: LayerDropFlags = dataclasses.field(default_factory=LayerDropFlags)
    """Blocks that training steps leave out, more and more of them."""

    def leaving_out(self, model: PipelineModel, steps: int) -> PipelineModel:
        """A model that leaves blocks out, if that is asked for.

        Args:
          model: the recipe's.
          steps: of the run, for a config without `schedule_steps`.

        Raises:
          ValueError: if a number is out of range, or gamma is given alone.

        Example:
          >>> from jaxpar.models import DecoderConfig, make_decoder
          >>> own = LayerDropConfig(layer_drop=LayerDropFlags(theta=0.5))
          >>> own.leaving_out(make_decoder(DecoderConfig()), 2000).layer_drop
          LayerDrop(theta=0.5, gamma=0.005)
        """
        asked = self.layer_drop
        if asked == LayerDropFlags():
            return model
        if asked.theta == 1.0:
            raise ValueError(
                f"layer_drop: gamma={asked.gamma} says how fast the share of the last "
                "block falls to theta, which is 1, so that no block is left out; use "
                "--layer-drop.theta 0.5."
            )
        gamma = asked.gamma
        if gamma is None:
            gamma = GAMMA_STEPS / (self.schedule_steps or steps)
        drop = LayerDrop(theta=asked.theta, gamma=gamma)
        return dataclasses.replace(model, layer_drop=drop)

    def recovering(self, recovery: Recovery) -> Recovery:
        """The rules of a run; where layers are left out no loss counts as a spike.

        A step that runs few of them has a large loss with any batch, and has it again
        after the run is rolled back.
        """
        rules = super().recovering(recovery)
        if self.layer_drop.theta == 1.0:
            return rules
        return dataclasses.replace(rules, spike=0.0)
