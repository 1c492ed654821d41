"""Do fused optimizers train as optax's, at every ZeRO stage, and swap checkpoints?

Losses of 100 steps and parameters to 1e-6 of their norm, in fp32, with clipping, a
schedule and a mask; optax runs in the plain loop on one device and in the engine.
"""

import functools
import itertools
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxpar
from jaxpar.compiled.explain import state_bytes
from jaxpar.data import Loader, stdlib_source
from jaxpar.models import decoder_config, decoder_loss, make_decoder
from jaxpar.optim import fused_adamw, fused_lamb, fused_lion
from jaxpar.step.state import packed_structs
from jaxpar.training.run import mean_loss
from jaxpar.tree import named_leaves
from tests.equivalence import problems

STEPS = 100
PAIRS = {
    "adamw": (fused_adamw, optax.adamw),
    "lamb": (fused_lamb, optax.lamb),
    "lion": (fused_lion, optax.lion),
}


def matrices(params: Any) -> Any:
    """What decays."""
    return jax.tree.map(lambda x: x.ndim > 1, params)


def made(make: Any, **options: Any) -> Any:
    schedule = optax.warmup_cosine_decay_schedule(0.0, 1e-3, 10, STEPS)
    return make(schedule, weight_decay=0.1, mask=matrices, **options)


def make_engine(
    optimizer: Any,
    mesh: tuple[int, int] = (8, 1),
    zero: int = 1,
    precision: str = "fp32",
    on: Any = None,
    **options: Any,
) -> jaxpar.Engine:
    shape = jaxpar.MeshShape(data=mesh[0], tensor=mesh[1])
    given = {
        "model": problems.make_model("linen"),
        "loss_fn": problems.weighted_loss,
        "optimizer": optimizer,
        "sample_batch": problems.make_batches(1)[0],
        "mesh": on or jaxpar.make_mesh(shape, jax.devices()[: mesh[0] * mesh[1]]),
        "zero": zero,
        "precision": precision,
        "clip_norm": problems.CLIP,
    }
    return jaxpar.initialize(**{**given, **options})


def are_equal(tree: Any, other: Any) -> bool:
    """To the bit."""
    tree, other = jax.device_get((tree, other))
    return jax.tree.all(jax.tree.map(np.array_equal, tree, other))


@functools.cache
def batches() -> list[dict]:
    return problems.make_batches(STEPS)


@functools.cache
def right(name: str) -> problems.Oracle:
    """Optax's, in the plain loop on one device."""
    params = jax.device_get(make_engine(optax.sgd(0.0), (1, 1), zero=0).state.params)
    optimizer = made(PAIRS[name][1])
    return problems.run_plainly("linen", "weighted", params, optimizer, batches())


def some_slow(cases: list[tuple], at_once: tuple[int, ...] = ()) -> list[Any]:
    """AdamW's and those of `at_once` at once, the rest with make test-slow."""
    return [
        pytest.param(*case, marks=pytest.mark.slow)
        if case[0] != "adamw" and case[1] not in at_once
        else case
        for case in cases
    ]


@pytest.mark.parametrize(
    ("name", "zero"),
    some_slow([(name, zero) for name in PAIRS for zero in range(4)], at_once=(1,)),
)
def test_hundred_steps_equal_optax(name: str, zero: int) -> None:
    engine = make_engine(made(PAIRS[name][0]), zero=zero)
    losses = [float(engine.step(batch)["loss"]) for batch in batches()]
    assert losses == pytest.approx(right(name).losses, rel=1e-6)
    assert problems.distance(engine.state.params, right(name).params) <= 1e-6


@pytest.mark.parametrize(
    ("name", "zero"), some_slow([(name, zero) for name in PAIRS for zero in (1, 3)])
)
def test_tensor_parallel_steps_equal_optax(name: str, zero: int) -> None:
    engine = make_engine(made(PAIRS[name][0]), (4, 2), zero=zero)
    losses = [float(engine.step(batch)["loss"]) for batch in batches()]
    assert losses == pytest.approx(right(name).losses, rel=1e-6)
    assert problems.distance(engine.state.params, right(name).params) <= 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("bits", [8, 32])
def test_pipeline_accumulates_and_steps_as_one_device_does(bits: int) -> None:
    config = problems.GPT_CONFIG
    given = {
        "model": make_decoder(config),
        "precision": "bf16",
        "accumulate": 4,
        "loss_fn": problems.plain_loss,
    }
    one = make_engine(fused_adamw(1e-3, bits=bits), (1, 1), zero=0, **given)
    mesh = jaxpar.make_mesh(jaxpar.MeshShape(data=2, pipe=2, tensor=2))
    many = make_engine(fused_adamw(1e-3, bits=bits), **given, on=mesh)
    for batch in batches()[:5]:
        losses = [float(each.step(batch)["loss"]) for each in (one, many)]
        assert losses[0] == pytest.approx(losses[1], rel=2e-3)


