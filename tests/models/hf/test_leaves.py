"""Is a slice of a leaf that of the tensors it is made of?"""

import numpy as np
import pytest

from jaxpar.models.hf.leaves import (
    MATRIX,
    Index,
    Leaf,
    Stack,
    TensorPart,
    one,
    per_layer,
)


class Held:
    """Tensors in memory, that count what is read."""

    def __init__(self, tensors: dict[str, np.ndarray]):
        self.tensors, self.read_elements = tensors, 0

    def shape(self, name: str) -> tuple[int, ...]:
        return self.tensors[name].shape

    def read(self, name: str, index: Index) -> np.ndarray:
        found = self.tensors[name][index]
        self.read_elements += found.size
        return found


RNG = np.random.default_rng(0)
TENSORS = {
    **{f"layer.{i}.weight": RNG.normal(size=(6, 4)) for i in range(3)},
    **{f"layer.{i}.fused": RNG.normal(size=(4, 9)) for i in range(3)},
    **{
        f"layer.{i}.expert.{e}": RNG.normal(size=(3, 2))
        for i in range(3)
        for e in range(2)
    },
    "experts": RNG.normal(size=(2, 6, 4)),
    "table": RNG.normal(size=(5, 4)),
    "token": RNG.normal(size=(1, 1, 5, 4)),
    "patch": RNG.normal(size=(6, 3, 2, 4)),
}

LEAVES: dict[str, tuple[Leaf, np.ndarray]] = {
    "transposed layers": (
        per_layer("layer.{}.weight", range(3), MATRIX),
        np.stack([TENSORS[f"layer.{i}.weight"].T for i in range(3)]),
    ),
    "every other layer": (
        per_layer("layer.{}.weight", range(0, 3, 2)),
        np.stack([TENSORS[f"layer.{i}.weight"] for i in (0, 2)]),
    ),
    "a part of what is shared": (
        per_layer("layer.{}.fused", range(3), part=(1, 3)),
        np.stack([TENSORS[f"layer.{i}.fused"][:, 3:6] for i in range(3)]),
    ),
    "without dims of size 1": (
        one("token", MATRIX, ones=2),
        TENSORS["token"][0, 0].T,
    ),
    "a kernel of patches": (
        one("patch", (2, 3, 1, 0)),
        TENSORS["patch"].transpose(2, 3, 1, 0),
    ),
    "a part of another dim": (
        Leaf(TensorPart("experts", (0, 2, 1), part=(1, 2), part_dim=1)),
        TENSORS["experts"][:, 3:].transpose(0, 2, 1),
    ),
    "experts of layers": (
        Leaf(
            Stack(
                tuple(
                    Stack(
                        tuple(
                            TensorPart(f"layer.{i}.expert.{e}", MATRIX)
                            for e in range(2)
                        )
                    )
                    for i in range(3)
                )
            )
        ),
        np.stack(
            [
                np.stack([TENSORS[f"layer.{i}.expert.{e}"].T for e in range(2)])
                for i in range(3)
            ]
        ),
    ),
    "with rows": (
        one("table", padded=0),
        np.pad(TENSORS["table"], ((0, 3), (0, 0))),
    ),
    "with columns of a head": (
        one("table", MATRIX, padded=1),
        np.pad(TENSORS["table"].T, ((0, 0), (0, 3))),
    ),
}


@pytest.mark.parametrize("name", LEAVES)
def test_any_slice_is_that_of_the_whole(name: str) -> None:
    leaf, whole = LEAVES[name]
    for seed in range(20):
        rng = np.random.default_rng(seed)
        bounds = [sorted(rng.choice(n + 1, 2, replace=False)) for n in whole.shape]
        index = tuple(slice(int(a), int(b)) for a, b in bounds)
        found = leaf.read(Held(TENSORS), index, whole.dtype)
        np.testing.assert_array_equal(found, whole[index])


@pytest.mark.parametrize("name", LEAVES)
def test_split_gives_back_the_tensors(name: str) -> None:
    leaf, whole = LEAVES[name]
    rows = 5 if leaf.padded is not None else None
    for piece, part in leaf.split(whole, rows):
        tensor = TENSORS[piece.name]
        number, of = piece.part
        expected = np.split(tensor, of, axis=piece.part_dim)[number]
        np.testing.assert_array_equal(part, expected)


def test_only_what_is_asked_for_is_read() -> None:
    tensors = Held(TENSORS)
    leaf, _ = LEAVES["transposed layers"]
    leaf.read(tensors, (slice(1, 2), slice(0, 4), slice(2, 4)), np.dtype(float))
    assert tensors.read_elements == 8


def test_dims_of_size_one_that_are_missing_are_named() -> None:
    leaf = one("table", ones=1)
    with pytest.raises(
        ValueError, match=r"table: .* \(5, 4\), but should begin with 1"
    ):
        leaf.shape(Held(TENSORS))
