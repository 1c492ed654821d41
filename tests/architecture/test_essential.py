"""Does the list of `make test` name files that there are?"""

import pytest

from tests.architecture.test_layers import ROOT
from tests.essential import ESSENTIAL


@pytest.mark.parametrize("name", ESSENTIAL)
def test_file_of_the_list_is_there(name):
    assert (ROOT / name).is_file()


def test_list_is_sorted():
    assert list(ESSENTIAL) == sorted(ESSENTIAL)
