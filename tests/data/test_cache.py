"""Is a cache whole or not there, whoever builds it at once and whoever is killed?"""

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from jaxpar.data.cache import cached, identity_of, root_for

ROOT = Path(__file__).resolve().parents[2]

KEY = {"of": "test"}


def build(folder: Path) -> dict[str, int]:
    (folder / "data").write_text("whole")
    return {"by": 0}


def fail(folder: Path) -> dict[str, int]:
    raise AssertionError("was built already")


def test_folder_is_built_once(tmp_path):
    first = cached(tmp_path / "root", KEY, build)
    assert cached(tmp_path / "root", KEY, fail) == first
    folder, index = first
    assert (folder / "data").read_text() == "whole"
    assert index == {"by": 0}
    assert json.loads((folder / "index.json").read_text())["key"]["of"] == "test"


def test_another_key_is_another_folder(tmp_path):
    folder, _ = cached(tmp_path, KEY, build)
    other, _ = cached(tmp_path, {"of": "another"}, build)
    assert folder != other


def test_build_that_fails_leaves_nothing(tmp_path):
    def broken(folder: Path) -> dict[str, int]:
        (folder / "data").write_text("half")
        raise ValueError("no more room")

    with pytest.raises(ValueError, match="no more room"):
        cached(tmp_path, KEY, broken)
    assert [path.suffix for path in tmp_path.iterdir()] == [".lock"]
    assert cached(tmp_path, KEY, build)[1] == {"by": 0}


def test_second_process_waits_and_builds_if_the_first_is_killed(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "tests.data.builders", str(tmp_path)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "killed first",
        "killed second builds has whole by 2",
        "kept first has whole by 1",
        "kept second has whole by 1",
    ]
    left = sorted(path.suffix for path in (tmp_path / "killed").iterdir())
    assert left == ["", ".lock"], "what the killed one left is deleted"


def test_first_builder_wins_where_there_are_no_locks(tmp_path, monkeypatch):
    def none(*args: object) -> None:
        raise OSError("no locks on this file system")

    monkeypatch.setattr("fcntl.flock", none)
    both = threading.Barrier(2)

    def slow(folder: Path) -> dict[str, int]:
        both.wait(timeout=60)
        return build(folder)

    found = []
    threads = [
        threading.Thread(target=lambda: found.append(cached(tmp_path, KEY, slow)))
        for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found[0] == found[1]
    assert len([path for path in tmp_path.iterdir() if path.is_dir()]) == 1


def test_folder_that_cannot_be_written_says_where_else(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(
        ValueError, match=r"cache: '.*' can't be written .*--data-cache"
    ):
        cached(tmp_path / "file" / "root", KEY, build)


@pytest.mark.parametrize("left", [None, "", '{"key": {', "[]"])
def test_folder_without_a_whole_index_is_built_again(tmp_path, left):
    folder, _ = cached(tmp_path, KEY, build)
    (folder / "index.json").unlink()
    if left is not None:
        (folder / "index.json").write_text(left)
    assert cached(tmp_path, KEY, build)[1] == {"by": 0}


def test_caches_are_beside_the_data(tmp_path):
    (tmp_path / "a.txt").touch()
    assert root_for([tmp_path / "a.txt"], None) == tmp_path / ".jaxpar"
    assert root_for([tmp_path], None) == tmp_path / ".jaxpar"
    assert root_for([tmp_path], "other") == Path("other")
    folder, _ = cached(tmp_path / ".jaxpar", KEY, build)
    assert root_for([folder / "data"], None) == tmp_path / ".jaxpar"


def test_identity_is_of_name_size_and_time(tmp_path):
    path = tmp_path / "a"
    path.write_text("text")
    first = identity_of([("a", path)])
    assert identity_of([("a", path)]) == first == json.loads(json.dumps(first))
    os.utime(path, ns=(0, 5))
    assert identity_of([("a", path)]) == [["a", 4, 5]]
