"""Does the frame of a page keep any text as text, and its colours for both screens?"""

import re

from jaxpar.show.page import frame, table
from tests.show.pages import HOSTILE, Page


def test_frame_keeps_a_hostile_title_as_text():
    page = Page(frame(HOSTILE, "<p>body</p>\n"))
    assert not page.open
    assert {"script", "img"}.isdisjoint(page.tags)
    assert page.text("title") == [HOSTILE]
    assert page.text("p") == ["body"]


def test_table_has_words_first_and_keeps_any_text():
    page = Page(table(("", "n"), [(HOSTILE, "1"), ("b", "2")]))
    assert page.rows == [["n"], [HOSTILE, "1"], ["b", "2"]]
    kinds = [(tag, value) for tag, name, value in page.attributes if name == "class"]
    assert kinds[1:] == [("th", "word"), ("td", "word"), ("td", "word")]


def test_every_colour_of_the_light_screen_has_one_for_the_dark():
    light, dark = frame("", "").split("prefers-color-scheme: dark", 1)
    colours = set(re.findall(r"(--\w+): #\w{6}", light))
    assert colours == set(re.findall(r"(--\w+): #\w{6}", dark)) != set()
