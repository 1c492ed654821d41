"""Are blocks hashed however bytes come, and are hashes kept as they were first?"""

import itertools

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from jaxpar.data import block_hashes
from jaxpar.data.block_hashes import BlockHasher, keep_hashes, num_blocks


@given(st.binary(max_size=40), st.lists(st.integers(0, 40), max_size=6))
def test_hashes_are_those_of_the_blocks(data, cuts):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(block_hashes, "BLOCK_BYTES", 8)
        hasher = BlockHasher()
        bounds = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
        for start, stop in itertools.pairwise(bounds):
            hasher.update(data[start:stop])
        expected = [
            xxhash.xxh3_64_intdigest(data[at : at + 8]) for at in range(0, len(data), 8)
        ]
        assert hasher.values().tolist() == expected
        assert num_blocks(len(data)) == len(expected)


def test_first_hashes_are_kept(tmp_path):
    path = tmp_path / "run" / "blocks.npy"
    first, other = np.arange(3, dtype=np.uint64), np.ones(3, np.uint64)
    assert keep_hashes(path, first).tolist() == [0, 1, 2]
    assert keep_hashes(path, other).tolist() == [0, 1, 2]
    assert [file.name for file in path.parent.iterdir()] == ["blocks.npy"]


@pytest.mark.parametrize("content", [b"", b"noise", b"\x93NUMPY\x01\x00"])
def test_damaged_hashes_are_refused(tmp_path, content):
    path = tmp_path / "blocks.npy"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"blocks\.npy' does not hold .*; delete it"):
        keep_hashes(path, np.zeros(3, np.uint64))


def test_hashes_of_another_corpus_are_refused(tmp_path):
    keep_hashes(tmp_path / "blocks.npy", np.zeros(2, np.uint64))
    with pytest.raises(ValueError, match=r"uint64 \(2,\), expected uint64 \(3,\)"):
        keep_hashes(tmp_path / "blocks.npy", np.zeros(3, np.uint64))
