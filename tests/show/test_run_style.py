"""Has every class on the page of a run its look?"""

import re

from jaxpar.show.hover import STYLE as HOVER_STYLE
from jaxpar.show.page import frame
from jaxpar.show.run_data import read_run
from jaxpar.show.run_page import as_html
from jaxpar.show.run_style import STYLE
from jaxpar.training.goodput import WORDS
from tests.show.handmade_runs import write_full_run
from tests.show.pages import Page

PLAIN = {"line"}
"""A class of lines that look as all do."""


def test_classes_of_a_page_are_those_of_the_style(tmp_path):
    runs = [read_run(write_full_run(tmp_path / name)) for name in "ab"]
    page = Page(as_html(runs, 0.0))
    used = {
        each
        for _, name, value in page.attributes
        if name == "class"
        for each in value.split()
    }
    styled = set(re.findall(r"\.([a-z]+)\b", STYLE + HOVER_STYLE + frame("", "")))
    assert used - styled <= PLAIN
    assert set(WORDS) <= styled
