"""Does what runs in a process of its own come back, whatever becomes of the process?"""

import os
import signal
import stat
import sys
import tempfile

import jax
import pytest

from jaxpar.planner import subprocess
from jaxpar.planner.subprocess import CompilerProcessError, Stopped, call


def test_what_is_returned_comes_back_from_another_process():
    here, there = os.getpid(), call("os:getpid", what="pid")
    assert isinstance(there, int)
    assert there != here
    assert call("operator:add", 2, 3, what="sum") == 5


def test_functions_of_this_file_are_sent_whole():
    offset = 4
    assert call("builtins:map", lambda x: x + offset, [1], what="map").__next__() == 5


def test_process_is_prepared_for_compilers():
    def platform():
        return jax.default_backend(), jax.config.jax_platforms

    assert call("operator:call", platform, what="jax") == ("cpu", "cpu")
    assert call("os:getenv", "CUDA_VISIBLE_DEVICES", what="env") == "-1"
    assert call("os:getenv", "ALLOW_MULTIPLE_LIBTPU_LOAD", what="env") == "1"


def test_wrong_input_is_the_callers_error():
    with pytest.raises(ValueError, match=r"^invalid literal for int.*'x'"):
        call("builtins:int", "x", what="number")
    with pytest.raises(ValueError, match="No such file"):
        call("os:listdir", "/nowhere-at-all", what="list")


def test_error_of_the_compiler_is_told_with_what_was_asked():
    def fail():
        raise RuntimeError("RESOURCE_EXHAUSTED: of memory\n\nline two")

    with pytest.raises(
        CompilerProcessError, match=r"plan of x: RuntimeError: RESOURCE"
    ):
        call("operator:call", fail, what="plan of x")


def test_exit_is_told_with_what_was_printed():
    def stop():
        print("usage")
        raise SystemExit("wrong flag")

    found = call("operator:call", stop, what="x")
    assert found == Stopped(1, "usage\n", "wrong flag\n")


@pytest.mark.parametrize(
    ("number", "message"),
    [
        (signal.SIGKILL, r"x: its process was killed, as the system does"),
        (
            signal.SIGABRT,
            r"x: the compiler crashed \(SIGABRT\)\.\n  F0000 check",
        ),
    ],
)
def test_death_of_the_process_is_told(number, message):
    def die():
        print("F0000 check failed", file=sys.stderr, flush=True)
        os.kill(os.getpid(), number)

    with pytest.raises(CompilerProcessError, match=message):
        call("operator:call", die, what="x")


def test_end_without_an_answer_is_told_with_its_last_lines():
    def other():
        raise KeyError("kernel")

    with pytest.raises(
        CompilerProcessError, match=r"(?s)x: its process ended with code 1\..*'kernel'"
    ):
        call("operator:call", other, what="x")


def test_pickles_are_in_a_folder_of_this_user_alone(tmp_path, monkeypatch):
    """Whoever could write one would have it executed."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    run, seen = subprocess._run, []

    def look(files, **streams):
        seen.extend(stat.S_IMODE(file.parent.stat().st_mode) for file in files)
        return run(files, **streams)

    monkeypatch.setattr(subprocess, "_run", look)
    assert call("operator:add", 2, 3, what="sum") == 5
    assert seen == [0o700, 0o700]
    assert not list(tmp_path.iterdir()), "nor is one left"
