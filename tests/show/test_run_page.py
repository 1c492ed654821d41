"""Is the page of a run whole, is any text on it text, and does it stay small?"""

import json
import math
import re
import shutil

import numpy as np
import pytest

from jaxpar.show.run_data import read_run
from jaxpar.show.run_page import MOST_ROWS, as_html, write_report
from tests.show.handmade_runs import BEGAN, account, records, write_full_run, write_run
from tests.show.pages import HOSTILE, Page
from tests.test_older_files import WRITTEN

NOW = BEGAN + 400


def page_of(*folders, now=NOW):
    return Page(as_html([read_run(folder) for folder in folders], now))


def words(page):
    return " ".join(data for _, data in page.texts)


def test_page_is_closed_and_needs_nothing_else(tmp_path):
    text = as_html([read_run(write_full_run(tmp_path))], NOW)
    page = Page(text)
    assert not page.open
    assert not {"link", "iframe", "object", "embed", "base", "img"} & set(page.tags)
    assert not [a for a in page.attributes if a[1] in ("src", "href", "xlink:href")]
    assert not re.search(r"@import|url\(|https?:", text)


def test_sections_are_in_the_order_that_people_ask(tmp_path):
    page = page_of(write_full_run(tmp_path / "full"))
    assert page.text("h1") == ["full"]
    assert page.text("h2") == [
        "Training",
        "Evaluations",
        "Rates",
        "Memory",
        "Goodput",
        "Events",
        "Changes of settings",
        "Plan against measured",
        "Sample",
        "Checkpoints",
        "Settings",
    ]
    assert page.text("pre") == ["def f(x):\n    return x < 1 & x\n"]
    assert ["61", "2027-01-15 08:00", "skipped", "loss nan, batch 60"] in page.rows
    assert ["useful steps", "1 min 55 s", "38.5%"] in page.rows
    assert ["120", "2027-01-15 08:10", "steps 150 → 200; mesh data 2 → data 4"] in (
        page.rows
    )


def test_two_runs_have_their_differences_first_and_tables_side_by_side(tmp_path):
    one = write_full_run(tmp_path / "one")
    config = {"model": "tiny", "steps": 200, "mesh": {"data": 8}}
    two = write_run(tmp_path / "two", records(100), config=config, accounts=[account()])
    page = page_of(one, two)
    assert page.text("h2")[0] == "What differs"
    assert page.rows[:2] == [["setting", "one", "two"], ["mesh.data", "4", "8"]]
    assert ["useful steps", "1 min 55 s", "38.5%", "1 min", "60.0%"] in page.rows
    assert [row for row in page.rows if row[:2] == ["one", "61"]]
    assert "Plan against measured of two" in page.text("h2")


def test_equal_runs_differ_in_nothing(tmp_path):
    runs = [write_run(tmp_path / name, records(3)) for name in "ab"]
    assert "No setting." in page_of(*runs).text("p")


def test_run_without_a_plan_says_how_to_get_one(tmp_path):
    (command,) = page_of(write_run(tmp_path)).text("pre")
    assert command.startswith("jaxpar plan recipes/pretrain.py --target TARGET --json ")


def test_sample_without_a_letter_is_said_to_be_blank(tmp_path):
    (write_run(tmp_path) / "sample.txt").write_text("  \n ")
    assert "Only white space." in page_of(tmp_path).text("p")


def test_run_that_has_just_started_has_a_page(tmp_path):
    (tmp_path / "run.json").write_text("{}")
    page = page_of(tmp_path)
    assert "Nothing has been logged yet." in page.text("p")
    assert "not started" in words(page)
    assert "svg" not in page.tags


def test_run_of_an_earlier_version_has_a_page(tmp_path):
    page = page_of(shutil.copytree(WRITTEN, tmp_path / "old"))
    assert "The log has no step times" in words(page)
    assert [row for row in page.rows if row[0] == "6" and row[-1] == "-"]


def test_losses_that_are_not_finite_have_a_page(tmp_path):
    rows = [{"step": s, "loss": x} for s, x in ((1, "nan"), (2, "inf"), (3, "-inf"))]
    page = page_of(write_run(tmp_path, rows))
    assert not page.open


