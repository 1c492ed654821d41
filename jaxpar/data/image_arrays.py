"""How are images that are in memory loaded: arrays as rows, and scikit-learn's digits.

The digits need scikit-learn, which has them in its package: ``pip install
'jaxpar[vision]'``. Nothing is downloaded.
"""

import functools
import hashlib
from collections.abc import Collection
from typing import Any

import grain
import jax
import numpy as np
import xxhash
from jaxtyping import Integer, UInt8

from jaxpar.data.rows import ordered
from jaxpar.launch.extras import import_extra

_SPLITS = ("train", "heldout", "all")
_BRIGHTEST = 16
"""Of a pixel of scikit-learn's digits."""


class ImageArrays:
    """Images in memory, and their labels.

    A row has "image", uint8 [H, W, C], and "label", int32: the place of its class in
    `classes`.

    Attributes:
      classes: their names.

    Args:
      image_NHWC: the images.
      label_N: their labels, from 0 to ``len(classes) - 1``.
      classes: the names of the classes.

    Raises:
      ValueError: if there is no image, or not one label per image, or a label is not a
        class's place.

    Example:
      >>> rows = ImageArrays(
      ...     np.zeros((4, 8, 8, 1), np.uint8), np.array([0, 1, 1, 0]), ("a", "b")
      ... )
      >>> rows.description
      '4 images of 2 classes'
    """

    padding = 0.0

    def __init__(
        self,
        image_NHWC: UInt8[np.ndarray, "N H W C"],
        label_N: Integer[np.ndarray, "M"],
        classes: Collection[str],
    ):
        self.classes = tuple(classes)
        _check_arrays(image_NHWC, label_N, self.classes)
        self._images, self._labels = image_NHWC, label_N.astype(np.int32)

    @property
    def shapes(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Shapes of one row."""
        return {
            "image": jax.ShapeDtypeStruct(self._images.shape[1:], np.uint8),
            "label": jax.ShapeDtypeStruct((), np.int32),
        }

    @property
    def description(self) -> str:
        """Numbers of images and classes."""
        return f"{len(self):,} images of {len(self.classes):,} classes"

    def __len__(self) -> int:
        return len(self._images)

    def read(self, numbers: Collection[int]) -> dict[str, np.ndarray]:
        """Take rows."""
        at = np.array(list(numbers))
        return {"image": self._images[at], "label": self._labels[at]}

    def identity(self) -> dict[str, Any]:
        """A hash of the classes, the images and the labels."""
        return {"num_images": len(self), "sha256": self._sha256}

    @functools.cached_property
    def _sha256(self) -> str:
        digest = hashlib.sha256("\n".join(self.classes).encode())
        digest.update(repr(self._images.shape).encode())
        for array in (self._images, self._labels):
            digest.update(np.ascontiguousarray(array))
        return digest.hexdigest()

    def order(self, *, seed: int, shuffle: bool, repeat: bool) -> grain.MapDataset[int]:
        """The stream of images."""
        return ordered(len(self), seed=seed, shuffle=shuffle, repeat=repeat)


def load_digits(*, split: str = "train", heldout: int = 5) -> ImageArrays:
    """Load scikit-learn's 1,797 handwritten digits, of 8 x 8 grey pixels.

    The images are ordered by a hash of their pixels; the first of that order are held
    out, so the split is the same everywhere: by default 360 and 1,437.

    Args:
      split: "train", "heldout" or "all".
      heldout: one image in so many is held out, rounded up.

    Returns:
      The rows; black is 0, white 255.

    Raises:
      ModuleNotFoundError: if scikit-learn is missing.
      ValueError: if `split` is not one of its choices, or `heldout` is below 2.

    Source: Alpaydin, Kaynak, "Optical Recognition of Handwritten Digits" (UCI, 1998).
    """
    if split not in _SPLITS:
        raise ValueError(
            f"split={split!r} must be one of {', '.join(map(repr, _SPLITS))}."
        )
    if heldout < 2:
        raise ValueError(
            f"heldout={heldout} must be at least 2: one image in so many is held out; "
            "give split='all' to hold out none."
        )
    found = import_extra("sklearn.datasets", "load_digits").load_digits()
    images = np.rint(found.images * (255 / _BRIGHTEST)).astype(np.uint8)[..., None]
    hashes = [xxhash.xxh3_64_intdigest(image.tobytes()) for image in images]
    order = np.argsort(np.array(hashes, np.uint64), kind="stable")
    num_held = -(-len(order) // heldout)
    chosen = {"train": order[num_held:], "heldout": order[:num_held], "all": order}
    at = np.sort(chosen[split])
    return ImageArrays(images[at], found.target[at], tuple("0123456789"))


def _check_arrays(
    image_NHWC: np.ndarray, label_N: np.ndarray, classes: tuple[str, ...]
) -> None:
    if not len(image_NHWC) or label_N.shape != image_NHWC.shape[:1]:
        raise ValueError(
            f"label_N: has shape {label_N.shape} for {len(image_NHWC):,} images "
            f"{image_NHWC.shape}; give at least one image, and one label for each."
        )
    wrong = np.flatnonzero((label_N < 0) | (label_N >= len(classes)))
    if len(wrong):
        raise ValueError(
            f"label_N[{wrong[0]}] is {label_N[wrong[0]]}, but there are "
            f"{len(classes)} classes: labels are from 0 to {len(classes) - 1} "
            f"({len(wrong):,} are not)."
        )