def heldout_loss(optimizer: Any) -> float:
    """After 300 steps on the standard library's source, in nats a byte."""
    config = decoder_config("tiny", seq_len=128, num_layers=2)
    corpus, heldout = stdlib_source()
    loader = Loader(corpus, batch_size=8, seq_len=128, seed=0)
    held = Loader(heldout, batch_size=8, seq_len=128, repeat=False)
    engine = make_engine(
        optimizer,
        (2, 1),
        model=make_decoder(config),
        loss_fn=decoder_loss,
        sample_batch={"tokens": jax.ShapeDtypeStruct((8, 129), np.int32)},
        clip_norm=1.0,
    )
    for batch in itertools.islice(loader, 300):
        jax.block_until_ready(engine.step(batch))
    return mean_loss(engine, itertools.islice(held, 16))


@pytest.mark.slow
@pytest.mark.usefixtures("optimized")
@pytest.mark.parametrize(
    ("make", "options", "rate"),
    [
        (fused_adamw, {}, 2e-3),
        (fused_adamw, {"b2": 0.95}, 2e-3),
        (fused_lion, {}, 3e-4),
    ],
    ids=["adamw", "adamw with b2 0.95", "lion"],
)
def test_eight_bits_learn_as_much_as_32(make: Any, options: dict, rate: float) -> None:
    """Within 1 % of the held-out loss."""
    schedule = optax.warmup_cosine_decay_schedule(0.0, rate, 30, 300)
    losses = {b: heldout_loss(make(schedule, bits=b, **options)) for b in (8, 32)}
    print(f"8 bits: {losses[8]:.4f}, 32: {losses[32]:.4f}")
    assert losses[32] < 2.5
    assert losses[8] < 1.01 * losses[32]
    assert losses[8] != losses[32]


def test_state_is_that_of_optax_leaf_by_leaf() -> None:
    fused, plain = (make_engine(made(make)).state for make in PAIRS["adamw"])
    specs = [
        {name: (x.shape, x.dtype) for name, x in named_leaves(s).items()}
        for s in (fused, plain)
    ]
    assert specs[0] == specs[1]
    pairs = zip(*map(jax.tree.leaves, (fused, plain)), strict=True)
    assert all(a.sharding.is_equivalent_to(b.sharding, a.ndim) for a, b in pairs)


@pytest.mark.parametrize("bits", [8, 32])
def test_state_is_kept_flat_and_comes_back_to_the_bit(bits: int) -> None:
    """All but a few small leaves in one bucket; 8-bit codes give the same codes."""
    engine = make_engine(fused_adamw(1e-3, bits=bits), precision="bf16")
    for batch in batches()[:3]:
        engine.step(batch)
    placement, kept = engine.placement, engine._packed
    assert set(kept.params["masters"]) == {"over_data", "whole"}
    again = placement.pack(placement.unpack(kept))
    for name, leaf in named_leaves(kept).items():
        if name == "key":
            continue
        other = np.asarray(named_leaves(again)[name])
        if name.endswith("scales") or (bits == 8 and "nu" in name):
            np.testing.assert_allclose(other, leaf, rtol=1e-6)
        else:
            assert np.array_equal(other, leaf), name


def test_copies_are_the_rounded_masters() -> None:
    engine = make_engine(fused_adamw(1e-3), precision="bf16")
    for batch in batches()[:3]:
        engine.step(batch)
    kept = engine._packed.params
    for name, master in kept["masters"].items():
        assert np.array_equal(master.astype(jnp.bfloat16), kept["copies"][name])


def test_step_that_overflows_changes_nothing_but_counters() -> None:
    engine = make_engine(fused_adamw(1e-3), precision="fp16")
    before = jax.device_get(engine.state.params)
    batch = {**batches()[0], "mask": np.full_like(batches()[0]["mask"], np.nan)}
    metrics = engine.step(batch)
    assert metrics["skipped"] == 1
    state = engine.state
    assert are_equal(state.params, before)
    assert named_leaves(state.opt_state)["0/count"] == 0


def test_learning_rate_is_told_before_the_step_that_takes_it() -> None:
    schedule = optax.linear_schedule(0.0, 1.0, 10)
    engine = make_engine(fused_lion(schedule))
    rates = [float(engine.step(batch)["learning_rate"]) for batch in batches()[:3]]
    assert rates == pytest.approx([0.0, 0.1, 0.2])


