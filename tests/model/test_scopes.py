"""Do operations carry the names of their modules, and does nothing else change?"""

import contextlib
import re
from typing import ClassVar, Generic, TypeVar

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxpar
from benchmarks.same_programs import comparable
from jaxpar.compiled.source_lines import todays_lines
from jaxpar.model import scopes
from jaxpar.model.bridge import make_network
from jaxpar.model.scopes import _scoped, named_calls

T = TypeVar("T")
ROWS, WIDTH = 32, 8  # XLA rewrites the matmul of one row, and drops its name.


class Half(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.inner = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return jnp.tanh(self.inner(x))


class Listed(nnx.Module):
    """Modules in a list, one of them called twice, and one inside a checkpoint."""

    def __init__(self, rngs: nnx.Rngs):
        self.halves = nnx.List([Half(rngs), Half(rngs)])
        self.out = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = self.halves[0](x)
        x = nnx.remat(lambda half, x: half(x))(self.halves[1], x)
        return self.out(self.halves[0](x))


class LinenListed(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return nn.Dense(WIDTH, name="out")(jnp.tanh(nn.Dense(WIDTH, name="up")(x)))


def squares(model, batch):
    return jnp.mean(model(batch["x"]) ** 2)


def pipeline_model() -> jaxpar.PipelineModel:
    return jaxpar.PipelineModel(
        embed=Half, sections=[(Half, 4)], head=Half, remat="none"
    )


MODELS = {
    "nnx": (Listed, {"halves/0/inner", "halves/1/inner", "out"}),
    "linen": (LinenListed(), {"up", "out"}),
    "pipeline": (pipeline_model(), {"embed/inner", "blocks/inner", "head/inner"}),
}
SHAPE = {"x": jax.ShapeDtypeStruct((ROWS, WIDTH), np.float32)}


def program(model, mesh: dict[str, int], **options) -> str:
    engine = jaxpar.initialize(
        model=model,
        loss_fn=squares,
        optimizer=optax.sgd(0.1),
        sample_batch=SHAPE,
        mesh=jaxpar.make_mesh(jaxpar.MeshShape(**mesh)),
        allow_whole=("*",),
        **options,
    )
    with todays_lines():  # Else a cached program may have the names of another.
        return engine.lower().compile().as_text() or ""


def matmul_scopes(text: str) -> list[str]:
    """The names of the matmuls, without transformations and primitives."""
    names = re.findall(r' dot\(.*op_name="([^"]*)"', text)
    assert names
    return ["/".join(part for part in re.split(r"[/()]+", n) if part) for n in names]


@pytest.mark.parametrize("zero", [0, 3])
@pytest.mark.parametrize("name", MODELS)
def test_matmuls_carry_the_names_of_their_modules(name, zero):
    model, expected = MODELS[name]
    scopes = matmul_scopes(program(model, {"data": 2}, zero=zero))
    found = {each for each in expected for scope in scopes if f"/{each}/" in scope}
    assert found == expected
    assert all(any(f"/{each}/" in s for each in expected) for s in scopes), scopes


def test_matmuls_of_pipeline_stages_carry_their_names():
    model, expected = MODELS["pipeline"]
    text = program(model, {"pipe": 2}, accumulate=2, schedule="1f1b")
    scopes = matmul_scopes(text)
    assert all(any(f"/{each}/" in s for each in expected) for s in scopes), scopes


@pytest.mark.parametrize("name", ["nnx", "pipeline"])
def test_program_is_the_same_without_names(name, monkeypatch):
    named = program(MODELS[name][0], {"data": 2}, zero=3)

    @contextlib.contextmanager
    def nothing(_):
        yield

    for function in ("jaxpar.model.bridge.named_calls", "jax.named_scope"):
        monkeypatch.setattr(function, nothing)
    plain = program(MODELS[name][0], {"data": 2}, zero=3)
    assert "/inner/" in named
    assert "/inner/" not in plain
    assert comparable(named) == comparable(plain)


def test_classes_are_the_users_after_the_call_and_instances_within_it():
    model = Listed(nnx.Rngs(0))
    kinds = [type(module) for _, module in nnx.iter_modules(model)]
    with contextlib.suppress(KeyError), named_calls(model):
        assert type(model.halves[0]) is not Half
        assert isinstance(model.halves[0], Half)
        assert type(model.halves[0]).__name__ == "Half"
        raise KeyError
    assert [type(module) for _, module in nnx.iter_modules(model)] == kinds


class Watching:
    """A class whose `__init_subclass__` takes no arguments."""

    seen: ClassVar[list[type]] = []

    def __init_subclass__(cls):
        super().__init_subclass__()
        Watching.seen.append(cls)


class Strict(type(nnx.Module)):
    def __new__(cls, name, bases, names):
        return super().__new__(cls, name, bases, names)


class OfNothing(nnx.Module):
    def __call__(self, x: jax.Array) -> jax.Array:
        return x


class First(Generic[T], OfNothing):
    pass


class Last(OfNothing, Generic[T]):
    pass


class WatchedFirst(Watching, OfNothing):
    pass


class OfStrict(OfNothing, metaclass=Strict):
    pass


class Above(nnx.Module):
    def __init__(self, below: type):
        self.below = below()

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.below(x)


@pytest.mark.parametrize(
    ("kind", "is_named"),
    [
        (First, True),
        (First[int], True),
        (Last, True),
        (WatchedFirst, False),
        (OfStrict, False),
    ],
)
def test_class_is_subclassed_where_nobody_watches(kind, is_named):
    model, seen = Above(kind), [*Watching.seen]
    own = type(model.below)
    with named_calls(model):
        assert (type(model.below) is not own) == is_named
        assert model(1.0) == 1.0
    assert type(model.below) is own
    assert Watching.seen == seen


def test_mixin_that_watches_from_behind_is_not_told():
    seen = []

    class Mixin:
        def __init_subclass__(cls, **options):
            seen.append(cls)

    class Below(OfNothing, Mixin):
        pass

    with named_calls(Above(Below)):
        assert seen == [Below]


def test_classes_are_restored_where_one_cannot_be_subclassed(monkeypatch):
    model, made = Listed(nnx.Rngs(0)), []

    def scoped(kind, path):
        made.append(_scoped(kind, path))
        if len(made) > 1:
            raise KeyError
        return made[0]

    monkeypatch.setattr(scopes, "_scoped", scoped)
    with pytest.raises(KeyError), named_calls(model):
        pass
    assert {type(module) for _, module in nnx.iter_modules(model)} == {
        *(Listed, nnx.List, Half, nnx.Linear)
    }
    assert not scopes._ACTIVE.get()


def test_model_of_the_engine_has_the_users_classes():
    network = make_network(Listed, squares, SHAPE)
    variables = network.init(jax.random.key(0))
    given = lambda model, _: model, variables, jax.random.key(0), None
    model, _ = network.run(*given, training=False)
    kinds = {type(module) for _, module in nnx.iter_modules(model)}
    assert kinds == {Listed, nnx.List, Half, nnx.Linear}
