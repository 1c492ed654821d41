"""Lower steps and print a digest of each program, for `test_same_program`.

python -m tests.engine.traced_alike
"""

import functools
import hashlib
import json
import tempfile
from typing import Any

import jax
import numpy as np
import optax

import jaxpar
from jaxpar.engine.same_program import without_addresses
from jaxpar.models import DecoderConfig, decoder_loss, make_decoder
from jaxpar.models.experts import ExpertsConfig
from jaxpar.optim import ZeroPlusPlus, onebit_lamb, soap

BATCH = {"tokens": np.zeros((16, 9), np.int32)}
MODEL = DecoderConfig(vocab_size=32, width=16, num_heads=2, seq_len=8)


def engine(axes: dict[str, int], model: Any = MODEL, **options: Any) -> jaxpar.Engine:
    given = {"optimizer": optax.adamw(1e-3), "clip_norm": 1.0} | options
    return jaxpar.initialize(
        model=make_decoder(model),
        loss_fn=decoder_loss,
        sample_batch=BATCH,
        mesh=jaxpar.MeshShape(**axes),
        devices=jax.devices()[: jaxpar.MeshShape(**axes).num_devices],
        **given,
    )


def offload(**where: str) -> jaxpar.Offload:
    return jaxpar.Offload(**where, piece_mb=0.001)


TENSOR = {"data": 4, "tensor": 2}
PIPE = {"data": 2, "pipe": 2, "tensor": 2}
REPLICAS = {"replica": 2, "data": 4}
EXPERTS = {"data": 2, "expert": 2, "tensor": 2}


def make_cases(folder: str) -> dict[str, Any]:
    disk = offload(optimizer="disk", params="disk", path=folder)
    host = offload(optimizer="host", update="host", params="host")
    compressed = ZeroPlusPlus(3, gradient_bits=4, secondary=True)
    moe = DecoderConfig(
        **{"vocab_size": 32, "width": 16, "num_heads": 2, "seq_len": 8},
        experts=ExpertsConfig(num=4),
    )
    make = functools.partial
    return {
        "disk": make(engine, TENSOR, zero=3, offload=disk),
        "host": make(engine, TENSOR, zero=3, offload=host),
        "pipe": make(engine, PIPE, accumulate=4),
        "experts": make(engine, EXPERTS, moe),
        "ZeRO++": make(engine, REPLICAS, zero=compressed),
        "SOAP": make(engine, TENSOR, zero=2, optimizer=soap(1e-3)),
        "1-bit": make(
            engine, {"data": 8}, optimizer=onebit_lamb(1e-3, 2), clip_norm=None
        ),
    }


def main() -> None:
    jax.config.update("jax_num_cpu_devices", 8)
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, make in make_cases(folder).items():
            for part, lowered in make().lowered().items():
                text = without_addresses(lowered)
                found[f"{name}, {part}"] = hashlib.sha256(text.encode()).hexdigest()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
