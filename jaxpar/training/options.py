"""What is asked of one start of a run, beside what the run is?"""

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class StartOptions:
    """Flags of a start, for a recipe's config to inherit; not in ``run.json``'s config.

    `jaxpar.open_run` reads them from the config.
    """

    change: bool = False
    """Go on with settings that change the run's numbers: its rate, batch, data."""
    checkpoint_url: str | None = None
    """Keep a new run's checkpoints in a bucket: s3://bucket/run, gs://bucket/run."""
    init_from: str | None = None
    """Begin with the parameters of another run, checkpoint or safetensors folder."""
    min_delta: float = 0.0
    """By how much the held-out loss must fall to count for --patience."""
    patience: int | None = None
    """End the run after so many evaluations without a better held-out loss."""
    private: bool = False
    """Let only this user read the run's settings (run.json)."""
    profile: str | None = None
    """Steps to trace, such as 10:15, into the run's folder "profile"."""
    tensorboard: bool = False
    """Also write TensorBoard events."""
    writers: tuple[str, ...] = ()
    """Also write the numbers to tensorboard, wandb or mlflow."""


OPTIONS = tuple(field.name for field in dataclasses.fields(StartOptions))
"""Names of the fields."""


def options_of(config: Any) -> StartOptions:
    """The options in a config, which may have some of the fields or none.

    Example:
      >>> options_of(StartOptions(writers=("wandb",))).writers
      ('wandb',)
    """
    given = {name: getattr(config, name) for name in OPTIONS if hasattr(config, name)}
    return StartOptions(**given)
