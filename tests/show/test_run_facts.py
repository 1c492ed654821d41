"""Is what is said of a run true: how it stands, its numbers, its plan?"""

import json

import pytest

from jaxpar.show.run_data import read_run
from jaxpar.show.run_facts import (
    as_text,
    goodput_sums,
    headline_facts,
    plan_command,
    plan_rows,
    settings,
    state_of,
    step_seconds,
)
from tests.show.handmade_runs import BEGAN, account, records, write_full_run, write_run

LATER = BEGAN + 100_000


def stop(step=50, time=BEGAN + 90, code=65):
    why = "loss 9 is 80 deviations above, after 3 rollbacks already"
    return {"event": "stopped", "step": step, "time": time, "why": why, "code": code}


def state(folder, now=LATER, **options):
    return state_of(read_run(write_run(folder, **options)), now)


def test_run_at_its_last_step_is_finished(tmp_path):
    found = state(tmp_path, records=records(200), accounts=[account()])
    assert (found.word, found.is_good) == ("finished", True)


def test_stopped_run_says_why_with_its_exit_code(tmp_path):
    found = state(tmp_path, records=records(50), accounts=[account()], events=[stop()])
    assert found.word == "stopped"
    assert found.why.endswith("after 3 rollbacks already (exit code 65)")


def test_stop_of_an_earlier_start_is_over(tmp_path):
    accounts = [account(), account(BEGAN + 200)]
    options = {"records": records(50), "accounts": accounts, "events": [stop()]}
    ended = accounts[-1]["ended"]
    assert state(tmp_path, now=ended + 5, **options).word == "running"


def test_running_run_says_when_it_wrote_last(tmp_path):
    options = {"records": records(50), "accounts": [account()]}
    found = state(tmp_path, now=account()["ended"] + 42, **options)
    assert (found.word, found.why) == ("running", "last written 42 s ago")


def test_silent_run_has_no_sign_of_life(tmp_path):
    found = state(tmp_path, records=records(50), accounts=[account()])
    assert (found.word, found.is_good) == ("no sign of life", False)
    assert "nothing written since 2027-01-15 08:01 UTC" in found.why


def test_program_that_returned_before_the_last_step_ended_early(tmp_path):
    found = state(tmp_path, records=records(50), accounts=[account(end=0.0)])
    assert (found.word, found.why) == ("ended early", "the program returned at step 50")


def test_run_without_a_step_has_not_started(tmp_path):
    assert state(tmp_path).word == "not started"


def test_headline_has_the_numbers_to_know(tmp_path):
    facts = headline_facts(read_run(write_full_run(tmp_path)))
    assert facts.pop("train loss").startswith("2.3")
    assert facts.pop("tokens/s").startswith("26,")
    assert facts == {
        "step of 200": "200",
        "held-out loss": "2.5010",
        "MFU": "42.0%",
        "step time": "310 ms",
        "memory": "74.4 GB",
        "goodput": "38.5%",
        "time": "5 min",
    }


def test_headline_names_an_earlier_step_that_was_better(tmp_path):
    rows = [{"step": s, "eval/loss": x} for s, x in ((10, 2.0), (20, 1.5), (30, 1.7))]
    facts = headline_facts(read_run(write_run(tmp_path, rows)))
    assert facts["held-out loss"] == "1.7000"
    assert facts["best, step 20"] == "1.5000"


def test_step_times_of_earlier_logs_are_those_between_records(tmp_path):
    times = {1: 0.0, 2: 1.0, 4: 4.0, 5: 104.0, 6: 105.0}
    rows = [{"step": step, "time": time} for step, time in times.items()]
    accounts = [account(), account(resumed=4)]
    run = read_run(write_run(tmp_path, rows, accounts=accounts))
    found, measured = step_seconds(run)
    assert not measured
    assert found.steps.tolist() == [2, 4, 6]
    assert found.values.tolist() == [1.0, 1.5, 1.0]


def test_goodput_is_of_all_starts_and_none_of_a_damaged_file(tmp_path):
    run = read_run(write_full_run(tmp_path))
    sums = goodput_sums(run)
    assert list(sums)[:3] == ["step", "lost", "start"]
    assert sum(sums.values()) == pytest.approx(300)
    (tmp_path / "goodput.json").write_text(json.dumps([{"resumed": 1}]))
    assert goodput_sums(read_run(tmp_path)) == {}


def test_settings_are_flat_and_in_words(tmp_path):
    config = {"steps": 3, "mesh": {"data": 4}, "data": [], "remat": None, "x": True}
    found = settings(read_run(write_run(tmp_path, config=config)))
    assert found == {
        "steps": "3",
        "mesh.data": "4",
        "data": "none",
        "remat": "none",
        "x": "yes",
        "identity.corpus_sha256": "8de1",
        "versions.python": "3.13.0",
        "versions.jax": "0.11.2",
        "command": "recipes/pretrain.py --model tiny",
        "commit": "67e4419466de",
    }


def test_values_are_written_as_people_do():
    assert as_text({"data": [1, 2.5], "on": False}) == "data 1, 2.5, on no"


def test_plan_is_held_against_what_was_measured(tmp_path):
    rows = plan_rows(read_run(write_full_run(tmp_path)))
    assert rows[0] == ("step time", "280 ms", "310 ms", "1.11")
    assert rows[2] == ("MFU", "45.0%", "42.0%", "0.933")
    assert rows[3] == ("memory of a device", "60.0 GB", "74.4 GB", "1.24")


def test_plan_without_an_estimate_has_its_memory(tmp_path):
    write_run(tmp_path)
    plan = {"bytes_per_device": {"peak": 10**6}, "estimate": None}
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    rows = plan_rows(read_run(tmp_path))
    assert rows[0] == ("step time", "-", "-", "-")
    assert rows[3] == ("memory of a device", "1.00 MB", "-", "-")


def test_run_without_a_plan_gets_the_command_for_one(tmp_path):
    run = read_run(write_run(tmp_path / "a run"))
    assert plan_rows(run) == []
    assert plan_command(run) == (
        "jaxpar plan recipes/pretrain.py --target TARGET "
        f"--json '{tmp_path}/a run/plan.json' -- --model tiny"
    )
    run = read_run(write_run(tmp_path / "b", command=None))
    assert plan_command(run).startswith("jaxpar plan RECIPE --target TARGET")
