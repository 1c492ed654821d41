"""Do processes hash shares of a step's files that are of one size, and all of them?"""

import concurrent.futures
import itertools
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from jaxpar.checkpoint import outcome as outcomes
from jaxpar.checkpoint import sealing
from jaxpar.checkpoint.manifest import seal_files, sizes_of
from jaxpar.checkpoint.outcome import FailedElsewhereError, SaveOutcome
from jaxpar.checkpoint.sealing import divide, seal_together
from tests.checkpoint.test_outcome import Service

COUNT = 3


@pytest.fixture
def processes(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[SaveOutcome]]:
    """One save's outcome, of each process."""
    monkeypatch.setattr(outcomes, "_POLL_SECONDS", 0.005)
    service = Service()
    made = [SaveOutcome(0, 10, service, (index, COUNT)) for index in range(COUNT)]
    yield made
    for each in made:
        each.close()


@pytest.fixture
def step(tmp_path: Path) -> Path:
    """A folder of seven files."""
    folder = tmp_path / "step"
    (folder / "arrays" / "d").mkdir(parents=True)
    for i in range(6):
        (folder / "arrays" / "d" / f"{i}").write_bytes(bytes([i]) * (100 * i))
    (folder / "metadata").write_bytes(b"{}")
    return folder


class Hashed:
    """Names that each thread has hashed, while files of some names can't be read."""

    def __init__(self, unreadable: str = ""):
        self.names: dict[int, list[str]] = {}
        self._unreadable = unreadable

    def __call__(self, folder: Path, names: list[str]) -> Any:
        self.names[threading.get_ident()] = names
        if self._unreadable in names:
            raise OSError(5, "Input/output error", self._unreadable)
        return seal_files(folder, names)


def seal_by(processes: list[SaveOutcome], folder: Path) -> list[Any]:
    """Entries, or the error, of each process."""

    def run(outcome: SaveOutcome) -> Any:
        try:
            return seal_together(outcome, folder)
        except (OSError, FailedElsewhereError) as error:
            if not isinstance(error, FailedElsewhereError):
                outcome.fail(repr(error))
            return error

    with concurrent.futures.ThreadPoolExecutor(COUNT) as pool:
        return list(pool.map(run, processes))


def test_each_process_hashes_its_share(
    processes: list[SaveOutcome], step: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hashed = Hashed()
    monkeypatch.setattr(sealing, "seal_files", hashed)
    first, *others = seal_by(processes, step)
    sizes = sizes_of(step)
    assert first == seal_files(step, list(sizes))
    assert others == [{}, {}]
    names = list(hashed.names.values())
    assert sorted(itertools.chain(*names)) == sorted(sizes)
    assert sorted(sum(sizes[name] for name in own) for own in names) == [500, 500, 502]


def test_file_that_one_process_cannot_read_is_known_to_all(
    processes: list[SaveOutcome], step: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unreadable = divide(sizes_of(step), COUNT)[1][0]
    monkeypatch.setattr(sealing, "seal_files", Hashed(unreadable))
    first, second, _ = seal_by(processes, step)
    assert isinstance(second, OSError)
    assert second.filename == unreadable
    assert isinstance(first, FailedElsewhereError)
    assert str(first).startswith("process 1: OSError(5, 'Input/output error')")


def test_file_that_is_not_seen_yet_is_waited_for(
    processes: list[SaveOutcome], step: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = iter([False, False])
    monkeypatch.setattr(sealing, "exists", lambda _: next(seen, True))
    first, *_ = seal_by(processes, step)
    assert first == seal_files(step, list(sizes_of(step)))
    assert next(seen, None) is None


def test_file_that_is_deleted_by_a_failed_save_is_no_failure_of_its_own(
    processes: list[SaveOutcome], step: Path
) -> None:
    processes[0].fail("no room")
    with pytest.raises(FailedElsewhereError, match="process 0: no room"):
        sealing._require_there(processes[1], step / "deleted")


def test_file_that_never_appears_is_a_failure(
    processes: list[SaveOutcome], step: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sealing, "_APPEARS_SECONDS", 0.01)
    missing = divide(sizes_of(step), COUNT)[2][0]
    monkeypatch.setattr(sealing, "exists", lambda path: path != step / missing)

    def files(folder: Path, names: list[str]) -> Any:
        return seal_files(folder, [n.replace(missing, "missing") for n in names])

    monkeypatch.setattr(sealing, "seal_files", files)
    first, _, third = seal_by(processes, step)
    assert isinstance(third, FileNotFoundError)
    assert isinstance(first, FailedElsewhereError)


def test_file_of_another_size_elsewhere_is_refused(
    processes: list[SaveOutcome], step: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = divide(sizes_of(step), COUNT)[1][0]

    def files(folder: Path, names: list[str]) -> Any:
        found = seal_files(folder, names)
        return {n: (s - (n == own), digest) for n, (s, digest) in found.items()}

    monkeypatch.setattr(sealing, "seal_files", files)
    first, second, _ = seal_by(processes, step)
    assert f"{step / own}' has 399 bytes here and 400 on process 0" in str(second)
    assert "the hosts must mount the same folder" in str(first)


@pytest.mark.parametrize("count", [1, 2, 3, 4])
@pytest.mark.parametrize("sizes", [(), (7,), (3, 3, 3, 3), (1, 9, 2, 8, 3, 7)])
def test_largest_share_is_within_a_third_of_the_best_one(
    sizes: tuple[int, ...], count: int
) -> None:
    named = {f"{i}": size for i, size in enumerate(sizes)}
    shares = divide(named, count)
    assert sorted(itertools.chain(*shares)) == sorted(named)
    best = min(
        max(
            sum(s for s, share in zip(sizes, to, strict=True) if share == i)
            for i in range(count)
        )
        for to in itertools.product(range(count), repeat=len(sizes))
    )
    largest = max(sum(named[name] for name in share) for share in shares)
    assert 3 * largest <= 4 * best
