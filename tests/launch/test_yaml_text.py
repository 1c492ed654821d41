"""Does every reader of YAML take a string for a string?"""

import re

import pytest
import yaml

from jaxpar.launch.yaml_text import yaml_text


@pytest.mark.parametrize(
    "text", ["1e-4", "y", "no", "1:30", "0x1", "~", "-1", "", "a: b", "a'\"b", "é", "8"]
)
def test_strings_are_quoted_that_a_reader_might_take_for_something_else(text):
    written = yaml_text([{"args": [text]}])
    assert yaml.safe_load(written) == {"args": [text]}
    assert re.search(r"- [\"']", written)


def test_what_is_there_twice_is_written_twice():
    shared = {"ab": [1]}
    assert yaml_text([[shared, shared]]) == "---\n- ab:\n  - 1\n- ab:\n  - 1\n"
