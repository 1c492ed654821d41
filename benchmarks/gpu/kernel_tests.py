"""Do the kernels pass their tests? pytest's, in a process of its own."""

import importlib.util
import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from typing import Any

from benchmarks.gpu.imports import ROOT
from benchmarks.gpu.session import Rows, Session

FOLDER = "tests/kernels_pallas"
SETTINGS = "benchmarks/gpu/pytest.ini"
"""pyproject.toml's ask for a new pytest, and check annotations by absent packages."""
_LONGEST_MESSAGE = 600


def run(session: Session, files: list[str], only: str) -> Rows:
    """Run tests, on the GPU but in the dry run.

    Args:
      session: where they run.
      files: of `FOLDER`.
      only: an expression of names, as pytest's -k takes it; empty for all.

    Raises:
      RuntimeError: if pytest ran no test, or could not run them.
    """
    report = session.keep / "junit.xml"
    command = [sys.executable, "-m", "pytest", "-c", SETTINGS, f"--rootdir={ROOT}"]
    command += ["-p", "no:cacheprovider", f"--junitxml={report}"]
    command += [] if session.dry else ["--gpu"]
    if not session.dry and importlib.util.find_spec("xdist"):
        command += ["-p", "xdist", "-n", str(max(1, (os.cpu_count() or 2) // 2))]
    command += [f"{FOLDER}/{file}" for file in files]
    command += ["-k", only] if only else []
    # Plugins that happen to be there, of whatever version, load by themselves.
    environment = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, check=False)
    if done.returncode not in (0, 1):
        raise RuntimeError(f"pytest ended with {done.returncode}: see its output above")
    found = read_report(report.read_text(encoding="utf-8"))
    if not found["passed"] and not found["failed"]:
        raise RuntimeError(f"no test ran of {files} -k {only!r}: all were skipped")
    yield "tests", found


def read_report(text: str) -> dict[str, Any]:
    """What passed, and what failed with the beginning of its message."""
    passed, skipped, failures = 0, 0, {}
    for case in ElementTree.fromstring(text).iter("testcase"):
        kinds = {child.tag: child for child in case}
        wrong = kinds.get("failure", kinds.get("error"))
        if wrong is not None:
            failures[case.get("name", "")] = wrong.get("message", "")[:_LONGEST_MESSAGE]
        elif "skipped" in kinds:
            skipped += 1
        else:
            passed += 1
    return {
        "passed": passed,
        "failed": len(failures),
        "skipped": skipped,
        "failures": failures,
    }
