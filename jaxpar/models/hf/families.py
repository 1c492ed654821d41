"""What must be known of a family of models to read and write its published ones?"""

import dataclasses
from collections.abc import Callable, Collection, Mapping
from typing import Any

from jaxpar.models.hf.leaves import Leaf

Published = Mapping[str, Any]
"""A published config: config.json."""

Overrides = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Family:
    """How the published models of one model_type are read and written.

    Attributes:
      read_fields: the fields of our config, from the published one.
      config: our config's class.
      make_model: a model of our config.
      loss_fn: the loss of a model of our config.
      leaves: path of a parameter -> what it is made of; of our config, the published
        one, and the names of the tensors that there are (none when writing).
      num_params: of our config.
      is_parameter: whether a tensor of a file is a parameter, by its name.
      heads: how the names of tensors begin that belong to a task's head: a folder may
        lack those of this model, or have those of another's.
      describe: the published config that is written, from our config and the one that
        was read: another task's head may need another.
      head_sizes: fields of our config on which the shapes of `heads` depend. Where one
        is not the published config's, those tensors are left out: the head is new.
    """

    read_fields: Callable[[Published], Mapping[str, Any]]
    config: Callable[..., Any]
    make_model: Callable[[Any], Any]
    loss_fn: Callable[[Any], Callable[..., Any]]
    leaves: Callable[[Any, Published, Collection[str]], dict[str, Leaf]]
    num_params: Callable[[Any], int]
    is_parameter: Callable[[str], bool] = lambda name: True
    heads: tuple[str, ...] = ()
    describe: Callable[[Any, Published], Published] = lambda config, hf: hf
    head_sizes: tuple[str, ...] = ()

    def read_config(self, hf: Published, **overrides: Any) -> Any:
        """Our config of a published one.

        Args:
          hf: the published config.
          **overrides: fields of our config to replace.

        Raises:
          ValueError: if it needs something that is not known here, or lacks a field.
        """
        try:
            fields = self.read_fields(hf)
        except KeyError as error:
            raise ValueError(
                f"{hf['model_type']}: the published config has no field {error}, which "
                "says how large the model is or how it computes; add it to config.json."
            ) from None
        return self.config(**{**fields, **overrides})


def require(hf: Published, field: str, *known: Any) -> None:
    """Raise a ValueError unless a field has a known value, of which the first is usual.

    Args:
      hf: the published config.
      field: of it.
      *known: the values that are known here.
    """
    value = hf.get(field, known[0])
    if value not in known:
        raise ValueError(
            f"{hf['model_type']}: {field}={value!r} is not known here; "
            f"{' or '.join(map(repr, known))} is."
        )
