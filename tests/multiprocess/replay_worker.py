"""One process of a run whose steps are replayed on the devices of other processes too.

    python -m tests.multiprocess.replay_worker SPEC OUT

SPEC is as for `tests.multiprocess.worker`. OUT gets, by case, the losses of steps with
replays and of the same ones without, and what was said of a fault of each device.
"""

import json
import sys
from pathlib import Path
from typing import Any

import jax

import jaxpar
from tests.multiprocess.worker import Case, join, make_engine, make_loader
from tests.wrong_devices import faulty_result

LEAF = "params/Dense_0/kernel"


def replayed(engine: jaxpar.Engine, batch: dict) -> float:
    replays = engine.replays()
    replays.begin(batch)
    metrics = engine.step(batch)
    replays.check(metrics)
    return float(metrics["loss"])


def said_of(engine: jaxpar.Engine, batch: dict, device: int) -> str:
    """What is said of a step in which a device is wrong."""
    try:
        with faulty_result(engine, 0, LEAF, device):
            replayed(engine, batch)
    except jaxpar.CorruptionError as error:
        return str(error)
    return "none"


def run(case: Case) -> dict[str, Any]:
    mesh = jaxpar.make_mesh(jaxpar.MeshShape(data=case.data, tensor=case.tensor))
    plain, loader = make_engine(case, mesh), make_loader()
    batches = [next(loader) for _ in range(3)]
    without = [float(plain.step(batch)["loss"]) for batch in batches]
    engine = make_engine(case, mesh)
    losses = [replayed(engine, batch) for batch in batches]
    batch = next(loader)
    ids = [device.id for device in mesh.devices.flat]
    return {
        "without": without,
        "losses": losses,
        "devices": ids,
        "said": [said_of(engine, batch, device) for device in ids],
        "owners": [device.process_index for device in mesh.devices.flat],
    }


def main(spec: dict[str, Any]) -> list[dict[str, Any]]:
    join(spec)
    assert len(jax.devices()) == spec["count"] * spec["devices"]
    return [run(Case(**case)) for case in spec["cases"]]


if __name__ == "__main__":
    result = main(json.loads(sys.argv[1]))
    Path(sys.argv[2]).write_text(json.dumps(result), encoding="utf-8")
