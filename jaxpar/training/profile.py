"""How are some steps of a run traced, and where did their time go?

The trace is written to RUN/profile, for xprof, TensorBoard and Perfetto; the summary
beside it. Process 0 traces its own devices, the others nothing.
"""

import contextlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
from jax.profiler import ProfileData, ProfileOptions
from rich.console import Console

from jaxpar.compiled.trace import Trace, read_trace
from jaxpar.engine.engine import Engine
from jaxpar.launch.heartbeat import PHASES
from jaxpar.launch.lease import require_lease
from jaxpar.training.annotations import STEP, Annotations, name_of
from jaxpar.training.module_table import read_modules
from jaxpar.training.profile_summary import Summary, summarize

FOLDER = "profile"

Steps = tuple[int, int]


def profiled_steps(
    profile: Steps | str | None, last: int | None = None
) -> Steps | None:
    """Read which steps to profile.

    Args:
      profile: the first and the last, "10:15" or (10, 15); None or "" for none.
      last: the run's last step; None if it is not known.

    Returns:
      The first and the last.

    Raises:
      ValueError: if they are no steps of the run.
    """
    if not profile:
        return None
    if isinstance(profile, str):
        found = re.fullmatch(r"(\d+):(\d+)", profile)
        first, until = (int(found[1]), int(found[2])) if found else (0, 0)
    else:
        first, until = profile
    if not 1 <= first <= until <= (last or until):
        of_run = f", of this run's steps 1 to {last}" if last else ""
        raise ValueError(
            f"profile={profile!r} must be the first and the last step to trace, such "
            f"as '10:15'{of_run}."
        )
    return first, until


class Profile:
    """Traces the steps of a run that are to be profiled, on process 0.

    A context manager: at its end, whatever ends it, no trace is running.

    Args:
      engine: the engine.
      folder: of the run.
      steps: the first and the last; None for none.
      annotations: those of the loop.
    """

    def __init__(
        self,
        engine: Engine,
        folder: Path,
        steps: Steps | None,
        annotations: Annotations,
    ):
        self._engine, self._folder = engine, folder / FOLDER
        self._steps = steps if jax.process_index() == 0 else None
        self._annotations = annotations
        self._console = Console(highlight=False, soft_wrap=True)
        self._traced: list[int] = []

    def __enter__(self) -> "Profile":
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        if error is None and self._traced:
            self._finish()  # The run ended before the last step of the range.
        self.close()

    @contextlib.contextmanager
    def step(self, step: int) -> Iterator[None]:
        """Trace the step of the block, if it is to be.

        The trace begins and ends when the device has done all steps before. A run that
        resumes within the range traces the rest of it.
        """
        if self._steps is None or not self._steps[0] <= step <= self._steps[1]:
            self.close()
            yield
            return
        if self._traced and step != self._traced[-1] + 1:
            self.close()  # The run has rolled back.
        if not self._traced:
            self._start()
        self._traced.append(step)
        yield
        if step == self._steps[1]:
            self._finish()

    def close(self) -> None:
        """Stop a trace that did not reach its last step; it has no summary."""
        if self._traced:
            first, last = self._traced[0], self._traced[-1]
            self._stop()
            self._traced = []
            self._console.print(
                f"profile of steps {first} to {last} stopped early: the trace in "
                f"{self._folder} has no summary"
            )

    def _start(self) -> None:
        self._wait()
        require_lease(self._folder)
        options = ProfileOptions()
        # Every Python call would be an event, and slow the loop down.
        options.python_tracer_level = 0
        jax.profiler.start_trace(self._folder, profiler_options=options)

    def _wait(self) -> None:
        """Return when every step is done."""
        _ = self._engine.steps

    def _stop(self) -> None:
        self._annotations.close()
        jax.profiler.stop_trace()

    def _finish(self) -> None:
        before = self._files()
        self._wait()
        self._stop()
        self._traced = []
        # By their times too: two traces that end in one second have the same name.
        ((file, _),) = self._files() - before
        trace = read_trace(ProfileData.from_file(str(file)), map(name_of, PHASES), STEP)
        self._report(trace)

    def _report(self, trace: Trace) -> None:
        """Print the summary, and write it."""
        if not trace.steps:
            self._console.print(
                f"profile: the trace in {self._folder} has no step that can be read, "
                "so that it has no summary"
            )
            return
        summary = summarize(trace, read_modules(self._engine))
        require_lease(self._folder)
        _write(summary, self._folder)
        self._console.print(summary.text(), markup=False)
        self._console.print(f"profile  {self._folder}: open it with xprof or Perfetto")

    def _files(self) -> set[tuple[Path, int]]:
        found = self._folder.glob("plugins/profile/*/*.xplane.pb")
        return {(file, file.stat().st_mtime_ns) for file in found}


def _write(summary: Summary, folder: Path) -> None:
    written: dict[str, Any] = summary.as_json()
    (folder / "summary.json").write_text(json.dumps(written, indent=2) + "\n")
    (folder / "summary.txt").write_text(summary.text(), encoding="utf-8")
