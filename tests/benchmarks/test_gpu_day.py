"""Does the list go on where it ended, whatever happens to one of its cases?"""

import dataclasses
import importlib
import json
import os
import signal
import tarfile
from pathlib import Path
from typing import Any

import pytest

from benchmarks import gpu_day
from benchmarks.gpu import artefacts, lines, machine
from benchmarks.gpu.day import Day, go, open_results
from benchmarks.gpu.items import ITEMS, Case, Item, dry_items

H100, H200 = machine.Device("H100", 85.0), machine.Device("H200", 150.0)
QUICK = 0.2


def case(call: str, name: str = "", **options: Any) -> Case:
    given = {"minutes": QUICK} | options
    return Case(name or call, f"tests.benchmarks.gpu_cases:{call}", **given)


def item(*cases: Case, name: str = "an item") -> Item:
    return Item(name, "Is it so?", cases)


def day_in(out: Path, **options: Any) -> Day:
    given = {"device": H100, "code": "c0de", "commit": "abc", "minutes": 1.0} | options
    return Day(out=out, **given)


def run(day: Day, *items: Item) -> list[str]:
    """What a call says, with what earlier ones found in its folder."""
    said: list[str] = []
    go(day, items, said.append)
    return said


def begun(said: list[str]) -> list[str]:
    return [
        each.split(",")[1].split(":")[0].strip() for each in said if "begun: " in each
    ]


def events(day: Day) -> list[tuple[str, str]]:
    return [(line["case"], line["event"]) for line in lines.read(day.results)]


def test_each_result_is_a_line_and_a_case_that_is_done_is_not_run_again(
    tmp_path: Path,
) -> None:
    day = day_in(tmp_path)
    run(day, item(case("works", arguments={"number": 3})))
    first, second, last = lines.read(day.results)
    assert (first["name"], first["found"]) == ("first", {"number": 3})
    assert second["found"] == {"number": 6}
    assert last["event"] == lines.DONE
    assert (last["commit"], last["device"], last["code"]) == ("abc", "H100", "c0de")
    assert last["seconds"] > 0
    assert run(day, item(case("works"))) == []


@pytest.mark.parametrize(
    ("changed", "runs"),
    [
        ({}, False),
        ({"commit": "another, of results alone"}, False),
        ({"code": "other"}, True),
        ({"device": H200}, True),
        ({"again": True}, True),
    ],
    ids=["the same", "commit", "code", "device", "again"],
)
def test_earlier_call_counts_for_its_code_and_device(
    tmp_path: Path, changed: dict[str, Any], runs: bool
) -> None:
    first = day_in(tmp_path / "first")
    run(first, item(case("works")))
    later = day_in(tmp_path / "later", **changed)
    open_results(later, first.out)
    assert begun(run(later, item(case("works")))) == ["works"] * runs
    assert len(events(later)) == 3 * (1 + runs)


def test_failed_case_is_recorded_and_tried_once_more_behind_the_others(
    tmp_path: Path,
) -> None:
    day, all_cases = day_in(tmp_path), item(case("fails"), case("works"))
    assert begun(run(day, all_cases)) == ["fails", "works", "fails"]
    failures = [x for x in lines.read(day.results) if x["event"] == lines.FAILED]
    assert len(failures) == 2
    assert "ValueError: this case is wrong" in failures[0]["why"]
    assert begun(run(day, all_cases)) == []


def test_case_over_its_limit_is_ended_with_all_that_it_started(tmp_path: Path) -> None:
    file = tmp_path / "pid"
    hanging = case("hangs", arguments={"file": str(file)}, limit=0.05)
    day = day_in(tmp_path / "out")
    run(day, item(hanging, case("works")))
    ended = [x for x in lines.read(day.results) if x["event"] == lines.FAILED]
    assert ended[0]["why"].startswith("ended after 3 s")
    assert ("works", lines.DONE) in events(day)
    stat = Path(f"/proc/{file.read_text()}/stat")
    # Killed, and at most not yet buried by whoever adopts it.
    assert not stat.exists() or stat.read_text().split(")")[1].split()[0] == "Z"


