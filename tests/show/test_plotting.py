"""Are figures saved in one style, with equal bytes, where they can be written?"""

import sys

import matplotlib as mpl
import pytest

from jaxpar.show.picture import draw
from jaxpar.show.plotting import check_path, new_figure, save
from tests.planner.handmade import make_piped_plan


def test_style_is_ours_inside_and_the_users_outside():
    before = dict(mpl.rcParams)
    with new_figure(3.0, 2.0) as figure:
        assert list(figure.get_size_inches()) == [3.0, 2.0]
        assert mpl.rcParams["font.size"] == 8.0
        assert mpl.rcParams["text.parse_math"] is False
    assert dict(mpl.rcParams) == before


def test_style_of_the_user_is_restored_after_an_error():
    def fail():
        with new_figure(3.0, 2.0):
            raise RuntimeError("drawing failed")

    with mpl.rc_context({"font.size": 20.0}):
        with pytest.raises(RuntimeError, match="drawing failed"):
            fail()
        assert mpl.rcParams["font.size"] == 20.0


@pytest.mark.parametrize(
    ("suffix", "begin"), [("png", b"\x89PNG"), ("svg", b"<?xml"), ("pdf", b"%PDF")]
)
def test_equal_content_gives_equal_bytes(tmp_path, suffix, begin):
    files = [tmp_path / f"{number}.{suffix}" for number in range(2)]
    for file in files:
        with new_figure(3.0, 2.0) as figure:
            figure.suptitle("$x_{$ is a name")
            figure.subplots().plot([0.0, 1.0], [1.0, 0.0], label="a line")
            save(figure, file, suffix)
    (content,) = {file.read_bytes() for file in files}
    assert content.startswith(begin)
    assert b"Date" not in content


@pytest.mark.parametrize(
    ("suffix", "begin"), [(".png", b"\x89PNG"), (".SVG", b"<?xml"), (".pdf", b"%PDF")]
)
def test_same_plan_gives_the_same_bytes_in_any_style(tmp_path, suffix, begin):
    plan = make_piped_plan("1f1b", 1, 2, estimate=None)
    files = [tmp_path / f"{number}{suffix}" for number in range(4)]
    for file in files[:3]:
        draw(plan, file)
    with mpl.rc_context({"font.size": 20.0, "axes.facecolor": "black"}):
        draw(plan, files[3])
        assert mpl.rcParams["font.size"] == 20.0
    (content,) = {file.read_bytes() for file in files}
    assert content.startswith(begin)
    assert b"Date" not in content


@pytest.mark.parametrize("name", ["plan.jpeg", "plan.gif", "plan"])
def test_file_of_another_kind_is_refused(tmp_path, name):
    message = rf"path='.*{name}' must end in \.png or \.svg or \.pdf\."
    with pytest.raises(ValueError, match=message):
        check_path(tmp_path / name)
    with pytest.raises(ValueError, match=rf"path='.*{name}' must end in \.html\."):
        check_path(tmp_path / name, (".html",))
    check_path(tmp_path / "plan.PNG")


def test_folder_that_is_not_there_is_named(tmp_path):
    with pytest.raises(
        FileNotFoundError, match=r"the folder '.*no' does not exist; make it"
    ):
        check_path(tmp_path / "no" / "plan.png")


def test_missing_matplotlib_is_said_before_anything_else(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'jaxpar\[plot\]'"):
        check_path(tmp_path / "plan.gif")
