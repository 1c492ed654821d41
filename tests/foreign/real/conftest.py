"""Where are the checkouts, and what did the models give?"""

from pathlib import Path

import flax
import jax
import optax
import pytest

from tests.foreign.real.checkouts import Checkouts

REPOSITORIES = (
    "google/flax",
    "google-deepmind/nanodo",
    "google-research/big_vision",
    "jax-ml/bonsai",
)


def _folder(config: pytest.Config) -> Path | None:
    folder = config.getoption("--foreign")
    return Path(folder).resolve() if folder else None


@pytest.fixture(scope="session")
def checkouts(request: pytest.FixtureRequest) -> Checkouts:
    folder = _folder(request.config)
    if folder is None:
        pytest.skip("needs checkouts: make test-foreign FOREIGN=folder")
    return Checkouts(folder)


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    """Print what was compared, and of which versions."""
    folder, write = _folder(config), terminalreporter.write_line
    if folder is None:
        return
    terminalreporter.section("foreign programs")
    write(f"jax {jax.__version__}, flax {flax.__version__}, optax {optax.__version__}")
    for repository in REPOSITORIES:
        write(f"{repository} {Checkouts(folder).commit(repository)}")
    for outcome in ("passed", "failed"):
        for report in terminalreporter.getreports(outcome):
            found = dict(report.user_properties)
            if "losses" in found:
                name = report.nodeid.partition("[")[2].rstrip("]")
                write(
                    f"{outcome} {name:32} losses {found['losses']:.0e}, "
                    f"leaves {found['leaves']:.0e}, seed {found['seed']}"
                )
