"""Are slices of a folder's tensors read, from one file or several?"""

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from jaxpar.models.hf.tensors import Tensors


def test_slices_are_read_from_the_file_that_has_them(tmp_path: Path) -> None:
    one, two = np.arange(12.0).reshape(3, 4), np.arange(5, dtype=np.int32)
    save_file({"one": one}, tmp_path / "model-00001-of-00002.safetensors")
    save_file({"two": two}, tmp_path / "model-00002-of-00002.safetensors")
    tensors = Tensors(tmp_path)
    assert tensors.names == {"one", "two"}
    assert tensors.shape("one") == (3, 4)
    found = tensors.read("one", (slice(1, 3), slice(0, 2)))
    np.testing.assert_array_equal(found, one[1:3, :2])
    np.testing.assert_array_equal(tensors.read("two", (slice(2, 4),)), two[2:4])


def test_a_name_in_two_files_is_refused(tmp_path: Path) -> None:
    for name in ("a", "b"):
        save_file({"one": np.ones(2)}, tmp_path / f"{name}.safetensors")
    with pytest.raises(ValueError, match="'one' is in another file too"):
        Tensors(tmp_path)
