"""Does the command say what is right, and what is wrong with what it was told?"""

import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from jaxpar.cli.main import main
from tests.commands import run_jaxpar

ROOT = Path(__file__).resolve().parents[2]
RIGHT = ("schedule", "1f1b", "--stages", "4", "--microbatches", "8")


def called(capsys, *args) -> str:
    """What the command prints, called in this process."""
    main(list(args))
    return capsys.readouterr().out


def refused(capsys, *args) -> str:
    """What the command says before it exits with 2."""
    with pytest.raises(SystemExit) as caught:
        main(list(args))
    printed = capsys.readouterr()
    assert caught.value.code == 2
    assert printed.out == ""
    return " ".join(printed.err.split())


def test_command_prints_the_chart_its_cost_and_what_is_kept():
    done = run_jaxpar(*RIGHT, columns=80)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == [
        "1f1b: 4 stages, 8 micro-batches",
        "tick        0  1  2  3  4  5  6  7  8  9 10 11 12 13",
        "stage 0 F   0  1  2  3  4  5  6  7  .  .  .  .  .  .",
        "        B   .  .  .  .  .  .  0  1  2  3  4  5  6  7",
        "stage 1 F   .  0  1  2  3  4  5  6  7  .  .  .  .  .",
        "        B   .  .  .  .  .  0  1  2  3  4  5  6  7  .",
        "stage 2 F   .  .  0  1  2  3  4  5  6  7  .  .  .  .",
        "        B   .  .  .  .  0  1  2  3  4  5  6  7  .  .",
        "stage 3 F   .  .  .  0  1  2  3  4  5  6  7  .  .  .",
        "        B   .  .  .  0  1  2  3  4  5  6  7  .  .  .",
        "F forward, B backward; a number is a micro-batch",
        "",
        "ticks 14, total time 33, bubble 27.3%",
        "time of a micro-batch on a stage: forward 1, backward 2",
        "",
        "held at once, at most, in micro-batches:",
        "stage  inputs  cotangents",
        "0           7           1",
        "1           5           1",
        "2           3           1",
        "3           1           1",
    ]


def test_command_fails_with_status_2_and_no_traceback():
    done = run_jaxpar("schedule", "1f1c", *RIGHT[2:], columns=80)
    assert (done.returncode, done.stdout) == (2, "")
    assert re.match(r"jaxpar: schedule='1f1c' must be .* mean '1f1b'\?$", done.stderr)


@pytest.mark.slow
def test_version_is_that_of_the_package(capsys):
    assert called(capsys, "--version") == f"jaxpar {metadata.version('jaxpar')}\n"


@pytest.mark.parametrize(
    ("given", "guess"),
    [("ckp", " Did you mean 'ckpt'?"), ("lanch", " Did you mean 'launch'?"), ("x", "")],
)
def test_command_that_there_is_not_is_named(given, guess, capsys):
    said = refused(capsys, given, "--flag", "value")
    assert said == (
        f"jaxpar: there is no command '{given}'.{guess} The commands are ckpt, env, "
        "hf, launch, layout, plan, recipes, report, schedule."
    )


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            ("ckpt", "lss"),
            "jaxpar ckpt: there is no command 'lss'. Did you mean 'ls'? The commands "
            "are ls, inspect, verify, export, import.",
        ),
        (
            ("launch", "slrum"),
            "Did you mean 'slurm'? The commands are local, slurm, mp",
        ),
        (
            ("recipes", "show"),
            "there is no command 'show'. The commands are list, copy",
        ),
        (("layout", "fixd"), "Did you mean 'fixed'? The commands are dense, fixed, va"),
    ],
)
def test_subcommand_of_a_command_is_named(given, said, capsys):
    assert said in refused(capsys, *given, "--flag", "value")


def test_command_draws_a_png(tmp_path):
    done = run_jaxpar(*RIGHT, "--png", tmp_path / "schedule.png", columns=80)
    assert (done.returncode, done.stderr) == (0, "")
    assert is_png(tmp_path / "schedule.png")


@pytest.mark.slow
def test_command_teaches_its_flags():
    done = run_jaxpar("schedule", "--help", columns=80)
    assert (done.returncode, done.stderr) == (0, "")
    flags = ("stages", "microbatches", "chunks", "forward", "backward", "weight", "png")
    for word in ("gpipe, 1f1b, interleaved or zero_bubble", *map("--{}".format, flags)):
        assert word in done.stdout


def is_png(file) -> bool:
    content = file.read_bytes()
    return content.startswith(b"\x89PNG\r\n\x1a\n") and len(content) > 1000


def test_png_is_drawn_where_it_is_asked_for(tmp_path, capsys):
    printed = called(capsys, *RIGHT, "--png", str(tmp_path / "schedule.png"))
    assert is_png(tmp_path / "schedule.png")
    assert printed == called(capsys, *RIGHT)


