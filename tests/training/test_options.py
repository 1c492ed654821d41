"""Are options of a start read from any config, and kept out of the record?"""

import dataclasses

from jaxpar.training.options import OPTIONS, StartOptions, options_of
from jaxpar.training.record import as_json


@dataclasses.dataclass(frozen=True)
class Plain:
    steps: int = 3
    writers: tuple[str, ...] = ("tensorboard",)


def test_config_with_some_of_the_fields_has_those():
    assert options_of(Plain()) == StartOptions(writers=("tensorboard",))
    assert options_of(object()) == StartOptions()


def test_options_are_not_what_the_run_is():
    assert as_json(Plain(), {})["config"] == {"steps": 3}
    assert set(OPTIONS) >= {"change", "init_from", "writers"}
