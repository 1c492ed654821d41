"""Does the table of exposed communication say what was read, and what it assumes?"""

from rich.console import Console

from jaxpar.compiled.exposed import Communication, Waited
from jaxpar.compiled.exposed_table import exposed_table, summary_of

FOUND = Communication(
    kernel_seconds=0.3,
    collectives=(
        Waited("a", "all-gather", ("data",), 5, False, 4_000_000, 0.010, 0.004),
        Waited("b", "all-gather", ("data",), 2, True, 1_000_000, 0.002, 0.002),
        Waited("c", "all-reduce", (), 1, True, 8, 0.0, 0.0),
    ),
    devices_per_host=8,
)


def test_a_row_is_the_sum_of_a_kind():
    console = Console(width=100)
    with console.capture() as shown:
        console.print(exposed_table(FOUND))
    rows = [line.split() for line in shown.get().splitlines() if "all-" in line]
    assert rows == [
        ["all-gather", "data", "7", "2", "5.0", "12.0", "6.0"],
        ["all-reduce", "none", "1", "1", "0.0", "0.0", "0.0"],
    ]


def test_a_line_says_how_much_and_by_what():
    assert summary_of(FOUND) == (
        "6.0 of 12.0 ms of communication are exposed by the compiled schedule, at "
        "assumed rates, with 8 devices a host; nothing is measured"
    )


def test_a_program_without_a_schedule_says_so():
    assert summary_of(None).startswith("exposed communication is not known: only a")
