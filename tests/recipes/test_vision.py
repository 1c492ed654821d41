"""Does the vision recipe train on a folder, move to another mesh, and refuse?"""

import re
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.recipes.programs import logged_steps, start, told

RECIPE = "recipes/vision.py"
SMALL = (
    *("--vit.image-size", "8", "--vit.patch-size", "4", "--vit.num-layers", "1"),
    *("--vit.channels", "3", "--vit.num-labels", "3", "--vit.width", "16"),
)


@pytest.fixture
def args(tmp_path: Path) -> list[str]:
    """A folder of noise that is brighter in one channel, which is the class."""
    rng = np.random.default_rng(0)
    for channel, name in enumerate(("red", "green", "blue")):
        (tmp_path / "pictures" / name).mkdir(parents=True)
        for number in range(40):
            pixels = rng.integers(0, 120, (12, 10, 3), dtype=np.uint8)
            pixels[..., channel] += 100
            Image.fromarray(pixels).save(tmp_path / "pictures" / name / f"{number}.png")
    folders = ("--data", str(tmp_path / "pictures"), "--out", str(tmp_path / "run"))
    sizes = ("--batch-size", "16", "--eval-batch-size", "4", "--flip")
    return [*folders, *SMALL, *sizes, "--learning-rate", "0.02"]


@pytest.mark.slow
def test_folder_is_learned_on_two_meshes(args: list[str], tmp_path: Path):
    done = start(RECIPE, *args, "--steps", "16", "--save-every", "8")
    assert done.code == 0, done.text
    for text in ("(ZeRO 3 on data 2 x tensor 2)\n", "(ZeRO 3 on data 4)\n"):
        assert text in done.text
    moved = re.findall(r"held-out loss (\S+), accuracy (\S+) at step 12\n", done.text)
    assert len(moved) == 2, "at the end of the first mesh, and reopened on the second"
    assert float(moved[0][0]) == pytest.approx(float(moved[1][0]), rel=2e-6)
    (share,) = re.findall(r"held-out (\S+)% of \d+ images are right", done.text)
    assert float(share) > 90
    assert logged_steps(tmp_path / "run") == list(range(1, 17))


def test_model_that_does_not_fit_the_data_is_refused(
    args: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
):
    wrong = [*args, "--traceback", "--vit.num-labels", "4"]
    with pytest.raises(ValueError, match=r"num_labels=4, but data=.* has 3 \(its cla"):
        told(monkeypatch, capsys, RECIPE, *wrong)
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_digits_are_learned(tmp_path: Path):
    pytest.importorskip("sklearn", reason="needs jaxpar[vision]")
    args = ("--out", str(tmp_path / "run"), "--mesh.data", "1", "--steps", "150")
    done = start(RECIPE, *args)
    assert done.code == 0, done.text
    (share,) = re.findall(r"held-out (\S+)% of 360 images are right", done.text)
    assert float(share) > 60


def test_help_names_every_flag_and_the_presets(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
):
    ended = told(monkeypatch, capsys, RECIPE, "--help")
    assert ended.code == 0
    for text in (
        "--label-smoothing",
        "vit-tiny, vit-s16",
        "coatnet-0",
        "a subfolder of images for",
    ):
        assert text in ended.text
