"""Are arrays and scikit-learn's digits rows, and is what does not fit named?"""

import sys
from typing import Any

import numpy as np
import pytest

from jaxpar.data import ImageArrays, Loader, RowSource, load_digits

PIXELS = np.random.default_rng(0).integers(0, 256, (5, 4, 6, 3), dtype=np.uint8)
LABELS = np.array([0, 1, 2, 1, 0])
DIGITS_HELD_OUT = "add893f4f93730ee"


def test_rows_are_the_arrays():
    rows = ImageArrays(PIXELS, LABELS, ("a", "b", "c"))
    assert isinstance(rows, RowSource)
    batch = rows.read([3, 0])
    np.testing.assert_array_equal(batch["image"], PIXELS[[3, 0]])
    assert batch["label"].tolist() == [1, 0]
    for name, shape in rows.shapes.items():
        assert batch[name].dtype == shape.dtype
        assert batch[name].shape[1:] == shape.shape
    whole = next(Loader(rows, batch_size=5, repeat=False))
    np.testing.assert_array_equal(whole["image"], PIXELS)


def test_identity_is_of_images_labels_and_classes():
    rows = [
        ImageArrays(PIXELS, LABELS, ("a", "b", "c")),
        ImageArrays(PIXELS ^ np.uint8(1), LABELS, ("a", "b", "c")),
        ImageArrays(PIXELS, LABELS, ("a", "b", "d")),
        ImageArrays(PIXELS.reshape(5, 6, 4, 3), LABELS, ("a", "b", "c")),
    ]
    hashes = [each.identity()["sha256"] for each in rows]
    assert len({*hashes}) == 4
    assert rows[0].identity()["sha256"] == hashes[0]
    again = ImageArrays(PIXELS.copy(), LABELS.astype(np.int8), ("a", "b", "c"))
    assert again.identity() == rows[0].identity()


@pytest.mark.parametrize(
    ("pixels", "labels", "message"),
    [
        (PIXELS, LABELS[:4], r"label_N: has shape \(4,\) for 5 images"),
        (PIXELS[:0], LABELS[:0], r"label_N: has shape \(0,\) for 0 images"),
        (
            PIXELS,
            np.array([0, 1, 3, 3, 0]),
            r"label_N\[2\] is 3, but there are 3 classes: .* 0 to 2 \(2 are not\)",
        ),
        (PIXELS, np.array([0, 1, 2, -1, 0]), r"label_N\[3\] is -1, but there are 3"),
    ],
)
def test_arrays_that_do_not_fit_are_refused(
    pixels: np.ndarray, labels: np.ndarray, message: str
):
    with pytest.raises(ValueError, match=message):
        ImageArrays(pixels, labels, ("a", "b", "c"))


def test_digits_are_split_in_fifths_that_stay_the_same():
    pytest.importorskip("sklearn")
    train, held, every = (
        load_digits(split=split) for split in ("train", "heldout", "all")
    )
    assert [len(rows) for rows in (train, held, every)] == [1437, 360, 1797]
    assert train.classes == tuple("0123456789")
    images = [rows.read(range(len(rows)))["image"] for rows in (train, held, every)]
    assert {image.max() for image in images} == {255}
    assert images[0].shape[1:] == (8, 8, 1)
    seen = [{image.tobytes() for image in split} for split in images]
    assert not seen[0] & seen[1]
    assert seen[0] | seen[1] == seen[2]
    # What the recipe's accuracy is of.
    assert held.identity()["sha256"].startswith(DIGITS_HELD_OUT)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"split": "test"}, r"split='test' must be one of 'train', 'heldout', 'all'"),
        ({"heldout": 1}, r"heldout=1 must be at least 2"),
    ],
)
def test_splits_that_there_are_not_are_refused(how: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        load_digits(**how)


def test_missing_scikit_learn_is_named(monkeypatch: pytest.MonkeyPatch):
    for name in ("sklearn", "sklearn.datasets"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(
        ModuleNotFoundError, match=r"load_digits needs scikit-learn, .*jaxpar\[vision\]"
    ):
        load_digits()