def test_of_many_events_the_newest_are_in_the_table(tmp_path):
    events = [{"event": "skipped", "step": step} for step in range(MOST_ROWS + 7)]
    page = page_of(write_run(tmp_path, records(9), events=events))
    assert "7 earlier ones are left out." in page.text("p")
    assert len([row for row in page.rows if "skipped" in row]) == MOST_ROWS


def test_hostile_words_stay_words(tmp_path):
    name = "train/" + HOSTILE
    config = {"model": HOSTILE, HOSTILE: HOSTILE, "steps": HOSTILE}
    folder = write_run(
        tmp_path / HOSTILE.replace("/", "|"),
        [{"step": s, "train/loss": 2.0, name: 1.0 * s} for s in (1, 2)],
        events=[{"event": HOSTILE, "step": 1, "why": HOSTILE, HOSTILE: HOSTILE}],
        accounts=[account(**{HOSTILE: 9.0})],
        config=config,
        history=[{"step": 1, "time": HOSTILE, "changed": {HOSTILE: [HOSTILE, 1]}}],
        identity={HOSTILE: HOSTILE},
        commit=HOSTILE,
        command=[HOSTILE, HOSTILE],
    )
    plan = {"bytes_per_device": {"peak": HOSTILE}, "target": HOSTILE}
    (folder / "plan.json").write_text(json.dumps(plan))
    (folder / "sample.txt").write_text(HOSTILE)
    for folders in ([folder], [folder, write_full_run(tmp_path / "b")]):
        page = page_of(*folders)
        assert page.tags.count("script") == 1
        assert "img" not in page.tags
        assert not page.open
        assert not [a for a in page.attributes if a[1].startswith("on")]
        assert HOSTILE in page.text("pre")


def test_page_of_a_long_run_stays_small(tmp_path):
    folder = write_run(tmp_path)
    rng = np.random.default_rng(0)
    values = rng.normal(size=(700, 30))
    with (folder / "metrics.jsonl").open("w") as file:
        for step, row in enumerate(values):
            line = {f"train/mine_{n}": x for n, x in enumerate(row)}
            file.write(json.dumps({"step": 1500 * step, "train/loss": row[0], **line}))
            file.write("\n")
    text = as_html([read_run(folder)] * 2, NOW)
    assert 200_000 < len(text) < 2_000_000


def test_file_is_written_where_it_is_asked_for(tmp_path):
    runs = [read_run(write_full_run(tmp_path))]
    write_report(runs, tmp_path / "report.html")
    assert (tmp_path / "report.html").read_bytes().startswith(b"<!doctype html>")
    with pytest.raises(ValueError, match=r"--out .*pdf must end in \.html or \.htm\."):
        write_report(runs, tmp_path / "report.pdf")
    with pytest.raises(
        FileNotFoundError, match=r"--out .*the folder '.*no' does not exist"
    ):
        write_report(runs, tmp_path / "no" / "report.html")


@pytest.mark.parametrize(
    "history",
    [3, "abc", {"a": 1}, [3], [{"step": "x", "changed": 3}], [{"step": math.nan}]],
)
def test_page_of_a_damaged_history_is_written(history, tmp_path):
    page = page_of(write_run(tmp_path, records(), history=history))
    damaged = "run.json: its history is damaged"
    assert (damaged in words(page)) == (not isinstance(history, list))
    assert "Training" in page.text("h2")


def test_events_without_a_finite_step_are_in_the_table_alone(tmp_path):
    events = [{"event": "bad", "step": step} for step in (math.nan, math.inf, "x", 3)]
    page = page_of(write_run(tmp_path, records(), events=events))
    assert [row[0] for row in page.rows if "bad" in row] == ["nan", "inf", "x", "3"]
    titles = [value for _, name, value in page.attributes if name == "title"]
    assert sum("bad" in (title or "") for title in titles) == 1


def test_run_without_an_account_of_its_time_stands_beside_one_that_has_one(tmp_path):
    one, other = (write_full_run(tmp_path / name) for name in ("one", "other"))
    (other / "goodput.json").unlink()
    page = page_of(one, other)
    rows = {row[0]: row[3:] for row in page.rows if len(row) == 5}
    assert rows["useful steps"] == rows["all"] == ["-", "-"]
    assert "0 starts" not in words(page)
