"""What is at random in prepared images, what does it depend on, and what is refused?"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from jaxpar.data import (
    ImageArrays,
    Loader,
    PreparedImages,
    RowSource,
    image_shapes,
    open_images,
)
from jaxpar.data.prepared_images import crop_around

PIXELS = np.random.default_rng(0).integers(1, 256, (12, 6, 6, 2), dtype=np.uint8)
ROWS = ImageArrays(PIXELS, np.arange(12) % 4, tuple("abcd"))


def scaled(pixels: np.ndarray) -> np.ndarray:
    return (pixels / np.float32(255) - np.float32(0.5)) / np.float32(0.5)


def test_rows_are_scaled_and_nothing_is_at_random():
    rows = PreparedImages(ROWS)
    assert isinstance(rows, RowSource)
    batch = rows.read([5, 12 + 5, 7 * 12 + 5])
    np.testing.assert_array_equal(batch["image"], np.stack([scaled(PIXELS[5])] * 3))
    assert batch["image"].dtype == rows.shapes["image"].dtype
    assert batch["label"].tolist() == [1, 1, 1]


def test_each_channel_may_have_its_scale():
    rows = PreparedImages(ROWS, mean=(0.25, 0.5), std=(0.5, 2.0))
    image = rows.read([3])["image"][0]
    pixels = PIXELS[3] / np.float32(255)
    np.testing.assert_allclose(image[..., 0], (pixels[..., 0] - 0.25) / 0.5, rtol=1e-6)
    np.testing.assert_allclose(image[..., 1], (pixels[..., 1] - 0.5) / 2, rtol=1e-6)


def test_crop_is_of_the_centre():
    rows = PreparedImages(ROWS, size=4)
    assert rows.shapes["image"].shape == (4, 4, 2)
    np.testing.assert_array_equal(
        rows.read([2])["image"][0], scaled(PIXELS[2, 1:5, 1:5])
    )


@pytest.mark.parametrize("size", [None, 4])
def test_every_shift_and_mirror_image_is_drawn_about_as_often(size: int | None):
    rows = PreparedImages(ROWS, size=size, shift=1, flip=True, seed=3)
    own = (size or 6, size or 6)
    kinds = {}
    for down in (-1, 0, 1):
        for right in (-1, 0, 1):
            crop = crop_around(PIXELS[5], own, (down, right))
            for mirrored in (crop, crop[:, ::-1]):
                kinds[scaled(mirrored).tobytes()] = len(kinds)
    drawn = rows.read([place * 12 + 5 for place in range(1800)])["image"]
    counts = np.bincount([kinds[np.ascontiguousarray(x).tobytes()] for x in drawn])
    assert len(counts) == 18
    assert counts.min() > 60, "of 100 that are expected"


def test_images_are_turned_by_angles_up_to_the_limit_either_way():
    pixels = np.zeros((1, 41, 41, 1), np.uint8)
    pixels[0, 19:22, 34:37] = 255
    rows = PreparedImages(
        ImageArrays(pixels, np.zeros(1, int), ("one",)),
        rotate=30,
        mean=0.0,
        std=1.0,
        seed=2,
    )
    turned = rows.read(range(300))["image"][..., 0]
    share = turned / turned.sum((1, 2), keepdims=True)
    place = np.arange(41) - 20
    down, right = share.sum(2) @ place, share.sum(1) @ place
    np.testing.assert_allclose(np.hypot(down, right), 15, atol=0.2)
    degrees = np.rad2deg(np.arctan2(down, right))
    counts, _ = np.histogram(degrees, bins=6, range=(-31, 31))
    assert counts.sum() == 300
    assert counts.min() > 30, "of 50 that are expected"


def test_crop_beyond_an_image_is_black():
    moved = crop_around(PIXELS[0], (6, 6), (2, -1))
    np.testing.assert_array_equal(moved[:4, 1:], PIXELS[0, 2:, :5])
    assert not moved[4:].any()
    assert not moved[:, 0].any()


def test_larger_crop_has_a_border_in_which_a_shift_loses_nothing():
    rows = PreparedImages(ROWS, size=8, shift=1, mean=0.0, std=1.0)
    drawn = rows.read([place * 12 + 5 for place in range(20)])["image"]
    assert drawn.shape == (20, 8, 8, 2)
    np.testing.assert_allclose(
        drawn.sum((1, 2)), [PIXELS[5].sum((0, 1)) / 255] * 20, 1e-5
    )
    still = PreparedImages(ROWS, size=8).read([5])["image"][0]
    np.testing.assert_array_equal(still[1:7, 1:7], scaled(PIXELS[5]))


def test_what_is_drawn_depends_on_the_seed_and_the_place_only():
    def batches(batch_size: int, **how: Any) -> np.ndarray:
        rows = PreparedImages(ROWS, shift=2, flip=True, seed=how.pop("seed", 0))
        loader = Loader(rows, batch_size=batch_size, **how)
        found = [next(loader)["image"] for _ in range(24 // batch_size)]
        return np.concatenate(found)

    right = batches(6)
    np.testing.assert_array_equal(right, batches(4), "whatever the batch is")
    first, second = (
        batches(6, process_index=index, process_count=2) for index in (0, 1)
    )
    shared = np.stack([first.reshape(4, 3, 6, 6, 2), second.reshape(4, 3, 6, 6, 2)], 1)
    np.testing.assert_array_equal(right, shared.reshape(right.shape), "two processes")
    assert not np.array_equal(right, batches(6, seed=1))


def test_run_that_goes_on_draws_what_it_would_have_drawn():
    rows = PreparedImages(ROWS, shift=2, seed=0)
    loader, other = Loader(rows, batch_size=5), Loader(rows, batch_size=5)
    for _ in range(4):
        next(loader)
    other.set_state(loader.get_state())
    np.testing.assert_array_equal(next(other)["image"], next(loader)["image"])


def test_epochs_draw_anew():
    rows = PreparedImages(ROWS, shift=2, seed=0)
    loader = Loader(rows, batch_size=12, shuffle=False, repeat=True)
    first, second = next(loader), next(loader)
    np.testing.assert_array_equal(first["label"], second["label"])
    assert not np.array_equal(first["image"], second["image"])


def test_another_seed_is_another_stream():
    state = Loader(PreparedImages(ROWS, shift=1), batch_size=4).get_state()
    other = Loader(PreparedImages(ROWS, shift=1, seed=1), batch_size=4)
    with pytest.raises(ValueError, match="prepared"):
        other.set_state(state)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"size": 0}, r"size=0 must be at least 1 pixel; None for the source's 6 x 6"),
        ({"shift": 6}, r"shift=6 must be from 0 to 5"),
        ({"rotate": -1}, r"rotate=-1 must be from 0 to 180 degrees"),
        ({"shift": -1}, r"shift=-1 must be from 0 to 5"),
        ({"shift": 4, "size": 4}, r"shift=4 must be from 0 to 3"),
        ({"mean": (0.5,) * 3}, r"mean=.* one for each of the 2 channels"),
        ({"std": 0.0}, r"std=0\.0 must be above 0"),
        ({"seed": -1}, r"seed=-1 must not be negative"),
    ],
)
def test_numbers_out_of_range_are_refused(how: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        PreparedImages(ROWS, **how)


def test_rows_that_are_no_images_are_refused():
    with pytest.raises(ValueError, match=r"source: its rows have .*'float32\[6, 6, 2"):
        PreparedImages(PreparedImages(ROWS))


def test_label_that_the_model_lacks_is_named():
    rows = PreparedImages(ROWS, num_labels=3)
    assert rows.read([0, 1, 2])["label"].tolist() == [0, 1, 2]
    with pytest.raises(
        ValueError, match=r"num_labels=3, .* has the label 3; .* 0 to 2"
    ):
        rows.read([2, 3])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for number in range(40):
        file = tmp_path / "ab"[number % 2] / f"{number}.png"
        file.parent.mkdir(exist_ok=True)
        Image.new("RGB", (12, 9), (number + 9, 200, 100)).save(file)
    return tmp_path


def test_folder_is_opened_with_room_for_its_shifts(folder: Path):
    how = {"size": 6, "channels": 3, "num_labels": 2, "shift": 2, "flip": True}
    train, held = (
        open_images(str(folder), split, **how) for split in ("train", "heldout")
    )
    assert train.source.shapes["image"].shape == (10, 10, 3)
    assert len(train) + len(held) == 40
    assert 2 <= len(held) <= 16
    for rows in (train, held):
        shapes = image_shapes(1, 6, 3)
        for name, array in rows.read([0]).items():
            assert (array.shape, array.dtype) == (
                shapes[name].shape,
                shapes[name].dtype,
            )
    is_random = [rows.identity()["prepared"]["shift"] for rows in (train, held)]
    assert is_random == [2, 0]
    assert train.read([0])["image"].min() > -1, "nothing is beyond the image"


def test_folder_of_grey_images_is_read_as_such(folder: Path):
    rows = open_images(str(folder), "all", size=6, channels=1, num_labels=2)
    assert rows.read([0])["image"].shape == (1, 6, 6, 1)


def test_model_that_does_not_fit_the_data_is_refused(folder: Path):
    how = {"size": 6, "channels": 3}
    message = r"num_labels=3, but data='.*' has 2 \(its classes are a, b\)"
    with pytest.raises(ValueError, match=message):
        open_images(str(folder), "train", num_labels=3, **how)


def test_digits_are_grey():
    pytest.importorskip("sklearn", reason="needs jaxpar[vision]")
    how = {"size": 10, "num_labels": 10}
    assert open_images("digits", "heldout", channels=1, **how).shapes[
        "image"
    ].shape == (10, 10, 1)
    with pytest.raises(ValueError, match=r"channels=3, but data='digits' has 1"):
        open_images("digits", "heldout", channels=3, **how)
