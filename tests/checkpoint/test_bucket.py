"""Do checkpoints in a bucket hold what those in a folder do?"""

import dataclasses
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxpar
from jaxpar.checkpoint import (
    Checkpoints,
    DamagedError,
    Keep,
    MemoryTier,
    SaveFailedError,
)
from jaxpar.checkpoint import bucket as module
from tests.checkpoint.saves import save
from tests.multiprocess.test_training import launch
from tests.multiprocess.worker import Case, run
from tests.object_server import BUCKET, Server, serving
from tests.runs import Data, bits, fresh, make_engine

Tree = dict[str, Any]
Bits = Callable[[Any], list[bytes]]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving() as server:
        yield server


@pytest.fixture
def url(server: Server) -> str:
    return f"s3://{BUCKET}/{uuid.uuid4().hex}/run"


def test_memory_is_passed_over_for_a_newer_step_in_a_bucket(
    url: str, tree: Tree, tmp_path: Path
) -> None:
    tier = MemoryTier(tmp_path, checkpoints=url, root=tmp_path)
    tier.save(3, tree)
    checkpoints = Checkpoints(url)
    checkpoints.save(2, tree)
    checkpoints.wait()
    assert tier.restore(tree).step == 3
    checkpoints.save(4, tree)
    checkpoints.close()
    with pytest.raises(FileNotFoundError, match="newer than its checkpoints"):
        tier.restore(tree)
    tier.close()


def inside(url: str) -> str:
    return url.removeprefix(f"s3://{BUCKET}/")


def objects(server: Server, url: str, step: int) -> list[str]:
    """The names of a step's slices."""
    found = server.keys(f"{inside(url)}/step_{step:08d}/arrays.")
    return [key for key in found if not key.endswith(".zarray")]


def test_step_restores_to_the_bit_onto_another_sharding(
    url: str, tree: Tree, bits: Bits
) -> None:
    tree |= {
        "key": jax.random.key(3),
        "half": jnp.arange(6, dtype=jnp.bfloat16),
        "none": jnp.zeros((0, 3)),
    }
    checkpoints = Checkpoints(url)
    checkpoints.save(5, tree, data_state={"row": 7}, meta={"note": "a"})
    checkpoints.close()
    mesh = jax.make_mesh((2, 4), ("a", "b"), axis_types=(AxisType.Auto,) * 2)
    target = dict(tree)
    target["params"] = {
        "kernel": jax.ShapeDtypeStruct(
            (16, 4), jnp.float32, sharding=NamedSharding(mesh, P("a", "b"))
        )
    }
    found = Checkpoints(url).restore(target)
    assert bits(found.tree) == bits(tree)
    assert (found.step, found.data_state, found.meta["note"]) == (5, {"row": 7}, "a")


def test_keep_leaves_the_newest_and_the_best(
    server: Server, url: str, tree: Tree
) -> None:
    checkpoints = Checkpoints(url, keep=Keep(last=1, best=1))
    for step, metric in ((1, 3.0), (2, 1.0), (3, 2.0)):
        checkpoints.save(step, tree, metric=metric)
    checkpoints.close()
    assert checkpoints.steps() == [2, 3]
    assert not server.keys(f"{inside(url)}/step_00000001/")


def test_altered_and_lost_objects_give_way_to_the_step_before(
    server: Server, url: str, tree: Tree, bits: Bits
) -> None:
    save(url, 1, 2, 3, tree=tree)
    first, *_ = objects(server, url, 3)
    altered = bytearray(server.ask(first))
    altered[-1] ^= 1
    server.ask(first, "PUT", bytes(altered))
    kernel = next(key for key in objects(server, url, 2) if "kernel" in key)
    server.ask(kernel, "DELETE")
    checkpoints = Checkpoints(url)
    with pytest.warns(UserWarning, match="restoring step 1"):
        found = checkpoints.restore(tree)
    assert (found.step, bits(found.tree)) == (1, bits(tree))
    with pytest.warns(UserWarning, match="step_00000002, step_00000003"):
        checkpoints.save(2, tree)
    checkpoints.close()
    assert checkpoints.steps() == [1, 2]
    text = f"{inside(url)}/step_00000002/manifest.json"
    server.ask(text, "PUT", server.ask(text).replace(b'"step": 2', b'"step": 4'))
    with pytest.raises(DamagedError, match="another checksum"):
        checkpoints.restore(tree, step=2)


