"""Does a summary add up: by what devices did, and by module?"""

import pytest

from jaxpar.compiled.modules import LOSS, OTHER, Attribution, make_tree
from jaxpar.compiled.trace import Trace, TracedOp
from jaxpar.launch.heartbeat import PHASES
from jaxpar.training.annotations import name_of
from jaxpar.training.module_table import StepModules
from jaxpar.training.profile_summary import summarize

TREE = make_tree({"up/kernel": (4, 8), "down/kernel": (8, 4)}, {}, "update")


def attribution(path, *, communicates=False, is_control=False, source=""):
    return Attribution(path, communicates, is_control, source)


MODULES = StepModules(
    tree=TREE,
    attributions={
        "jit_step": {
            "dot.1": attribution(("up",)),
            "dot.2": attribution(("down",)),
            "all-gather-start.1": attribution(("down",), communicates=True),
            "while.1": attribution(LOSS, is_control=True),
            "sum": attribution(LOSS, source="jit(f)/sum at loss.py:3"),
        }
    },
    flops={("up",): 640, ("down",): 320},
    bytes={("up",): 100, LOSS: 50},
)


def op(start, end, name, program="jit_step"):
    return TracedOp(float(start), float(end), name, program)


DEVICE = [
    op(0, 50, "while.1"),  # Its body's operations are counted.
    op(2, 10, "dot.1"),
    op(8, 14, "all-gather-start.1"),
    op(14, 20, "dot.2"),
    op(30, 34, "sum"),
    op(36, 38, "MemcpyH2D", ""),
    op(42, 44, "loop_fusion", "jit_evaluate"),
    op(50, 90, "dot.1"),  # After the last step.
]
OTHER_DEVICE = [op(0, 50, "dot.1")]
HOST = {name_of(phase): [] for phase in PHASES} | {
    name_of("data"): [(0.0, 1.0), (21.0, 25.0)],
    name_of("evaluate"): [(40.0, 46.0)],
}


def made(**devices):
    return Trace(devices, HOST, {7: (0.0, 20.0), 8: (21.0, 50.0)})


def test_seconds_are_of_a_step_on_one_device():
    summary = summarize(made(gpu=DEVICE), MODULES)
    assert summary.steps == (7, 8)
    assert summary.seconds == pytest.approx(
        # 8 + 6 + 4 of the step, 2 of a copy; the gather after 10; 1 + 4 waited.
        {"compute": 10.0, "communication": 2.0, "input": 2.5, "other": 7.5}
    )
    assert summary.hidden == pytest.approx(1.0)
    assert summary.left_out == pytest.approx(3.0)
    assert summary.total == pytest.approx((50 - 6) / 2)
    assert summary.unknown == pytest.approx(1.0)
    assert summary.sources == {"jit(f)/sum at loss.py:3": pytest.approx(2.0)}


def test_rows_have_the_time_that_devices_ran():
    rows = {row.path: row for row in summarize(made(gpu=DEVICE), MODULES).rows}
    seconds = {path: row.seconds for path, row in rows.items()}
    expected = {("up",): 4.0, ("down",): 5.0, LOSS: 2.0, OTHER: 1.0}
    assert seconds == pytest.approx(expected)
    assert (rows["up",].parameters, rows["up",].flops, rows["up",].bytes) == (
        32,
        640,
        100,
    )


def test_devices_are_averaged():
    summary = summarize(made(a=DEVICE, b=OTHER_DEVICE), MODULES)
    assert summary.devices == 2
    assert summary.seconds["compute"] == pytest.approx((10 + 25) / 2)


def test_text_shows_parts_modules_and_what_has_none():
    text = summarize(made(gpu=DEVICE), MODULES).text()
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert lines[0] == "steps 7 to 8: 22000.00 ms a step, mean of 1 devices"
    assert "exposed communication 2000.00 9.1" in lines
    assert "up 32 640 100 4000.00 18.2" in lines
    assert "(nothing ran) 10000.00 45.5" in lines
    assert "all 64 960 150 22000.00 100.0" in lines
    assert "2000.00 ms in no module: jit(f)/sum at loss.py:3" in lines


def test_trace_without_devices_says_so():
    summary = summarize(made(), MODULES)
    assert summary.devices == 0
    assert "no operations of devices" in summary.text()