def test_help_lists_the_subcommands(capsys):
    with pytest.raises(SystemExit) as caught:
        main(["--help"])
    assert caught.value.code == 0
    assert "schedule  Show a pipeline schedule" in capsys.readouterr().out


def test_cli_itself_imports_neither_jax_nor_matplotlib():
    # The package imports jax whatever its modules do: an empty one stands in for it.
    program = (
        "import sys, types; package = types.ModuleType('jaxpar'); "
        "package.__path__ = [sys.argv[1]]; sys.modules['jaxpar'] = package; "
        "import jaxpar.cli.main; print({'jax', 'matplotlib'} & set(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(ROOT / "jaxpar")],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "set()\n"


@pytest.mark.parametrize(
    ("args", "times", "cost"),
    [
        (("gpipe",), "forward 1, backward 2", "ticks 22, total time 33, bubble 27.3%"),
        (("1f1b", "--forward", "2", "--backward", "2"), "forward 2, backward 2",
         "ticks 14, total time 44, bubble 27.3%"),
        (("interleaved",), "forward 1, backward 2",
         "ticks 26, total time 28.5, bubble 15.8%"),
        (("interleaved", "--chunks", "4"), "forward 1, backward 2",
         "ticks 50, total time 26.25, bubble 8.6%"),
        (("zero_bubble",), "forward 1, backward 1, gradients of weights 1",
         "ticks 14, total time 27, bubble 11.1%"),
        (("zero_bubble", "--backward", "2", "--weight", "3"),
         "forward 1, backward 2, gradients of weights 3", "ticks 14, total time 57, "),
    ],
)  # fmt: skip
def test_schedule_is_timed_by_the_flags(capsys, args, times, cost):
    printed = called(capsys, "schedule", *args, *RIGHT[2:])
    assert f"on a stage: {times}\n" in printed
    assert cost in printed


@pytest.mark.parametrize(
    ("name", "columns", "first"),
    [
        ("1f1b", "stage inputs cotangents", "0 7 1"),
        ("zero_bubble", "stage inputs cotangents products", "0 7 1 1"),
    ],
)
def test_products_are_counted_where_backwards_are_split(capsys, name, columns, first):
    lines = called(capsys, "schedule", name, *RIGHT[2:]).splitlines()
    found = [" ".join(line.split()) for line in lines[-5:-3]]
    assert found == [columns, first]


def test_chart_wider_than_the_terminal_goes_on_below(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    lines = called(capsys, *RIGHT).splitlines()
    assert [line for line in lines if line.startswith("tick ")] == [
        "tick        0  1  2  3  4  5  6  7  8  9",
        "tick       10 11 12 13",
    ]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("interleaved", "--stages", "4", "--microbatches", "9"),
         r"^jaxpar: accumulate=9: .* use a multiple, such as 8 or 12"),
        (("1f1b", "--stages", "4", "--microbatches", "0"),
         r"^jaxpar: num_microbatches=0 must be at least 1\.$"),
        (("gpipe", *RIGHT[2:], "--chunks", "3"),
         r"^jaxpar: schedule='gpipe:3': only 'interleaved' has chunks"),
        (("interleaved", *RIGHT[2:], "--chunks", "0"), r"'0' must be a number of chun"),
        (("1f1b", *RIGHT[2:], "--weight", "1"),
         r"^jaxpar: --weight 1: 1f1b computes weight gradients in its backward; "
         r"omit --weight and give --backward the time of both\.$"),
        (("1f1b", *RIGHT[2:], "--forward", "0"),
         r"^jaxpar: --forward 0 must be a time above 0\.$"),
        (("1f1b", *RIGHT[2:], "--backward", "nan"), r"--backward nan must be a time"),
        (("zero_bubble", *RIGHT[2:], "--weight", "inf"), r"--weight inf must be a tim"),
        (("1f1b", *RIGHT[2:], "--png", "no/such/folder.png"),
         r"^jaxpar: .*No such file or directory: 'no/such/folder.png'$"),
        (("1f1b", "--stages", "0", *RIGHT[4:]), r"^jaxpar: num_stages=0 must be at"),
        (("1f1b", "--stages", "four"), r"--microbatches"),
        (("1f1b", *RIGHT[2:], "--microbatch", "4"), r"--microbatches"),
    ],
)  # fmt: skip
def test_what_cannot_be_shown_says_why(capsys, args, message):
    assert re.search(message, refused(capsys, "schedule", *args))


@pytest.mark.parametrize(
    "asked",
    [(*RIGHT, "--png", "x.png"), ("layout", "--png=x.png", "fixed", "--num-heads=4")],
    ids=["schedule", "layout"],
)
def test_missing_matplotlib_names_the_extra(capsys, monkeypatch, asked):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    said = refused(capsys, *asked)
    assert said.startswith("jaxpar: --png needs matplotlib, which is not installed")
    assert "pip install 'jaxpar[plot]'" in said