@pytest.mark.parametrize(
    ("name", "to_fused"),
    some_slow([(name, to_fused) for name in PAIRS for to_fused in (True, False)]),
)
def test_checkpoints_move_between_fused_and_optax(
    name: str, to_fused: bool, tmp_path: Path
) -> None:
    """The run goes on as if nothing had happened, on another mesh and stage too."""
    makers = PAIRS[name][::-1] if to_fused else PAIRS[name]
    first = make_engine(made(makers[0]), zero=1)
    second = make_engine(made(makers[1]), (4, 2), zero=3)
    whole = make_engine(made(makers[0]), zero=1)
    for batch in batches()[:20]:
        first.step(batch)
        whole.step(batch)
    first.save(tmp_path)
    first.wait()
    assert second.restore(tmp_path) == 20
    for batch in batches()[20:30]:
        after = second.step(batch)["loss"], whole.step(batch)["loss"]
        assert float(after[0]) == pytest.approx(float(after[1]), rel=1e-6)
    assert problems.distance(second.state.params, whole.state.params) <= 1e-6


def test_parameters_alone_are_restored(tmp_path: Path) -> None:
    """What is not read stays; here the moments, in 8 bits."""
    first = make_engine(made(optax.adamw))
    second = make_engine(made(fused_adamw, bits=8))
    for batch in batches()[:3]:
        first.step(batch)
        second.step(batch)
    moments = jax.device_get(second.state.opt_state)
    first.save(tmp_path)
    first.wait()
    second.restore(tmp_path, only=["params/*"])
    assert are_equal(second.state.params, first.state.params)
    assert are_equal(second.state.opt_state[0].mu, moments[0].mu)


def test_train_step_and_evaluate_and_probe_see_leaves() -> None:
    engine, other = (make_engine(fused_adamw(1e-3)) for _ in range(2))
    new, metrics = other.train_step(other.state, batches()[0])
    assert float(metrics["loss"]) == float(engine.step(batches()[0])["loss"])
    assert are_equal(new.params, engine.state.params)
    engine.probe()
    plain = make_engine(optax.adamw(1e-3))
    plain.step(batches()[0])
    losses = [float(e.evaluate(batches()[1])["loss"]) for e in (engine, plain)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    assert problems.distance(engine.state.params, plain.state.params) <= 1e-6
    tokens = batches()[0]["tokens"][:, :-1]
    logits = [np.asarray(e.model()(tokens)) for e in (engine, plain)]
    np.testing.assert_allclose(*logits, rtol=1e-5, atol=1e-6)


def test_explanation_tells_of_the_buckets() -> None:
    engine = make_engine(fused_adamw(1e-3, bits=8), precision="bf16")
    text = engine.explain().details
    assert "opt_state/0/mu/over_data/codes" in text
    assert "8 leaves are in buckets (whole, over_data)" in text
    assert "leaf by leaf, 1.4e-05 GB more on a device" in text


def test_inside_another_transformation_it_is_optaxs_and_says_so() -> None:
    given = {"learning_rate": 1e-3, "weight_decay": 0.1}
    plain = make_engine(optax.chain(optax.clip(0.1), optax.adamw(**given)))
    with pytest.warns(UserWarning, match="inside another .* pass it directly to jax"):
        chained = make_engine(optax.chain(optax.clip(0.1), fused_adamw(**given)))
    with pytest.warns(UserWarning, match="inside another"):
        chained.step(batches()[0])
    plain.step(batches()[0])
    assert are_equal(chained.state.params, plain.state.params)
    with pytest.raises(ValueError, match=r"bits=8: .* moments in fp32; pass"):
        make_engine(optax.chain(optax.clip(0.1), fused_adamw(1e-3, bits=8)))


def test_leaves_without_elements_are_kept() -> None:
    class Net(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            nothing = nn.Dense(0, kernel_init=nn.initializers.zeros)(x)
            return nn.Dense(4)(x) + nothing.sum()

    engine = jaxpar.initialize(
        model=Net(),
        loss_fn=lambda model, batch: (model(batch["x"]) ** 2).mean(),
        optimizer=fused_adamw(0.01),
        sample_batch={"x": np.ones((8, 3), np.float32)},
        mesh=jaxpar.make_mesh(jaxpar.MeshShape(), jax.devices()[:1]),
    )
    losses = [float(engine.step({"x": np.ones((8, 3))})["loss"]) for _ in range(3)]
    assert losses == sorted(losses, reverse=True)
    assert engine.state.params["Dense_0"]["kernel"].shape == (3, 0)


def test_state_of_another_stage_is_known_without_it() -> None:
    """As a search for a mesh asks."""
    whole, split = (make_engine(fused_adamw(1e-3, bits=8), zero=z) for z in (0, 1))
    plans = tuple(split.placement.leaves.values())
    update = whole.placement.update.with_shardings(plans)
    placement = split.placement
    told = packed_structs(update, whole.placement.abstract, placement.shardings)
    assert state_bytes(told) == state_bytes(placement.packed)
    assert state_bytes(told) != state_bytes(whole.placement.packed)


def test_step_stays_within_the_budget_of_its_stage() -> None:
    make_engine(fused_adamw(1e-3), zero=1).verify()
