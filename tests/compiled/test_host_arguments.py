"""Is an argument that is named in host memory when a program is compiled?"""

import pytest

from tests.compiled.named_arguments import host_bytes


@pytest.mark.parametrize(("numbers", "arrays"), [((), 0), ((0,), 1), ((0, 2), 2)])
def test_named_arguments_are_on_the_host(numbers, arrays, compiled) -> None:
    assert compiled(host_bytes, numbers) == arrays * 4 * 64 * 64
