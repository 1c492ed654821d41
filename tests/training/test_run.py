"""Are a run's record, events and progress those of its folder?"""

import dataclasses
import json

import pytest

from jaxpar.training.opening import open_run


@dataclasses.dataclass(frozen=True)
class Config:
    steps: int = 10
    rate: float = 0.1


def test_events_are_lines_and_a_truncated_one_is_dropped(tmp_path):
    run = open_run(tmp_path, Config(), {})
    run.note("bad", 3, loss=float("nan"), left_out=[4, 5])
    run.note("bad", 6, left_out=[5, 7])
    with (tmp_path / "events.jsonl").open("a") as file:
        file.write('{"event": "ba')
    assert [event["step"] for event in run.events()] == [3, 6]
    assert run.events()[0]["loss"] == "nan"
    assert run.rows_left_out(10) == [(40, 50), (50, 60), (70, 80)]


def test_rows_left_out_are_those_of_the_data_since_it_was_another(tmp_path):
    run = open_run(tmp_path, Config(), {})
    run.note("rolled back", 3, left_out=[4], rows_left_out=[[32, 40]])
    assert run.rows_left_out(10) == [(32, 40)]
    run.note("new data", 4)
    assert run.rows_left_out(10) == []
    run.note("rolled back", 6, left_out=[9], rows_left_out=[[8, 16]])
    assert run.rows_left_out(10) == [(8, 16)]


def test_run_without_a_log_or_with_an_empty_one_may_start(tmp_path):
    run = open_run(tmp_path, Config(), {})
    run.require_no_progress()
    (tmp_path / "metrics.jsonl").write_text("")
    run.require_no_progress()
    line = json.dumps({"step": 7, "time": 1.0, "loss": 2.0})
    (tmp_path / "metrics.jsonl").write_text(line + "\n")
    with pytest.raises(FileNotFoundError, match=r"logged 7 steps.*Mount or bring back"):
        run.require_no_progress()


def test_record_without_one_of_the_numbers_is_passed_over(tmp_path):
    """A flipped bit in a name; a start needs none of them."""
    run = open_run(tmp_path, Config(), {})
    lines = [{"train/loss": 2.0, "train/grad_norm": 0.5}, {"train/loss": 1.0}]
    text = [json.dumps({"step": i, "time": 1.0, **x}) for i, x in enumerate(lines)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(text) + "\n")
    assert run.numbers_before(9, 9) == [[2.0, 0.5]]
