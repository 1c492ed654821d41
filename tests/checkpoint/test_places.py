"""Is a folder found where it was given: on a file system, or in a bucket?"""

from pathlib import Path

import pytest

from jaxpar.checkpoint.places import BucketPlace, FolderPlace, place_of


def test_url_is_a_place_in_a_bucket() -> None:
    place = place_of("s3://bucket/runs/a/")
    assert isinstance(place, BucketPlace)
    assert str(place) == "s3://bucket/runs/a"
    assert place == place_of("s3://bucket/runs/a")
    assert str(place.step(3)) == "s3://bucket/runs/a/step_00000003"


def test_path_is_a_place_in_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    place = place_of("runs/a")
    assert isinstance(place, FolderPlace)
    assert str(place) == str(tmp_path / "runs/a")
    assert place == place_of(tmp_path / "runs" / "a")
    assert place != place_of("runs/b")
    assert place.step(3).path == tmp_path / "runs/a/step_00000003"
