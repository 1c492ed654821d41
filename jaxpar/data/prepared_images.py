"""How do images become what a model takes: changed at random, and scaled to floats.

What is drawn for a row depends on a seed and the row's place in the stream, and on
nothing else: not on the batch, the number of processes or the thread that reads. A run
that goes on draws what it would have drawn.
"""

from collections.abc import Collection, Sequence
from typing import Any

import grain
import jax
import numpy as np
import scipy.ndimage
from jaxtyping import Float, UInt8

from jaxpar.data.image_arrays import load_digits
from jaxpar.data.images import ImageFolder
from jaxpar.data.rows import RowSource

_WHITE = 255
_HALF_TURN = 180


class PreparedImages:
    """Rows of images, cropped, shifted, mirrored and scaled.

    A row has "image", float32 [size, size, C]: ``(pixel / 255 - mean) / std``. Without
    `shift` and `flip` nothing is at random, as in evaluation.

    Args:
      source: rows with "image", uint8 [H, W, C], and "label", an integer, such as
        `jaxpar.data.ImageFolder`.
      size: height and width of the crop around the centre, pixels; None for those of
        the image. A larger one puts a black border around it.
      shift: the crop moves by up to so many pixels up or down, and left or right;
        what is beyond the image is black.
      rotate: degrees that the crop is turned by, either way, at most; what is beyond
        the image is black.
      flip: mirror half of the rows, left to right.
      mean: of pixels from 0 to 1, for all channels or each.
      std: likewise.
      num_labels: labels are from 0 to ``num_labels - 1``; another raises an error when
        it is read. None to check none.
      seed: of what is at random.

    Raises:
      ValueError: if the rows are not images with labels, or a number is out of range.

    Example:
      >>> from jaxpar.data import ImageArrays, Loader
      >>> pixels = np.full((4, 8, 8, 1), 255, np.uint8)
      >>> rows = ImageArrays(pixels, np.zeros(4, int), ("white",))
      >>> batch = next(Loader(PreparedImages(rows, shift=1), batch_size=2))
      >>> batch["image"].shape, float(batch["image"].max())
      ((2, 8, 8, 1), 1.0)

    Source: Krizhevsky et al., "ImageNet Classification with Deep Convolutional Neural
    Networks" (2012), section 4.1, for shifts and mirror images.
    """

    def __init__(
        self,
        source: RowSource,
        *,
        size: int | None = None,
        shift: int = 0,
        rotate: int = 0,
        flip: bool = False,
        mean: float | Sequence[float] = 0.5,
        std: float | Sequence[float] = 0.5,
        num_labels: int | None = None,
        seed: int = 0,
    ):
        _check_source(source)
        height, width, channels = source.shapes["image"].shape
        self.source, self._crop = source, (size or height, size or width)
        _check_numbers((height, width), size, shift, seed)
        if not 0 <= rotate <= _HALF_TURN:
            raise ValueError(
                f"rotate={rotate} must be from 0 to {_HALF_TURN} degrees, either way."
            )
        self._shift, self._rotate, self._flip, self._seed = shift, rotate, flip, seed
        self._mean = _per_channel("mean", mean, channels)
        self._std = _per_channel("std", std, channels)
        if not (self._std > 0).all():
            raise ValueError(f"std={std} must be above 0; 1 does not scale.")
        self._num_labels = num_labels

    @property
    def shapes(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Shapes of one row."""
        shape = *self._crop, self.source.shapes["image"].shape[-1]
        return {**self.source.shapes, "image": jax.ShapeDtypeStruct(shape, np.float32)}

    @property
    def padding(self) -> float:
        """That of the source."""
        return self.source.padding

    @property
    def description(self) -> str:
        """What the source has."""
        return self.source.description

    def __len__(self) -> int:
        return len(self.source)

    def read(self, numbers: Collection[int]) -> dict[str, np.ndarray]:
        """Read rows and prepare them.

        Args:
          numbers: ``place * len(self) + number``, of a row's place in the stream and
            its number.

        Returns:
          name -> array [len(numbers), ...].

        Raises:
          ValueError: if a label is out of range.
        """
        at = [divmod(number, len(self)) for number in numbers]
        batch = self.source.read([number for _, number in at])
        self._check_labels(batch["label"])
        prepared = [
            self._prepared(image, place)
            for image, (place, _) in zip(batch["image"], at, strict=True)
        ]
        pixels = np.stack(prepared).astype(np.float32) / _WHITE
        return {**batch, "image": (pixels - self._mean) / self._std}

    def _prepared(
        self, image_HWC: UInt8[np.ndarray, "H W C"], place: int
    ) -> UInt8[np.ndarray, "h w C"]:
        if not (self._shift or self._rotate or self._flip):
            return crop_around(image_HWC, self._crop)
        draws = np.random.default_rng([self._seed, place])
        moved = draws.integers(-self._shift, self._shift + 1, 2).tolist()
        is_mirrored = self._flip and bool(draws.integers(2))
        cropped = crop_around(image_HWC, self._crop, moved)
        if self._rotate:
            degrees = draws.uniform(-self._rotate, self._rotate)
            cropped = scipy.ndimage.rotate(cropped, degrees, reshape=False, order=1)
        return cropped[:, ::-1] if is_mirrored else cropped

    def _check_labels(self, label_B: np.ndarray) -> None:
        if self._num_labels is None:
            return
        wrong = label_B[(label_B < 0) | (label_B >= self._num_labels)]
        if len(wrong):
            raise ValueError(
                f"num_labels={self._num_labels}, but a row has the label {wrong[0]}; "
                f"labels are from 0 to {self._num_labels - 1}: give the model more of "
                "them, or number the classes from 0."
            )

    def identity(self) -> dict[str, Any]:
        """What is done, and what the source is."""
        done = {"crop": list(self._crop), "shift": self._shift, "flip": self._flip}
        done |= {"rotate": self._rotate}
        done |= {"mean": self._mean.tolist(), "std": self._std.tolist()}
        return {**self.source.identity(), "prepared": {**done, "seed": self._seed}}

    def order(self, *, seed: int, shuffle: bool, repeat: bool) -> grain.MapDataset[int]:
        """The source's stream, in which each row has its place."""
        order = self.source.order(seed=seed, shuffle=shuffle, repeat=repeat)
        return order.map_with_index(lambda place, number: place * len(self) + number)


def crop_around(
    image_HWC: UInt8[np.ndarray, "H W C"],
    size: tuple[int, int],
    moved: Sequence[int] = (0, 0),
) -> UInt8[np.ndarray, "h w C"]:
    """Crop an image around its centre, or around a point beside it.

    Args:
      image_HWC: the image.
      size: height and width of the crop.
      moved: rows down and columns to the right, of the crop.

    Returns:
      The crop; black beyond the image.

    Example:
      >>> image = np.arange(1, 10, dtype=np.uint8).reshape(3, 3, 1)
      >>> crop_around(image, (3, 3), (1, -1))[..., 0].tolist()
      [[0, 4, 5], [0, 7, 8], [0, 0, 0]]
    """
    firsts = [
        (whole - own) // 2 + by
        for whole, own, by in zip(image_HWC.shape, size, moved, strict=False)
    ]
    cropped = np.zeros((*size, image_HWC.shape[-1]), image_HWC.dtype)
    spans = [
        (max(first, 0), min(first + own, whole))
        for first, own, whole in zip(firsts, size, image_HWC.shape, strict=False)
    ]
    taken = tuple(slice(start, stop) for start, stop in spans)
    put = tuple(
        slice(start - first, stop - first)
        for (start, stop), first in zip(spans, firsts, strict=True)
    )
    cropped[put] = image_HWC[taken]
    return cropped


def _per_channel(
    name: str, value: float | Sequence[float], channels: int
) -> Float[np.ndarray, "..."]:
    array = np.asarray(value, np.float32)
    if array.shape not in ((), (channels,)):
        raise ValueError(
            f"{name}={value} must be one number, or one for each of the {channels} "
            "channels."
        )
    return array


def _check_source(source: RowSource) -> None:
    shapes, missing = source.shapes, jax.ShapeDtypeStruct((), np.bool_)
    image, label = (shapes.get(name, missing) for name in ("image", "label"))
    is_label = label.shape == () and np.issubdtype(label.dtype, np.integer)
    if not (image.dtype == np.uint8 and len(image.shape) == 3 and is_label):
        found = {name: f"{x.dtype}{list(x.shape)}" for name, x in shapes.items()}
        raise ValueError(
            f"source: its rows have {found}, but need 'image', uint8 [H, W, C], and "
            "'label', an integer; give jaxpar.data.ImageFolder or ImageArrays."
        )


def _check_numbers(
    whole: tuple[int, int], size: int | None, shift: int, seed: int
) -> None:
    if size is not None and size < 1:
        raise ValueError(
            f"size={size} must be at least 1 pixel; None for the source's "
            f"{whole[0]} x {whole[1]}."
        )
    most = min(whole if size is None else (size, size)) - 1
    if not 0 <= shift <= most:
        raise ValueError(
            f"shift={shift} must be from 0 to {most}, or nothing of an image may be "
            "left."
        )
    if seed < 0:
        raise ValueError(f"seed={seed} must not be negative; give 0 or more.")


def open_images(
    data: str,
    split: str,
    *,
    size: int,
    channels: int,
    num_labels: int,
    shift: int = 0,
    rotate: int = 0,
    flip: bool = False,
    seed: int = 0,
) -> PreparedImages:
    """Open a split of a data set for a model, a fifth of which is held out.

    Args:
      data: "digits" of scikit-learn, or a folder for `jaxpar.data.ImageFolder`, whose
        images are read larger than the model's by `shift` pixels on each side.
      split: "train", "heldout" or "all"; only "train" is changed at random.
      size: height and width of the model's images, pixels.
      channels: of the model's images: 1 of grey, 3 of RGB.
      num_labels: of the model.
      shift: as in `PreparedImages`.
      rotate: likewise.
      flip: likewise.
      seed: likewise.

    Returns:
      The rows.

    Raises:
      ValueError: if the data has other channels, or another number of classes.
    """
    rows = (
        load_digits(split=split)
        if data == "digits"
        else ImageFolder(
            data,
            size=size + 2 * shift,
            split=split,
            heldout=5,
            mode="L" if channels == 1 else "RGB",
        )
    )
    given = {"num_labels": num_labels, "channels": channels}
    found = {"num_labels": len(rows.classes), "channels": rows.shapes["image"].shape[2]}
    for name, value in given.items():
        if value != found[name]:
            raise ValueError(
                f"{name}={value}, but data={data!r} has {found[name]} (its classes are "
                f"{', '.join(rows.classes[:10])}): give the model as many."
            )
    random: dict[str, Any] = {"shift": shift, "rotate": rotate, "flip": flip}
    random["seed"] = seed
    return PreparedImages(
        rows, size=size, num_labels=num_labels, **(random if split == "train" else {})
    )


def image_shapes(
    batch_size: int, size: int, channels: int
) -> dict[str, jax.ShapeDtypeStruct]:
    """Shapes of a batch of prepared images, to compile a step before data is there.

    Args:
      batch_size: rows.
      size: height and width, pixels.
      channels: of an image.

    Returns:
      Those of "image" and "label".

    Example:
      >>> image_shapes(2, 8, 1)["image"].shape
      (2, 8, 8, 1)
    """
    shape = batch_size, size, size, channels
    return {
        "image": jax.ShapeDtypeStruct(shape, np.float32),
        "label": jax.ShapeDtypeStruct((batch_size,), np.int32),
    }
