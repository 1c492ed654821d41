import itertools
import json
import sys
from pathlib import Path

import numpy as np
import pytest
import xxhash
from PIL import Image

from jaxpar.data import ImageFolder, Loader, RowSource, images

COLOURS = {"blue": (0, 0, 250), "green": (0, 250, 0), "red": (250, 0, 0)}


def write(file: Path, pixels: np.ndarray) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(file)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Twenty images of each colour, darker by number, and files of other kinds."""
    for name, colour in COLOURS.items():
        for index in range(20):
            pixels = np.tile(np.uint8(colour), (12, 8, 1)) - np.uint8(index)
            write(tmp_path / "pictures" / name / f"{index:02}.png", pixels)
    for other in ("notes.txt", "red/notes.txt", "empty/notes.txt", "top.png"):
        file = tmp_path / "pictures" / other
        file.parent.mkdir(exist_ok=True)
        file.write_bytes(b"x")
    return tmp_path / "pictures"


def test_rows_are_the_images_and_their_classes(folder: Path):
    rows = ImageFolder(folder, size=8, split="all")
    assert isinstance(rows, RowSource)
    assert rows.classes == ("blue", "green", "red")
    assert rows.files == tuple(
        f"{name}/{index:02}.png" for name in sorted(COLOURS) for index in range(20)
    )
    batch = rows.read([41, 0])
    assert batch["image"].dtype == np.uint8
    assert batch["label"].dtype == np.int32
    assert batch["label"].tolist() == [2, 0]
    expected = [np.uint8(COLOURS["red"]) - np.uint8(1), np.uint8(COLOURS["blue"])]
    np.testing.assert_array_equal(
        batch["image"], np.broadcast_to(np.stack(expected)[:, None, None], (2, 8, 8, 3))
    )


def test_image_of_its_size_is_as_it_was(tmp_path: Path):
    pixels = np.random.default_rng(0).integers(0, 256, (6, 9, 3), dtype=np.uint8)
    write(tmp_path / "a" / "one.png", pixels)
    row = ImageFolder(tmp_path, size=(6, 9), split="all").read([0])
    np.testing.assert_array_equal(row["image"][0], pixels)


def test_image_is_cropped_around_its_centre(tmp_path: Path):
    pixels = np.random.default_rng(0).integers(0, 256, (4, 12, 3), dtype=np.uint8)
    write(tmp_path / "a" / "one.png", pixels)
    row = ImageFolder(tmp_path, size=4, split="all").read([0])
    np.testing.assert_array_equal(row["image"][0], pixels[:, 4:8])


def test_image_is_resized(tmp_path: Path):
    ramp = np.tile(np.arange(0, 240, 4, dtype=np.uint8)[:, None, None], (1, 80, 3))
    write(tmp_path / "a" / "one.png", ramp)
    image = ImageFolder(tmp_path, size=30, split="all").read([0])["image"][0]
    means = ramp.reshape(30, 2, 80, 3).astype(float).mean(1)[:, :30]
    # At the edges, there is less to weigh.
    np.testing.assert_allclose(image[2:-2], means[2:-2], atol=1)


@pytest.mark.parametrize("mode", ["L", "RGB", "RGBA", "1"])
def test_image_of_any_mode_becomes_grey(tmp_path: Path, mode: str):
    (tmp_path / "a").mkdir()
    white = Image.new("RGB", (5, 4), (255, 255, 255)).convert(mode)
    white.save(tmp_path / "a" / "i.png")
    rows = ImageFolder(tmp_path, size=(4, 5), split="all", mode="L")
    found = rows.read([0])["image"]
    assert found.shape == (1, 4, 5, 1)
    assert rows.shapes["image"].shape == found.shape[1:]
    assert (found == 255).all()
    assert rows.identity() != ImageFolder(tmp_path, size=(4, 5), split="all").identity()


@pytest.mark.parametrize("mode", ["L", "RGBA", "P", "1"])
def test_image_of_any_mode_becomes_rgb(tmp_path: Path, mode: str):
    (tmp_path / "a").mkdir()
    Image.new("RGB", (5, 5), (255, 255, 255)).convert(mode).save(
        tmp_path / "a" / "i.png"
    )
    row = ImageFolder(tmp_path, size=5, split="all").read([0])
    assert (row["image"] == 255).all()


def test_image_is_upright(tmp_path: Path):
    (tmp_path / "a").mkdir()
    image = Image.fromarray(np.arange(48, dtype=np.uint8).reshape(4, 4, 3))
    exif = Image.Exif()
    exif[0x0112] = 3  # The camera was upside down.
    image.save(tmp_path / "a" / "i.png", exif=exif)
    row = ImageFolder(tmp_path, size=4, split="all").read([0])
    np.testing.assert_array_equal(row["image"][0], np.asarray(image)[::-1, ::-1])


def test_splits_are_by_the_hash_of_the_path(folder: Path):
    train = ImageFolder(folder, size=8, heldout=5)
    heldout = ImageFolder(folder, size=8, split="heldout", heldout=5)
    everything = ImageFolder(folder, size=8, split="all").files
    assert sorted(train.files + heldout.files) == list(everything)
    assert heldout.files == tuple(
        name
        for name in everything
        if xxhash.xxh3_64_intdigest(name.encode()) < 2**64 / 5
    )
    assert train.classes == heldout.classes
    before = set(heldout.files)
    for index in range(20, 40):
        write(folder / "red" / f"{index}.png", np.zeros((8, 8, 3), np.uint8))
    assert before < set(ImageFolder(folder, size=8, split="heldout", heldout=5).files)


@pytest.mark.parametrize("heldout", [2, 4])
def test_numbered_files_are_held_out_evenly(tmp_path: Path, heldout: int):
    for label in range(30):
        (tmp_path / f"{label:02}").mkdir()
        for index in range(10):
            (tmp_path / f"{label:02}" / f"{index}.png").touch()
    files = ImageFolder(tmp_path, size=8, split="heldout", heldout=heldout).files
    assert len(files) / 300 == pytest.approx(1 / heldout, abs=0.05)
    counts = [
        sum(file.startswith(f"{label:02}") for file in files) for label in range(30)
    ]
    assert sum(count in (0, 10) for count in counts) < 6, "most classes are split"


def test_loader_goes_on_at_a_row_of_images(folder: Path):
    def make(batch_size: int) -> Loader:
        return Loader(ImageFolder(folder, size=8, split="all"), batch_size=batch_size)

    def take(loader: Loader, count: int) -> np.ndarray:
        batches = itertools.islice(loader, count)
        return np.concatenate([batch["image"][:, 0, 0] for batch in batches])

    expected = take(make(6), 10)
    loader = make(6)
    take(loader, 3)
    state = json.loads(json.dumps(loader.get_state()))
    again = make(14)
    again.set_state(state, change=True)
    np.testing.assert_array_equal(take(again, 3), expected[18:60])
    shapes = {name: (x.shape, x.dtype) for name, x in again.sample_batch.items()}
    assert shapes == {"image": ((14, 8, 8, 3), np.uint8), "label": ((14,), np.int32)}


def test_bad_file_stops_and_is_named(folder: Path):
    file = folder / "green" / "03.png"
    file.write_bytes(file.read_bytes()[:40])
    rows = ImageFolder(folder, size=8, split="all")
    with pytest.raises(
        ValueError, match=r"green/03.png' can't be decoded \(.*on_bad='skip'"
    ):
        rows.read([20, 23])


@pytest.mark.parametrize("content", [b"", b"no image", b"\x89PNG\r\n\x1a\n"])
def test_bad_file_is_skipped_for_the_next(folder: Path, content: bytes):
    for name in ("green/03.png", "red/19.png"):
        (folder / name).write_bytes(content)
    rows = ImageFolder(folder, size=8, split="all", on_bad="skip")
    with pytest.warns(UserWarning, match=r"03.png' can't be decoded .* for 1 so far"):
        batch = rows.read([23])
    assert (
        batch["image"][0, 0, 0].tolist() == rows.read([24])["image"][0, 0, 0].tolist()
    )
    with pytest.warns(UserWarning, match=r"red/19.png' can't be decoded"):
        assert rows.read([59])["label"] == [0], "the first file is after the last"
    assert rows.read([23, 59])["label"].tolist() == [1, 0], "warned of once"
    assert list(rows.bad) == ["green/03.png", "red/19.png"]


def test_no_good_file_raises(tmp_path: Path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "i.png").write_bytes(b"no image")
    rows = ImageFolder(tmp_path, size=8, split="all", on_bad="skip")
    with (
        pytest.warns(UserWarning, match="can't be decoded"),
        pytest.raises(ValueError, match="none of the 1 images can be decoded"),
    ):
        rows.read([0])


def test_missing_file_is_not_a_bad_image(folder: Path):
    rows = ImageFolder(folder, size=8, split="all", on_bad="skip")
    (folder / "green" / "03.png").unlink()
    with pytest.raises(FileNotFoundError):
        rows.read([23])


def test_identity_is_of_the_files(folder: Path):
    first = ImageFolder(folder, size=8).identity()
    assert first == ImageFolder(folder, size=(8, 8)).identity()
    assert first["image_size"] == [8, 8]
    write(folder / "red" / "new.png", np.zeros((8, 8, 3), np.uint8))
    assert ImageFolder(folder, size=8).identity() != first


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"size": 0}, r"size=\(0, 0\) must be at least 1 pixel"),
        ({"size": (8, -1)}, r"size=\(8, -1\) must be at least 1 pixel"),
        ({"heldout": 1}, "heldout=1 must be at least 2.*split='all'"),
        ({"split": "test"}, "split='test' must be one of 'train', 'heldout', 'all'"),
        ({"mode": "RGBA"}, "mode='RGBA' must be one of 'RGB', 'L'"),
        ({"on_bad": "ask"}, "on_bad='ask' must be one of 'stop', 'skip'"),
    ],
)
def test_wrong_argument_raises(folder: Path, given: dict, message: str):
    with pytest.raises(ValueError, match=message):
        ImageFolder(folder, **{"size": 8, **given})


def test_empty_split_raises(tmp_path: Path):
    write(tmp_path / "a" / "i.png", np.zeros((8, 8, 3), np.uint8))
    with pytest.raises(ValueError, match="split='heldout' has none of the 1 images"):
        ImageFolder(tmp_path, size=8, split="heldout", heldout=1000)


def test_missing_folder_raises(tmp_path: Path):
    with pytest.raises(FileNotFoundError, match="is not a folder; give one with a sub"):
        ImageFolder(tmp_path / "none", size=8)


def test_missing_pillow_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch):
    images._import_pillow.cache_clear()
    monkeypatch.setitem(sys.modules, "PIL.Image", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'jaxpar\[images\]'"):
        ImageFolder(folder, size=8)


@pytest.mark.parametrize("inside", ["", "cat", "loose.png", "cat/notes.txt"])
def test_folder_without_images_by_class_says_what_is_missing(tmp_path, inside):
    folder = tmp_path / "pictures"
    path = folder / inside
    (path.parent if path.suffix else path).mkdir(parents=True)
    if path.suffix:
        path.touch()
    with pytest.raises(ValueError, match=r"path: '.*pictures' has no image in a subf"):
        ImageFolder(folder, size=4)
