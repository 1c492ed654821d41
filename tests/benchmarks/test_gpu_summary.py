"""Are marks judged by what was measured, and is only what was measured proposed?"""

import tomllib
from typing import Any

import pytest

from benchmarks.gpu.items import ITEMS, Item
from benchmarks.gpu.kernel_tests import read_report
from benchmarks.gpu.lines import DONE, RESULT
from benchmarks.gpu.summary import Found, of_day, proposed, table, verdicts
from benchmarks.gpu.training import rates


def line(item: str, case: str, name: str, found: dict[str, Any]) -> dict[str, Any]:
    key = {"item": item, "case": case, "code": "c", "device": "H200"}
    return {**key, "event": RESULT, "name": name, "found": found}


def training(**tokens: float) -> Found:
    cases = {name.replace("_", " "): rate for name, rate in tokens.items()}
    return {
        ("124m", case): {"step": {"tokens_per_second": rate}}
        for case, rate in cases.items()
    }


def test_losses_of_contestants_are_compared() -> None:
    rate = {"tokens_per_second": 500_000}
    found: Found = {
        ("124m", "engine"): {"step": {**rate, "last_loss": 10.3}},
        ("124m", "by hand"): {"step": {"last_loss": 10.4}},
        ("124m", "torch compile, flash"): {"step": {"last_loss": 12.0}},
    }
    words = [told for told in verdicts(found) if "last loss" in told]
    assert words == [
        "met: 124m: the last loss is 10.300, of by hand 10.400 (mark: within 2%)",
        "MISSED: 124m: the last loss is 10.300, of torch compile, flash 12.000 "
        "(mark: within 2%)",
    ]


def test_newest_result_of_the_code_and_device_counts() -> None:
    other = line("124m", "engine", "step", {"tokens_per_second": 9}) | {"code": "old"}
    known = [
        line("124m", "engine", "step", {"tokens_per_second": 1}),
        line("124m", "engine", "step", {"tokens_per_second": 2}),
        other,
        {**line("124m", "engine", "", {}), "event": DONE},
    ]
    found, ended = of_day(known, "c", "H200")
    assert found["124m", "engine"]["step"] == {"tokens_per_second": 2}
    assert list(ended.values()) == [DONE]
    unbuilt = Item("later", "What then?", (), not_built="the engine")
    printed = "\n".join(table([*ITEMS, unbuilt], found, ended))
    assert "  engine: done\n    step: 2 tokens/s\n  kernels: not begun" in printed
    assert "later: What then?\n  not built: the engine" in printed


def test_training_step_is_judged_by_its_rate_and_beside_each_contestant() -> None:
    found = training(engine=479_000, by_hand=482_000, torch_compile=500_000)
    assert list(verdicts(found)) == [
        "MISSED: 124m: 479,000 tokens/s (mark: 480,000)",
        "MISSED: 124m: 0.958 x torch compile (500,000 tokens/s) (mark: 1)",
        "met: 124m: 0.994 x by hand (482,000 tokens/s) (mark: 0.99)",
    ]
    assert list(verdicts({})) == []


@pytest.mark.parametrize(("error", "word"), [(0.049, "met"), (-0.051, "MISSED")])
def test_predicted_peak_is_judged_both_ways(error: float, word: str) -> None:
    found: Found = {("predicted", "350m"): {"predicted": {"peak_error": error}}}
    (told,) = verdicts(found)
    assert told.startswith(f"{word}: predicted, 350m: predicted peak {error:+.1%}")


def test_kernels_are_judged_by_dense_attention_copies_and_tests() -> None:
    case = "window 2048 32768"
    ratios = {"sparse_of_cudnn_forward": 5.1, "sparse_of_cudnn_both": 4.9}
    found: Found = {
        ("window", case): {case: ratios},
        ("optimizers", "124m"): {"fused adamw": {"of_copy_bandwidth": 0.91}},
        ("smoke", "all"): {"tests": {"passed": 3, "failed": 1}},
    }
    words = [told.split(":")[0] for told in verdicts(found)]
    assert words == ["met", "MISSED", "met", "MISSED"]


def test_proposed_rates_are_those_of_the_copy_and_of_the_fastest_matmul() -> None:
    found: Found = {
        ("ceilings", "rates"): {
            "machine": {"jax": "0.11.2"},
            "copy": {"achieved": 0.9},
            "matmul 4096": {"achieved": 0.7},
            "matmul 8192": {"achieved": 0.81},
        }
    }
    read = tomllib.loads(proposed(found, "NVIDIA H200", "abc"))
    assert read["memory"]["achieved"] == 0.9
    assert read["peak"]["achieved"] == 0.81
    assert "matmul 8192" in read["peak"]["source"]
    assert proposed({("ceilings", "rates"): {}}, "NVIDIA H200", "abc") == ""


def test_rate_is_the_median_rounds_and_mfu_is_of_the_datasheets_rate() -> None:
    flops = {"full": 989.4e9, "causal": 494.7e9}
    found = rates([0.004, 0.002, 0.001], 1000, flops, device_kind="NVIDIA H200")
    assert found["tokens_per_second"] == pytest.approx(500_000)
    assert found["slowest_round"] == pytest.approx(250_000)
    assert found["fastest_round"] == pytest.approx(1_000_000)
    assert found["mfu_full"] == pytest.approx(0.5)
    assert found["mfu_causal"] == pytest.approx(0.25)
    assert "mfu_full" not in rates([0.1], 1, flops, device_kind="cpu")


def test_tests_are_counted_and_failures_have_their_message() -> None:
    report = """<testsuites><testsuite>
      <testcase name="a"/>
      <testcase name="b"><failure message="it is 2, not 1">long</failure></testcase>
      <testcase name="c"><error message="no GPU"/></testcase>
      <testcase name="d"><skipped message="no"/></testcase>
    </testsuite></testsuites>"""
    found = read_report(report)
    assert (found["passed"], found["failed"], found["skipped"]) == (1, 2, 1)
    assert found["failures"] == {"b": "it is 2, not 1", "c": "no GPU"}


def test_offload_is_judged_by_its_copies_steps_and_host_memory() -> None:
    def step(ms: float, gb: float) -> dict:
        return {"step": {"step_ms": ms, "on_host_gb": gb}}

    found: Found = {
        ("offload", "copies"): {
            "to the device": {"each_way_gb_per_second": 54.0},
            "both at once": {"each_way_gb_per_second": 41.0},
        },
        ("offload", "1.3b, none"): step(100.0, 0.0),
        ("offload", "1.3b, streamed"): step(112.0, 15.8),
        ("offload", "1.3b, 0.6 streamed"): step(109.0, 9.5),
        ("offload", "13b, 0.6 streamed"): step(4000.0, 93.1),
    }
    assert list(verdicts(found)) == [
        "met: offload: copies to the device at 54.0 GB/s each way (mark: 50 GB/s)",
        "MISSED: offload: copies both at once at 41.0 GB/s each way (mark: 50 GB/s)",
        "MISSED: offload: 1.3b, streamed takes 1.12 x the step without (mark: 1.10)",
        "met: offload: 1.3b, 0.6 streamed takes 1.09 x the step without (mark: 1.10)",
        "met: offload: 13b, 0.6 streamed trains with 93.1 GB on the host (mark: 100)",
    ]
