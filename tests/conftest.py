"""What do all tests run on? Eight CPU devices, or the GPU where --gpu is given."""

import fnmatch
import gc
import importlib
import importlib.util
import os
import sys
import zlib
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import jax
import jaxtyping
import pytest

from tests.compiling import FAST, read_xla_flags
from tests.essential import ESSENTIAL
from tests.type_checks import share_checkers

CACHE = Path(__file__).resolve().parent.parent / ".cache"
CACHE_BYTES = 4 * 1024**3
THREADS = "32"
"""Of XLA's CPU backend. It has one for each device by default, and two collectives that
wait at once can take them all until it ends the process: experts in a pipeline without
a bubble did in half of the runs on two cores, and in none of ten with more threads."""
# By name, for jaxpar is imported after the plugin that checks its annotations.
WHY_NOT = "jaxpar.engine.make_step.why_not"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--gpu",
        action="store_true",
        help="run the tests marked gpu, on the GPU, and no others",
    )
    parser.addoption(
        "--devices",
        type=int,
        default=8,
        help="CPU devices: 16 for the pipeline's cases on data, pipe and tensor",
    )

    parser.addoption(
        "--foreign",
        metavar="FOLDER",
        help="checkouts of other repositories, whose models are trained",
    )
    parser.addoption(
        "--soak", action="store_true", help="also run what takes half an hour"
    )
    parser.addoption(
        "--part",
        metavar="K/N",
        help="run the K-th of N parts of the tests, by their names: always the same",
    )
    parser.addoption(
        "--optimized",
        action="store_true",
        help="compile as users do; else fast, for most tests take one step",
    )


def pytest_configure(config: pytest.Config) -> None:
    share_checkers()
    if not config.getoption("--gpu"):
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", config.getoption("--devices"))
        os.environ.setdefault("NPROC", THREADS)
        fast = not config.getoption("--optimized")
        jax.config.update("jax_disable_most_optimizations", fast)
        if fast:
            read_xla_flags(FAST)
    _cache_compiled_programs()
    if not hasattr(config, "workerinput"):  # Once, before xdist's workers start.
        _delete_oldest_programs()
    # A machine that is lent for its GPU may lack it (benchmarks/gpu_day.py).
    if importlib.util.find_spec("hypothesis"):
        _make_hypothesis_repeatable()


def _make_hypothesis_repeatable() -> None:
    settings = importlib.import_module("hypothesis").settings
    # Compiling makes the first example slow, and a failure must come back on every run.
    settings.register_profile("jaxpar", deadline=None, derandomize=True)
    settings.load_profile("jaxpar")


def _cache_compiled_programs() -> None:
    python = f"py{sys.version_info.major}.{sys.version_info.minor}"
    folder = CACHE / f"jax-{jax.__version__}-{python}"
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)


def _delete_oldest_programs() -> None:
    """Keep the cache below its limit: half of it goes once it is above.

    With JAX's own limit, every program that is added reads the whole folder, under a
    lock: the more programs there are, the longer each takes.
    """
    found = [(file.stat(), file) for file in CACHE.rglob("*") if file.is_file()]
    left = sum(status.st_size for status, _ in found)
    if left <= CACHE_BYTES:
        return
    for status, file in sorted(found, key=lambda each: each[0].st_mtime):
        if left <= CACHE_BYTES // 2:
            break
        file.unlink(missing_ok=True)
        left -= status.st_size


def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> None:
    for item in items:
        file = item.path.relative_to(config.rootpath).as_posix()
        patterns = ESSENTIAL.get(file)
        if patterns is not None and not _fits(item.name, patterns):
            item.add_marker(pytest.mark.thorough)
    if part := config.getoption("--part"):
        number, parts = map(int, part.split("/"))
        others = [
            item
            for item in items
            if zlib.crc32(item.nodeid.encode()) % parts != number - 1
        ]
        config.hook.pytest_deselected(items=others)
        items[:] = [item for item in items if item not in set(others)]
    on_gpu = config.getoption("--gpu")
    reason = (
        "runs on CPU: leave out --gpu" if on_gpu else "needs a GPU: run pytest --gpu"
    )
    for item in items:
        if on_gpu != (item.get_closest_marker("gpu") is not None):
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Generator[None, Any, Any]:
    """Collect no garbage while millions of objects are made that stay."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()  # Tests that collect garbage need not go through them.


def _fits(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


@pytest.fixture(scope="session", autouse=True)
def unchecked_losses() -> Iterator[None]:
    """Check no loss function: that compiles another program for every engine."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(WHY_NOT, lambda *_, **__: "this test is of something else")
        yield


@pytest.fixture(scope="session", autouse=True)
def impatient() -> Iterator[None]:
    """Try operations on files again for a moment only."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("jaxpar.launch.own_files.SECONDS", 0.2)
        yield


@pytest.fixture
def checked_losses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check loss functions as users' are."""
    monkeypatch.setattr(
        WHY_NOT, importlib.import_module("jaxpar.step.loss_check").why_not
    )


@pytest.fixture
def optimized() -> Iterator[None]:
    """Compile as users do: for long runs, and results that are to be equal in bits."""
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", before)


@pytest.fixture
def unchecked_types(monkeypatch: pytest.MonkeyPatch) -> None:
    """Call jaxpar as users do: without beartype, which raises before our checks."""
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)


@pytest.fixture
def compiled() -> Iterator[list[str]]:
    """The programs compiled during a test, but for those that make keys."""
    jax.random.key(0)
    names: list[str] = []

    def listen(event: str, duration_secs: float, **kwargs: str | int) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            names.append(str(kwargs.get("fun_name")))

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield names
    jax.monitoring.unregister_event_duration_listener(listen)