def test_process_that_a_case_leaves_behind_is_not_waited_for(tmp_path: Path) -> None:
    file = tmp_path / "pid"
    leaving = case("leaves_one_behind", arguments={"file": str(file)}, limit=1)
    day = day_in(tmp_path / "out")
    try:
        run(day, item(leaving))
    finally:
        os.kill(int(file.read_text()), signal.SIGKILL)
    (*_, last) = lines.read(day.results)
    assert last["event"] == lines.DONE
    assert last["seconds"] < 30


def test_case_that_the_call_cuts_short_has_not_failed(tmp_path: Path) -> None:
    file = tmp_path / "pid"
    hanging = case("hangs", arguments={"file": str(file)}, minutes=0.01, limit=9)
    day = day_in(tmp_path / "out", minutes=0.25 + 0.05)
    assert begun(run(day, item(hanging))) == ["hangs"]
    assert events(day)[-1] == ("hangs", lines.CUT)
    (state,) = lines.states(lines.read(day.results)).values()
    assert state == lines.State("", 0)


def test_case_that_does_not_fit_the_time_is_not_begun(tmp_path: Path) -> None:
    said = run(day_in(tmp_path), item(case("works", "long", minutes=5), case("works")))
    assert begun(said)[0] == "works"
    assert said[-1] == "not begun: an item, long: needs 5 min"


def test_case_that_does_not_fit_the_memory_is_skipped_on_that_device_alone(
    tmp_path: Path,
) -> None:
    large = item(case("works", needs_gb=138))
    small, big = day_in(tmp_path), day_in(tmp_path, device=H200)
    run(small, large)
    (line,) = lines.read(small.results)
    assert line["event"] == lines.SKIPPED
    assert line["why"] == "needs 138 GB, and H100 has 85 GB"
    assert run(small, large) == []
    assert begun(run(big, large)) == ["works"]


@pytest.mark.parametrize(
    ("call", "event", "why"),
    [
        ("needs_more", lines.TOO_LARGE, "out of memory"),
        ("is_not_here", lines.SKIPPED, "no torch"),
    ],
)
def test_what_a_machine_can_not_do_is_not_tried_again(
    tmp_path: Path, call: str, event: str, why: str
) -> None:
    day = day_in(tmp_path)
    assert begun(run(day, item(case(call)))) == [call]
    (line,) = lines.read(day.results)
    assert line["event"] == event
    assert line["why"].startswith(why)


def test_item_that_is_not_built_is_written_down_once(tmp_path: Path) -> None:
    day = day_in(tmp_path)
    unbuilt = Item("offload", "How fast?", (), not_built="not yet")
    for _ in range(2):
        run(day, unbuilt)
    assert events(day) == [("", lines.NOT_BUILT)]


def test_torn_line_is_left_out_and_damages_no_other(tmp_path: Path) -> None:
    path = tmp_path / lines.FILE
    key = dataclasses.asdict(lines.Key("i", "c", "code", "H100"))
    lines.append(path, key | {"event": lines.FAILED})
    with path.open("a") as file:
        file.write('{"item": "i", "ca')
    lines.append(path, key | {"event": lines.DONE})
    assert [line["event"] for line in lines.read(path)] == [lines.FAILED, lines.DONE]
    assert list(lines.states(lines.read(path)).values()) == [lines.State(lines.DONE, 1)]


def test_files_of_a_case_are_packed_under_its_title(tmp_path: Path) -> None:
    day = day_in(tmp_path)
    run(day, item(case("works", "a, b")))
    with tarfile.open(tmp_path / "artefacts1.tar") as archive:
        assert archive.getnames() == [
            "an_item.a_b/log.txt.gz",
            "an_item.a_b/program.txt.gz",
        ]


def test_archive_that_is_full_is_followed_by_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(artefacts, "ARCHIVE_BYTES", 5000)
    kept = artefacts.Artefacts(tmp_path, tmp_path / "work", "H100")
    for name in ("a", "b"):
        kept.clear()
        (kept.keep / "noise").write_bytes(os.urandom(4000))
        kept.pack(name, is_done=True)
    assert [x.name for x in sorted(tmp_path.glob("*.tar"))] == [
        "artefacts1.tar",
        "artefacts2.tar",
    ]


