"""Does the loss shift, weigh and mask as it says, and refuse what does not fit?"""

import re
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jaxpar.models import t5_loss

INPUTS = np.arange(8).reshape(2, 4)
LABELS = np.array([[5, 6, -100], [7, 8, 9]])


class Recorder:
    """Keeps what it is called with; its loss is the sum of the weights."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.args, self.kwargs = args, kwargs
        return 2.0 * kwargs["weights_BT"].sum()


def run(**batch: Any) -> tuple[Recorder, Any]:
    model = Recorder()
    arrays = {name: jnp.asarray(x) for name, x in batch.items()}
    return model, t5_loss(model, arrays)


def test_the_decoder_reads_the_labels_one_place_later() -> None:
    model, loss = run(inputs=INPUTS, labels=LABELS)
    np.testing.assert_array_equal(model.args[0], INPUTS)
    assert model.args[1].tolist() == [[0, 5, 6], [0, 7, 8]]
    assert model.kwargs["targets_BT"].tolist() == [[5, 6, 0], [7, 8, 9]]
    assert model.kwargs["weights_BT"].tolist() == [[1, 1, 0], [1, 1, 1]]
    assert model.kwargs.keys() == {"targets_BT", "weights_BT"}
    assert (float(loss.total), float(loss.weight)) == (10.0, 5.0)


def test_what_is_not_learned_is_read_as_padding() -> None:
    model, _ = run(inputs=INPUTS, labels=[[5, -100, 6], [-100, 8, 9]])
    assert model.args[1].tolist() == [[0, 5, 0], [0, 0, 8]]


def test_a_mask_is_the_segments_of_the_inputs() -> None:
    mask = np.array([[True, True, False, False], [True] * 4])
    model, _ = run(inputs=INPUTS, labels=LABELS, attention_mask=mask)
    np.testing.assert_array_equal(model.kwargs["segment_ids_BS"], mask.astype(int))
    assert "decoder_segment_ids_BT" not in model.kwargs


def test_every_packed_example_begins_anew() -> None:
    labels, segments = [[5, 6, 7, 8, 9, 3]], np.array([[1, 1, 2, 3, 3, 0]])
    model, loss = run(
        inputs=INPUTS[:1],
        labels=labels,
        segment_ids=np.array([[1, 2, 3, 0]]),
        label_segment_ids=segments,
    )
    assert model.args[1].tolist() == [[0, 5, 0, 0, 8, 0]]
    assert model.kwargs["weights_BT"].tolist() == [[1, 1, 1, 1, 1, 0]]
    np.testing.assert_array_equal(model.kwargs["decoder_segment_ids_BT"], segments)
    assert model.kwargs["segment_ids_BS"].tolist() == [[1, 2, 3, 0]]
    assert float(loss.weight) == 5.0


ONES = np.ones((2, 4), int)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"labels": None}, "has ['inputs'], but the loss reads 'inputs' [B, S] and"),
        (
            {"attention_mask": ONES[:, :3]},
            "'attention_mask' has shape (2, 3), but 'inputs' (2, 4)",
        ),
        (
            {"segment_ids": ONES, "label_segment_ids": ONES},
            "'label_segment_ids' has shape (2, 4), but 'labels' (2, 3)",
        ),
        ({"segment_ids": ONES}, "has 'segment_ids' alone; give packed rows"),
        (
            {"label_segment_ids": ONES[:, :3]},
            "has 'label_segment_ids' alone; give packed rows",
        ),
        (
            {
                "segment_ids": ONES,
                "label_segment_ids": ONES[:, :3],
                "attention_mask": ONES,
            },
            "has 'attention_mask' and 'segment_ids'; leave the mask out",
        ),
    ],
)
def test_what_does_not_fit_is_named(change: dict[str, Any], message: str) -> None:
    batch = {"inputs": INPUTS, "labels": LABELS, **change}
    with pytest.raises(ValueError, match=re.escape(message)):
        run(**{name: x for name, x in batch.items() if x is not None})
