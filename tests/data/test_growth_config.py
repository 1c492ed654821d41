"""Do a recipe's flags become the rows and batches that they name?"""

from typing import Any

import numpy as np
import pytest

from jaxpar.data import (
    BatchWarmup,
    Curriculum,
    Growth,
    GrowthConfig,
    GrowthInSteps,
    Loader,
    Tokens,
    Windows,
)

TOKENS = Tokens((np.arange(200, dtype=np.uint8),), files=("counting",))


def config(**given: Any) -> GrowthConfig:
    return GrowthConfig(**given)


def test_by_default_nothing_grows() -> None:
    found = config().batch_arguments(4, 8, pack=False)
    assert found["sample_batch"]["tokens"].shape == (4, 9)
    assert found["other_shapes"] == ()
    loader = config().open_loader(Windows(TOKENS, seq_len=8), 4, 8, seed=1)
    assert isinstance(loader, Loader)
    right = Loader(TOKENS, seq_len=8, batch_size=4, seed=1)
    np.testing.assert_array_equal(next(loader)["tokens"], next(right)["tokens"])


def test_engine_gets_the_shapes_that_the_loader_gives() -> None:
    own = config(
        curriculum_start=2,
        curriculum_steps=3,
        curriculum_multiple=2,
        batch_warmup=(2, 2, 8),
    )
    assert own.lengths(8) == Growth(2, 8, steps=3, multiple=2)
    assert own.sizes(4) == BatchWarmup(2, 2, 8, 4)
    loader = own.open_loader(Windows(TOKENS, seq_len=8), 4, 8, seed=0)
    assert isinstance(loader, Curriculum)
    found = own.batch_arguments(4, 8, pack=False)
    known = [*found["other_shapes"], found["sample_batch"]]
    shapes = dict.fromkeys(next(loader)["tokens"].shape for _ in range(9))
    assert [x["tokens"].shape for x in known] == [*shapes]


def test_lengths_by_hand() -> None:
    own = config(curriculum_lengths=(2, 8), curriculum_until=(5,))
    assert own.lengths(8) == GrowthInSteps((2, 8), (5,))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"curriculum_until": (5,)}, r"give --curriculum-lengths too"),
        (
            {"curriculum_lengths": (2, 8), "curriculum_start": 2},
            r"curriculum_start=2 and curriculum_lengths=\(2, 8\) are two ways",
        ),
        ({"curriculum_lengths": (2, 4)}, r"\(2, 4\) must end at the model's seq_len=8"),
        ({"batch_warmup": (2, 2)}, r"batch_warmup=\(2, 2\) must be three numbers"),
        ({"curriculum_start": 2}, r"start=2 must be a positive multiple of multiple="),
    ],
)
def test_flags_that_do_not_fit_are_refused(given: dict, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        config(**given).batch_arguments(4, 8, pack=False)
