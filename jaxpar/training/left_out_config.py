"""Which flags does a recipe have whose training steps leave out layers, or tokens?"""

import dataclasses
from typing import Any

from jaxpar.model.blocks import PipelineModel
from jaxpar.model.layer_drop import LayerDrop
from jaxpar.model.token_drop import RandomLTD
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
class TokenDropFlags:
    """How many of a row's tokens middle blocks see; see `RandomLTD`."""

    start: int | None = None
    """Tokens that they see in the first step; by default all, in every step."""
    steps: int | None = None
    """From which step on they see all; by default two thirds of the schedule's."""
    multiple: int = 64
    """Numbers of tokens are multiples of it; each is a branch of the program."""
    first: int = 1
    """The first of these blocks, from 0; negative from the end."""
    last: int = -2
    """The last one."""
    positions: str | None = "positions_BT"
    """Keyword by which blocks take the tokens' places; None where the embedding has
    them."""


@dataclasses.dataclass(frozen=True)
class LeftOutConfig(RateConfig):
    """Fields for a recipe's config to inherit: its rate's, and what is left out."""

    layer_drop: LayerDropFlags = dataclasses.field(default_factory=LayerDropFlags)
    """Blocks that training steps leave out, more and more of them."""
    token_drop: TokenDropFlags = dataclasses.field(default_factory=TokenDropFlags)
    """Tokens that middle blocks do not see in training steps, fewer and fewer."""

    def leaving_out(self, model: PipelineModel, steps: int) -> PipelineModel:
        """A model that leaves blocks or tokens out, if that is asked for.

        Args:
          model: the recipe's.
          steps: of the run, for a config without `schedule_steps`.

        Raises:
          ValueError: if a number is out of range, or one is given that has no effect.

        Example:
          >>> from jaxpar.models import DecoderConfig, make_decoder
          >>> own = LeftOutConfig(layer_drop=LayerDropFlags(theta=0.5))
          >>> own.leaving_out(make_decoder(DecoderConfig()), 2000).layer_drop
          LayerDrop(theta=0.5, gamma=0.005)
        """
        steps = self.schedule_steps or steps
        asked: dict[str, Any] = {
            "layer_drop": _layer_drop(self.layer_drop, steps),
            "token_drop": _token_drop(self.token_drop, steps),
        }
        given = {name: drop for name, drop in asked.items() if drop is not None}
        return dataclasses.replace(model, **given)

    def recovering(self, recovery: Recovery) -> Recovery:
        """The rules of a run; where layers are left out no loss counts as a spike.

        A step that runs few of them has a large loss with any batch, and has it again
        after the run is rolled back.
        """
        rules = super().recovering(recovery)
        if self.layer_drop.theta == 1.0:
            return rules
        return dataclasses.replace(rules, spike=0.0)


def _layer_drop(asked: LayerDropFlags, steps: int) -> LayerDrop | None:
    if asked == LayerDropFlags():
        return None
    if asked.theta == 1.0:
        raise ValueError(
            f"layer_drop: gamma={asked.gamma} says how fast the share of the last "
            "block falls to theta, which is 1, so that no block is left out; use "
            "--layer-drop.theta 0.5."
        )
    gamma = GAMMA_STEPS / steps if asked.gamma is None else asked.gamma
    return LayerDrop(theta=asked.theta, gamma=gamma)


def _token_drop(asked: TokenDropFlags, steps: int) -> RandomLTD | None:
    if asked == TokenDropFlags():
        return None
    if asked.start is None:
        raise ValueError(
            f"token_drop: start={asked.start}, so that all blocks see all tokens, and "
            "the other flags have no effect; use --token-drop.start 64."
        )
    given: dict[str, Any] = dataclasses.asdict(asked)
    if asked.steps is None:
        given["steps"] = max(2 * steps // 3, 1)
    return RandomLTD(**given)
