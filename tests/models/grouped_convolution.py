"""XLA's convolution of as many groups as channels: the other way to a depthwise one."""

from unittest import mock

import jax

from jaxpar.models import conv


def convolve_in_groups(x_BHWC: jax.Array, kernel: jax.Array, stride: int) -> jax.Array:
    """What `jaxpar.models.conv.convolve_depthwise` computes."""
    around = (kernel.shape[0] - 1) // 2
    return jax.lax.conv_general_dilated(
        x_BHWC,
        kernel[:, :, None],
        window_strides=(stride, stride),
        padding=((around, around), (around, around)),
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
        feature_group_count=kernel.shape[2],
    )


def with_groups() -> mock._patch:
    """Models are traced with it, so that multiply-adds are those of convolutions."""
    return mock.patch.object(conv, "convolve_depthwise", convolve_in_groups)
