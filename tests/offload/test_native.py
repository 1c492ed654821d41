"""Is C code compiled and shared by all cores, and its failure told?"""

import itertools

import numpy as np
import pytest

from jaxpar.offload import native
from jaxpar.offload.native import FUNCTION, compiled, compiler, cores, spread

DOUBLED = f"""#include <stdint.h>
void {FUNCTION}(int64_t begin, int64_t end, void **arrays, void **scalars) {{
  float *x = arrays[0], by = *(float *)scalars[0];
  for (int64_t i = begin; i < end; i++) x[i] *= by;
}}
"""


@pytest.mark.parametrize("size", [0, 1, 1000, 3 * native._LEAST + 5])
def test_every_element_is_computed_once(size: int) -> None:
    x = np.arange(size, dtype=np.float32)
    compiled(DOUBLED)([x], [np.float32([2])])
    assert np.array_equal(x, 2 * np.arange(size, dtype=np.float32))


def test_large_arrays_are_spread_over_the_cores() -> None:
    parts: list[tuple[int, int]] = []
    size = 100 * native._LEAST + 1
    spread(lambda begin, end: parts.append((begin, end)), size)
    assert len(parts) == min(cores(), 100)
    edges = [0, *(end for _, end in sorted(parts))]
    assert edges[-1] == size
    assert sorted(parts) == list(itertools.pairwise(edges))


def test_an_error_of_a_thread_is_raised() -> None:
    def fail(begin: int, end: int) -> None:
        raise ValueError(f"{begin} to {end}")

    with pytest.raises(ValueError, match="0 to"):
        spread(fail, 8 * native._LEAST)


def test_failures_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(OSError, match=r"failed: .*expected"):
        compiled("void update( {")
    monkeypatch.setenv("PATH", "")
    assert compiler() is None
    with pytest.raises(OSError, match="no C compiler"):
        compiled("void other(void) {}")
