"""Small CoAtNets of timm's, at random, as the oracle of ours.

`timm` on torch's CPU: the code of ``coatnet_N_224`` with smaller widths.
"""

import dataclasses
from typing import Any

import numpy as np
import timm
import torch
from timm.models.maxxvit import MaxxVit, MaxxVitCfg
from torch.utils.flop_counter import FlopCounterMode

from jaxpar.models.coatnet.config import CoatnetConfig

SMALL = CoatnetConfig(
    num_classes=7,
    image_size=64,
    stem_width=8,
    widths=(8, 16, 32, 64),
    depths=(2, 3, 3, 2),
    head_size=16,
    key_bias=True,
)
CONFIGS = {
    "small": SMALL,
    "strided": dataclasses.replace(SMALL, stride_in="widen", depths=(3, 2, 2, 4)),
    "gray-equal": dataclasses.replace(
        SMALL, channels=1, widths=(8, 8, 32, 32), stem_width=16, image_size=32
    ),
}
STRIDES = {"depthwise": "dw", "widen": "1x1"}


@dataclasses.dataclass(frozen=True)
class PublishedCoatnet:
    """A model of timm's, and what it makes of a batch.

    Attributes:
      tensors: its state before training.
      batch: images [B, H, W, C] and labels.
      evaluated: logits in evaluation mode.
      logits: in training mode.
      loss: in training mode.
      grads: tensor -> the loss's gradient.
      after: its running statistics after the call in training mode.
    """

    tensors: dict[str, np.ndarray]
    batch: dict[str, np.ndarray]
    evaluated: np.ndarray
    logits: np.ndarray
    loss: float
    grads: dict[str, np.ndarray]
    after: dict[str, np.ndarray]


def theirs_of(config: CoatnetConfig) -> MaxxVit:
    """The model of timm's that a config of ours describes."""
    own = MaxxVitCfg(
        embed_dim=config.widths,
        depths=config.depths,
        stem_width=config.stem_width,
        head_hidden_size=config.widths[-1],
    )
    return MaxxVit(
        own,
        img_size=config.image_size,
        in_chans=config.channels,
        num_classes=config.num_classes,
        transformer_dim_head=config.head_size,
        conv_stride_mode=STRIDES[config.stride_in],
    )


def random_tensors(model: MaxxVit) -> None:
    """Move every parameter and statistic away from its constant."""
    with torch.no_grad():
        for param in model.parameters():
            param.add_(0.1 * torch.randn_like(param))
        for name, buffer in model.named_buffers():
            if name.endswith("running_mean"):
                buffer.add_(0.1 * torch.randn_like(buffer))
            if name.endswith("running_var"):
                buffer.mul_(0.5 + torch.rand_like(buffer))


def publish(name: str) -> PublishedCoatnet:
    """Make a model at random, and run it."""
    config = CONFIGS[name]
    torch.manual_seed(0)
    model = theirs_of(config)
    random_tensors(model)
    tensors = as_arrays(model.state_dict())
    rng = np.random.default_rng(0)
    side = config.image_size
    batch = {
        "image": rng.normal(size=(4, side, side, config.channels)).astype(np.float32),
        "label": rng.integers(0, config.num_classes, 4).astype(np.int32),
    }
    evaluated = logits_of(model, batch["image"])
    model.train()
    logits = model(as_images(batch["image"]))
    labels = torch.tensor(batch["label"], dtype=torch.long)
    loss = torch.nn.functional.cross_entropy(logits, labels)
    loss.backward()
    named = model.named_parameters()
    return PublishedCoatnet(
        tensors,
        batch,
        evaluated,
        logits.detach().numpy(),
        float(loss.detach()),
        {n: p.grad.numpy() for n, p in named if p.grad is not None},
        {n: x for n, x in as_arrays(model.state_dict()).items() if "running" in n},
    )


def logits_of(model: MaxxVit, image_BHWC: np.ndarray) -> np.ndarray:
    """Logits in evaluation mode."""
    model.eval()
    with torch.no_grad():
        return model(as_images(image_BHWC)).numpy()


def reload(
    config: CoatnetConfig, tensors: dict[str, np.ndarray], image_BHWC: np.ndarray
) -> np.ndarray:
    """The logits of their model with these tensors."""
    model = theirs_of(config)
    model.load_state_dict({n: torch.from_numpy(x) for n, x in tensors.items()})
    return logits_of(model, image_BHWC)


def as_images(image_BHWC: np.ndarray) -> torch.Tensor:
    """Channels first."""
    return torch.from_numpy(image_BHWC.transpose(0, 3, 1, 2).copy())


def as_arrays(tensors: dict[str, torch.Tensor]) -> dict[str, np.ndarray]:
    """Copies of tensors."""
    return {name: tensor.numpy().copy() for name, tensor in tensors.items()}


def shapes_of_named(name: str, size: int) -> tuple[dict[str, Any], float]:
    """Shapes of the parameters of timm's own model, and multiply-adds of an image."""
    with torch.device("meta"):
        model = timm.create_model(name, img_size=size).eval()
        image = torch.zeros(1, 3, size, size)
    counter = FlopCounterMode(display=False)
    with counter, torch.no_grad():
        model(image)
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    return shapes, counter.get_total_flops() / 2e9
