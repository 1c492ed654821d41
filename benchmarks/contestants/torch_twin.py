"""A family's model by `transformers` or timm on torch, eager: FAMILY FOLDER."""

import sys
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.contestants import protocol, twin_models
from benchmarks.contestants.torch_model import class_of


def make_model(name: str, folder: str) -> Any:
    """The model, ready to train."""
    twin = twin_models.TWINS[name]
    if twin.name:
        how = {"attn_implementation": "eager", "dtype": torch.float32}
        return class_of(twin.name).from_pretrained(folder, **how).train()
    from timm.models.maxxvit import MaxxVit, MaxxVitCfg  # noqa: PLC0415

    config = twin_models.coatnet()
    own = MaxxVitCfg(
        embed_dim=config.widths,
        depths=config.depths,
        stem_width=config.stem_width,
        head_hidden_size=config.widths[-1],
    )
    how = {"transformer_dim_head": config.head_size, "num_classes": config.num_classes}
    return MaxxVit(own, img_size=config.image_size, conv_stride_mode="dw", **how)


def loss_of(model: Any, kind: str, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """The mean loss of a batch."""
    if kind == "images":
        found = model(batch["image"])
        logits = found if isinstance(found, torch.Tensor) else found.logits
        return F.cross_entropy(logits, batch["label"])
    if kind == "tokens":
        logits = model(input_ids=batch["tokens"][:, :-1], use_cache=False).logits
        targets = batch["tokens"][:, 1:]
    elif kind == "masked":
        logits = model(input_ids=batch["tokens"]).logits
        targets = batch["labels"]
    else:
        how = {"input_ids": batch["inputs"], "labels": batch["labels"]}
        return model(**how, use_cache=False).loss
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def main() -> None:
    """Serve steps."""
    name, folder = sys.argv[1:]
    torch.manual_seed(0)
    kind, model = twin_models.TWINS[name].kind, make_model(name, folder)
    data = []
    for batch in twin_models.batches(name):
        own = {key: torch.from_numpy(x) for key, x in batch.items()}
        own = {k: x if x.is_floating_point() else x.long() for k, x in own.items()}
        if "image" in own:
            own["image"] = own["image"].permute(0, 3, 1, 2).contiguous()
        data.append(own)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=protocol.LEARNING_RATE, weight_decay=1e-4, fused=True
    )

    def step(number: int) -> torch.Tensor:
        loss = loss_of(model, kind, data[number % len(data)])
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        return loss.detach()

    float(step(0))
    protocol.serve(step, torch=torch.__version__)


if __name__ == "__main__":
    main()
