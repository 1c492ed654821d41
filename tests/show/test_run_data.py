"""Is a run's folder read whatever state it is in?"""

import dataclasses
import json
import math
import shutil
import time

import numpy as np
import pytest

from jaxpar.show.run_data import MOST_EVENTS, distinct_names, read_run
from tests.show.handmade_runs import EVENTS, account, write_full_run, write_run
from tests.test_older_files import WRITTEN


def test_everything_in_the_folder_is_read(tmp_path):
    run = read_run(write_full_run(tmp_path / "full"))
    assert (run.name, run.last_step, run.total_steps) == ("full", 200, 200)
    assert len(run.series["train/loss"]) == 200
    assert run.series["eval/loss"].steps.tolist() == list(range(20, 201, 20))
    assert run.events == list(EVENTS)
    assert run.resumed == [120]
    assert run.plan["target"] == "h200:1x8"
    assert run.sample.startswith("def f")
    assert run.problems == []


def test_run_of_an_earlier_version_is_read_under_the_names_of_today():
    run = read_run(WRITTEN)
    names = {"time", "train/loss", "train/grad_norm", "train/loss_scale"}
    assert set(run.series) == names | {"train/skipped"}
    assert np.isnan(run.series["train/loss"].values).tolist() == [False] * 4 + [
        True,
        False,
    ]
    (saved,) = run.saved
    assert (saved.step, saved.metric, saved.problem) == (6, None, "")
    assert saved.num_bytes > 1000


def test_run_that_has_just_started_has_nothing_yet(tmp_path):
    (tmp_path / "run.json").write_text(json.dumps({"config": {"steps": 10}}))
    run = read_run(tmp_path)
    assert (run.last_step, run.total_steps, run.series) == (0, 10, {})
    assert (run.events, run.accounts, run.saved, run.problems) == ([], [], [], [])


def test_non_finite_numbers_and_a_truncated_last_line_are_read(tmp_path):
    rows = [{"step": 1, "loss": "nan"}, {"step": 2, "loss": "-inf", "tag": [1]}]
    write_run(tmp_path, rows, events=[{"event": "bad", "step": 1}])
    for name in ("metrics.jsonl", "events.jsonl"):
        with (tmp_path / name).open("a") as file:
            file.write('{"step": 3, "lo')
    run = read_run(tmp_path)
    loss = run.series["train/loss"].values
    assert math.isnan(loss[0])
    assert loss[1] == -math.inf
    assert set(run.series) == {"train/loss"}
    assert (run.num_events, run.problems) == (1, [])


def test_damaged_files_are_reported_and_the_rest_is_read(tmp_path):
    write_run(tmp_path, [{"step": 1, "loss": 2.0}])
    with (tmp_path / "metrics.jsonl").open("ab") as file:
        file.write(b'\xff\n[1]\n{"loss": 1}\n{"step": 2, "loss": 1.0}\n')
    (tmp_path / "run.json").write_text("{")
    (tmp_path / "goodput.json").write_text("{}")
    (tmp_path / "plan.json").write_text('{"ranking": []}')
    (tmp_path / "checkpoints" / "step_00000003").mkdir(parents=True)
    run = read_run(tmp_path)
    assert run.series["train/loss"].values.tolist() == [2.0, 1.0]
    assert run.problems == [
        "metrics.jsonl: lines that are not records: 3",
        "goodput.json is damaged",
        "run.json is damaged",
        "plan.json is not a plan of jaxpar plan --json",
    ]
    assert [(each.step, each.problem) for each in run.saved] == [(3, "has no manifest")]


@pytest.mark.parametrize("step", ["NaN", "1e999", "-1e999", '"nan"', "null"])
def test_line_without_a_finite_step_is_not_a_record(step, tmp_path):
    write_run(tmp_path, [{"step": 1, "loss": 2.0}])
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write(f'{{"step": {step}, "loss": 1.0}}\n')
    run = read_run(tmp_path)
    assert run.series["train/loss"].steps.tolist() == [1]
    assert (run.last_step, run.problems) == (
        1,
        ["metrics.jsonl: lines that are not records: 1"],
    )


@pytest.mark.parametrize("ranking", [[], [3], [None], {"a": 1}])
def test_search_without_a_best_plan_is_damaged(ranking, tmp_path):
    write_run(tmp_path)
    (tmp_path / "plan.json").write_text(json.dumps({"ranking": ranking}))
    problem = "plan.json is not a plan of jaxpar plan --json"
    assert read_run(tmp_path).problems == [problem]


def test_damaged_manifest_is_reported_with_its_step(tmp_path):
    run = shutil.copytree(WRITTEN, tmp_path / "run")
    path = run / "checkpoints" / "step_00000006" / "manifest.json"
    path.write_bytes(path.read_bytes() + b" ")
    (saved,) = read_run(run).saved
    assert "another checksum" in saved.problem


def test_of_a_search_the_best_plan_is_taken(tmp_path):
    write_run(tmp_path)
    best = {"bytes_per_device": {}, "target": "h100:1x8"}
    (tmp_path / "plan.json").write_text(json.dumps({"ranking": [{"plan": best}]}))
    assert read_run(tmp_path).plan == best


def test_steps_that_were_repeated_count_once(tmp_path):
    rows = [{"step": s, "loss": float(n)} for n, s in enumerate((1, 2, 3, 2, 3))]
    loss = read_run(write_run(tmp_path, rows)).series["train/loss"]
    assert loss.steps.tolist() == [1, 2, 3]
    assert loss.values.tolist() == [0, 3, 4]


def test_of_many_events_the_newest_are_kept(tmp_path):
    count = MOST_EVENTS + 5
    events = [{"event": "skipped", "step": step} for step in range(count)]
    run = read_run(write_run(tmp_path, events=events))
    assert (len(run.events), run.num_events) == (MOST_EVENTS, count)
    assert run.events[0]["step"] == 5


def test_folder_that_is_not_a_run_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"RUN='.*' holds no run: .*\(--out\)"):
        read_run(tmp_path)
    missing = tmp_path / "missing"
    with pytest.raises(NotADirectoryError, match=r"RUN='.*missing' is not a folder"):
        read_run(missing)


def test_runs_of_one_name_are_called_by_their_paths(tmp_path):
    one, two = (write_run(tmp_path / place / "gpt") for place in "ab")
    runs = [read_run(one), read_run(two)]
    assert [run.name for run in distinct_names(runs)] == [str(one), str(two)]
    assert [run.name for run in distinct_names([runs[0]] * 2)] == ["gpt (1)", "gpt (2)"]
    other = dataclasses.replace(runs[1], name="other")
    assert distinct_names([runs[0], other]) == [runs[0], other]


def test_accounts_of_another_form_are_left_out(tmp_path):
    write_run(tmp_path, accounts=[account(), "x", account(resumed=7)])
    assert read_run(tmp_path).resumed == [7]


@pytest.mark.slow
def test_log_of_200_thousand_steps_is_read_in_seconds(tmp_path):
    write_run(tmp_path)
    numbers = ", ".join(f'"train/metric_{n}": 0.12345678' for n in range(9))
    with (tmp_path / "metrics.jsonl").open("w") as file:
        for step in range(200_000):
            file.write(f'{{"step": {step}, "time": 1.8e9, {numbers}}}\n')
    began = time.process_time()
    run = read_run(tmp_path)
    assert time.process_time() - began < 20
    assert len(run.series["train/metric_8"]) == 200_000
