"""Does `jaxpar report` write the page, print its path, and refuse what is no run?"""

import pytest

from jaxpar.cli.main import main
from tests.show.handmade_runs import write_full_run


def refused(capsys, *args) -> str:
    with pytest.raises(SystemExit) as caught:
        main(["report", *map(str, args)])
    assert caught.value.code == 2
    return " ".join(capsys.readouterr().err.split())


def test_page_is_written_into_the_run_and_its_path_printed(tmp_path, capsys):
    run = write_full_run(tmp_path / "gpt")
    main(["report", str(run)])
    assert capsys.readouterr().out == f"{run / 'report.html'}\n"
    assert "<h1>gpt</h1>" in (run / "report.html").read_text()


def test_two_runs_are_written_where_asked(tmp_path, capsys):
    one, two = (write_full_run(tmp_path / name) for name in ("one", "two"))
    out = tmp_path / "both.html"
    main(["report", str(one), str(two), "--out", str(out)])
    assert capsys.readouterr().out == f"{out}\n"
    assert "<h1>one and two</h1>" in out.read_text()
    assert not (one / "report.html").exists()


def test_what_cannot_be_reported_says_why(tmp_path, capsys):
    run = write_full_run(tmp_path / "gpt")
    assert "is not a folder; give the folder" in refused(capsys, tmp_path / "none")
    assert "holds no run: it has neither run.json" in refused(capsys, tmp_path)
    assert "must end in .html" in refused(capsys, run, "--out", tmp_path / "a.txt")


def test_help_teaches(capsys):
    with pytest.raises(SystemExit) as caught:
        main(["report", "--help"])
    assert caught.value.code == 0
    said = capsys.readouterr().out
    for word in ("RUN", "RUN2", "--out", "report.html", "without a network"):
        assert word in said