ENTRY = 'entries {{\n  key {{\n    hlo: "{0}"\n  }}\n}}\n'


def test_autotune_results_are_joined_each_once() -> None:
    scope = 'device_scope: "sm_90"\n'
    older = scope + ENTRY.format("a")
    newer = scope + ENTRY.format("a") + ENTRY.format("b")
    assert artefacts.merged("", older) == older
    assert artefacts.merged(older, newer) == newer
    assert artefacts.merged(older, scope + ENTRY.format("b")) == newer
    other = 'device_scope: "sm_100"\n' + ENTRY.format("c")
    assert artefacts.merged(older, other) == other


def test_autotune_results_of_a_case_that_failed_are_not_kept(tmp_path: Path) -> None:
    kept = artefacts.Artefacts(tmp_path, tmp_path / "work", "H100")
    for text, is_done in ((ENTRY.format("a"), True), ("entries {", False)):
        kept.clear()
        (flag, *_) = kept.xla_flags()
        Path(flag.partition("=")[2]).write_text(text)
        kept.pack("case", is_done=is_done)
    (file,) = tmp_path.glob("autotune-H100-jax*.txt")
    assert file.read_text() == ENTRY.format("a")
    assert any("load_autotune_results_from" in flag for flag in kept.xla_flags())


def test_every_item_has_a_case_in_the_dry_run_whose_function_there_is() -> None:
    names = [each.name for each in ITEMS]
    assert len(set(names)) == len(names)
    for each in dry_items():
        assert each.cases or each.not_built
    for each in ITEMS:
        assert len({own.name for own in each.cases}) == len(each.cases)
        for own in each.cases:
            module, _, function = own.call.partition(":")
            assert callable(getattr(importlib.import_module(module), function))
            json.dumps(dict(own.arguments))


def test_digest_is_of_sources_and_not_of_results(tmp_path: Path) -> None:
    (tmp_path / "jaxpar").mkdir()
    source = tmp_path / "jaxpar" / "a.py"
    source.write_text("one")
    before = machine.digest(tmp_path, ("jaxpar",))
    (tmp_path / "jaxpar" / "results.jsonl").write_text("{}")
    assert machine.digest(tmp_path, ("jaxpar",)) == before
    source.write_text("two")
    assert machine.digest(tmp_path, ("jaxpar",)) != before


def test_machine_without_a_gpu_is_told_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert gpu_day.main(["--out", str(tmp_path / "out")]) == 1
    printed = capsys.readouterr().out
    assert printed.count("\n") == 1
    assert "--dry-run" in printed
    assert not (tmp_path / "out").exists()


def test_gpu_is_read_from_its_driver(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = tmp_path / "nvidia-smi"
    driver.write_text("#!/bin/sh\necho 'NVIDIA H100 80GB HBM3, 81559'\n")
    driver.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert machine.find_gpu() == machine.Device(
        "NVIDIA H100 80GB HBM3", 81559 * 2**20 / 1e9
    )


def test_list_names_what_each_item_answers_and_what_is_done(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    key = lines.Key("8b", "AdamW", machine.digest(), "NVIDIA H200")
    line = dataclasses.asdict(key) | {"event": lines.DONE}
    lines.append(tmp_path / lines.FILE, line)
    assert gpu_day.main(["--list", "--only", "8b", "--done", str(tmp_path)]) == 0
    first, second, *_ = capsys.readouterr().out.splitlines()
    assert first.startswith("8b (12 min): Does Llama 3's 8B")
    assert second == "  AdamW (3 min, 138 GB) done on NVIDIA H200"


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--out", "x", "--only", "125m"], "--only 125m: must be among ceilings"),
        (["--out", "x", "--minutes", "0"], "--minutes 0: must be more than 0"),
        ([], "--out DIR is needed"),
    ],
)
def test_bad_arguments_are_refused(
    args: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        gpu_day.main(args)
    assert message in capsys.readouterr().err


def test_done_that_is_no_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"--done .*none: must be the --out folder"):
        open_results(day_in(tmp_path), tmp_path / "none")
