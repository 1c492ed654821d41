import concurrent.futures
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.compiled import compilers

LIMIT_SECONDS = 240


@pytest.fixture(scope="session")
def process() -> Iterator[concurrent.futures.ProcessPoolExecutor]:
    if not compilers.FOLDER.is_dir():
        pytest.skip(
            f"no compilers for GPUs and TPUs in {compilers.FOLDER.name}/ beside the "
            "environment: `make test` on the main lane installs them"
        )
    with compilers.start() as pool:
        yield pool


@pytest.fixture(scope="session")
def compiled(process) -> Callable[..., Any]:
    """Call a function of tests.compiled.programs where the compilers are, once."""
    results: dict[tuple, Any] = {}

    def call(fn: Callable[..., Any], *args: Any) -> Any:
        if (fn, args) not in results:
            results[fn, args] = process.submit(fn, *args).result(LIMIT_SECONDS)
        return results[fn, args]

    return call