def test_step_without_a_manifest_is_none_and_is_deleted(
    server: Server, url: str, tree: Tree, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(url, 1, tree=tree)
    checkpoints = Checkpoints(url)
    assert checkpoints.restore(tree).step == 1

    def fail(*_: Any) -> None:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(module.BucketStep, "commit", fail)
        checkpoints.save(2, tree)
        with pytest.raises(SaveFailedError, match=r"Input/output.*there is step 1"):
            checkpoints.wait()
    left = objects(server, url, 2)
    assert left
    assert checkpoints.steps() == [1]
    again = Checkpoints(url)  # As of the next start.
    assert again.restore(tree).step == 1
    again.save(2, tree)
    again.close()
    assert again.steps() == [1, 2]
    assert not set(left) & set(objects(server, url, 2))


def test_second_process_does_not_replace_a_step(url: str, tree: Tree) -> None:
    """Of two that have begun the same step, one commits it."""
    save(url, 1, tree=tree)
    one, other = Checkpoints(url), Checkpoints(url)
    one.restore(tree)
    other.restore(tree)
    real, begun = module.BucketStep.commit, []

    def commit(step: module.BucketStep, manifest: Any) -> None:
        if not begun:
            begun.append(manifest)
            real(step, dataclasses.replace(manifest, meta={"other": True}))
        real(step, manifest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module.BucketStep, "commit", commit)
        one.save(2, tree)
        with pytest.raises(SaveFailedError, match="another process has saved this"):
            one.wait()
    assert Checkpoints(url).meta(2) == {"other": True}


def test_another_run_is_refused(url: str, tree: Tree) -> None:
    save(url, 1, tree=tree)
    with pytest.raises(ValueError, match="holds another run, up to step 1"):
        Checkpoints(url).save(2, tree)


def test_bucket_that_is_not_there_is_said_before_anything_is_saved(
    server: Server, tree: Tree
) -> None:
    checkpoints = Checkpoints("s3://nowhere/run")
    with pytest.raises((PermissionError, OSError), match=r"nowhere"):
        checkpoints.save(1, tree)


@pytest.mark.thorough
def test_engine_saves_to_a_bucket_and_goes_on_under_another_mesh(url: str) -> None:
    engine, data = fresh(), Data()
    for _ in range(2):
        engine.step(next(data))
    engine.save(url, data=data)
    engine.wait()
    before = bits(engine)
    again, other = fresh(), Data()
    assert again.restore(url, data=other) == 2
    assert bits(again) == before
    assert other.get_state() == data.get_state()
    one = make_engine(mesh=jaxpar.make_mesh(jaxpar.MeshShape(data=8)), zero=3)
    assert one.restore(url) == 2


@pytest.mark.thorough
@pytest.mark.multiprocess
def test_two_processes_save_to_a_bucket_what_one_restores(
    url: str, tmp_path: Path
) -> None:
    case = Case(data=4, tensor=1, zero=2, accumulate=2, save=url)
    launch([case], tmp_path)
    resumed = Case(data=2, tensor=2, zero=3, restore=url)
    (first,), (second,) = launch([resumed], tmp_path)
    run(dataclasses.replace(case, save=str(tmp_path / "one")), jax.devices()[:4])
    alone = dataclasses.replace(resumed, restore=str(tmp_path / "one"))
    right = run(alone, jax.devices()[:4])
    for seen in (first, second, run(resumed, jax.devices()[:4])):
        assert seen["losses"] == pytest.approx(right["losses"], rel=1e-6)
        assert seen["held_out"] == pytest.approx(right["held_out"], rel=1e-6)
