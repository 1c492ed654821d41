"""Has a run a chart for everything that it logged, with its events?"""

from jaxpar.show.run_charts import MOST_CHARTS, event_text, groups, marks, span
from jaxpar.show.run_data import read_run
from tests.show.handmade_runs import records, write_full_run, write_run


def titles(runs):
    return {group.heading: [c.title for c in group.charts] for group in groups(runs)}


def test_metrics_are_in_the_order_that_people_ask(tmp_path):
    run = read_run(write_full_run(tmp_path))
    assert titles([run]) == {
        "": ["Loss"],
        "Training": ["grad norm", "learning rate", "accuracy"],
        "Evaluations": ["code/accuracy"],
        "Rates": [
            "Tokens/s",
            "Step time",
            "Waiting for data",
            "MFU",
            "Step time of workers",
        ],
        "Memory": ["Memory of a device", "Memory of workers"],
    }
    training = next(group for group in groups([run]) if group.heading == "Training")
    assert training.note == "Constant: loss_scale 1, skipped 0."


def test_loss_has_the_logged_the_smoothed_and_the_held_out(tmp_path):
    (loss,) = groups([read_run(write_full_run(tmp_path))])[0].charts
    found = [(line.label, line.look, line.colour) for line in loss.lines]
    assert found == [
        ("train", "faint", "first"),
        ("train", "line", "first"),
        ("held-out", "dots", "second"),
    ]


def test_two_runs_have_their_colours_and_names(tmp_path):
    runs = [read_run(write_full_run(tmp_path / name, seed=2)) for name in "ab"]
    (loss,) = groups(runs)[0].charts
    found = {(line.label, line.colour) for line in loss.lines}
    assert found == {
        ("a train", "first"),
        ("a held-out", "first"),
        ("b train", "second"),
        ("b held-out", "second"),
    }
    assert {mark.text.split()[0] for mark in loss.marks} == {"a", "b"}


def test_metric_that_only_the_second_run_has_keeps_its_colour(tmp_path):
    one = read_run(write_run(tmp_path / "a", [{"step": 1, "train/loss": 2.0}]))
    rows = [{"step": s, "train/mine": 1.0 * s} for s in (1, 2)]
    two = read_run(write_run(tmp_path / "b", rows))
    training = next(g for g in groups([one, two]) if g.heading == "Training")
    (line,) = training.charts[0].lines
    assert (line.label, line.colour) == ("b", "second")


def test_events_changes_and_starts_are_marked(tmp_path):
    found = marks(read_run(write_full_run(tmp_path)))
    assert [(mark.step, mark.kind) for mark in found] == [
        (60, "bad"),
        (61, "bad"),
        (63, "bad"),
        (100, "bad"),
        (120, "changed"),
        (120, "opened"),
    ]
    assert found[1].text == "skipped: loss nan, batch 60"
    assert found[4].text == "changed: steps 150 → 200, mesh data 2 → data 4"


def test_loss_that_is_not_finite_is_marked_without_an_event(tmp_path):
    rows = [{"step": 1, "loss": 2.0}, {"step": 2, "loss": "inf"}]
    (mark,) = marks(read_run(write_run(tmp_path, rows)))
    assert (mark.step, mark.text) == (2, "the loss is not finite")


def test_event_of_any_form_has_a_text():
    assert event_text({}) == "event: "
    text = event_text({"event": "slow", "why": "its data", "times": 1.666667})
    assert text == "slow: its data; times 1.66667"


def test_run_without_finite_losses_has_no_loss_chart(tmp_path):
    rows = [{"step": step, "loss": "nan"} for step in (1, 2)]
    assert groups([read_run(write_run(tmp_path, rows))]) == []


def test_short_times_are_in_milliseconds(tmp_path):
    run = read_run(write_full_run(tmp_path))
    rates = next(group for group in groups([run]) if group.heading == "Rates")
    units = {chart.title: chart.unit for chart in rates.charts}
    assert (units["Step time"], units["Waiting for data"]) == ("s", "ms")
    assert rates.note == ""


def test_of_too_many_metrics_the_others_are_named(tmp_path):
    rows = [
        {"step": step, **{f"mine_{n:02}": 1.0 * step for n in range(MOST_CHARTS + 2)}}
        for step in (1, 2)
    ]
    found = groups([read_run(write_run(tmp_path, rows))])[0]
    assert len(found.charts) == MOST_CHARTS
    assert found.note == ("Not drawn, for there are too many: mine 40, mine 41.")


def test_span_is_of_all_runs_and_begins_at_zero(tmp_path):
    runs = [
        read_run(write_run(tmp_path / str(steps), records(steps)))
        for steps in (50, 100)
    ]
    assert span(runs) == (0, 100)
    assert span([read_run(write_run(tmp_path / "none"))]) == (0, 1)
    rows = [{"step": step, "mine": 1.0} for step in (90, 99)]
    assert span([read_run(write_run(tmp_path / "late", rows))]) == (90, 99)
