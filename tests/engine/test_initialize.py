"""Is everything that can be known to be wrong said before anything compiles?

Each case is one argument of a call that is right but for it.
"""

import collections
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.extend.core import jaxpr_as_fun
from jax.sharding import PartitionSpec as P

import jaxpar

ROWS = 16


def sample(rows=ROWS, dtype=np.float32):
    return {"x": np.ones((rows, 4), dtype)}


def loss(model, batch):
    return jnp.mean((model(batch["x"]) - 1.0) ** 2)


def linear(rngs):
    return nnx.Linear(4, 6, rngs=rngs)


class Annotated(nnx.Module):
    def __init__(self, names, shape=(4, 6)):
        self.w = nnx.Param(jnp.ones(shape), out_sharding=names)

    def __call__(self, x):
        return x @ self.w[...][:4]


class Counted(nnx.Module):
    """A parameter that is no float."""

    def __init__(self, rngs):
        self.count = nnx.Param(jnp.zeros(3, jnp.int32))

    def __call__(self, x):
        return x


RIGHT: dict[str, Any] = {
    "model": linear,
    "loss_fn": loss,
    "optimizer": optax.sgd(0.1),
    "sample_batch": sample(),
    "mesh": jaxpar.MeshShape(data=4, tensor=2),
}


def make_engine(**change: Any) -> jaxpar.Engine:
    return jaxpar.initialize(**(RIGHT | change))


def test_right_call_compiles_the_initialisation_alone(compiled):
    jax.clear_caches()  # Other tests leave jax's own programs behind.
    key = jax.random.key(0)
    compiled.clear()
    # How a traced split is taken apart differs by the version of jax.
    jaxpr_as_fun(jax.make_jaxpr(lambda key: [*jax.random.split(key)])(key))(key)
    of_keys = collections.Counter(compiled)
    jax.clear_caches()
    jax.random.key(0)
    compiled.clear()
    make_engine()
    # One a kind of leaf, each with a key of its own.
    of_leaves = {"jit(piece_of)": 2, "jit(_threefry_fold_in)": 1}
    assert collections.Counter(compiled) == of_keys | of_leaves


def of_nothing(model, batch):
    return model.w[...].sum() + batch["x"].mean()


def weight_by_parameters(model, batch):
    return jaxpar.Weighted(loss(model, batch), model(batch["x"]).sum())


def weight_through_a_scan(model, batch):
    """The weight meets the parameters only in the second round of a loop."""

    def body(carry, _):
        weight, other = carry
        return (weight + other, model(batch["x"]).sum()), None

    (weight, _), _ = jax.lax.scan(body, (1.0, 0.0), None, length=3)
    return jaxpar.Weighted(loss(model, batch), weight)


def metric_by_parameters(model, batch):
    value = jaxpar.Weighted(1.0, model(batch["x"]).sum())
    return loss(model, batch), {"grade/a": value}


ARGUMENTS = {
    "seed over 32 bits": (
        {"seed": 2**40},
        r"seed=1099511627776 must be an integer from 0 to 2\*\*32 - 1",
    ),
    "integer loss": (
        {"loss_fn": lambda model, batch: (model(batch["x"]) > 0).sum()},
        r"loss_fn: the loss is int32, which has no gradient; it must be floating",
    ),
    "parameter of no element": (
        {"model": lambda rngs: Annotated(None, (0, 6)), "loss_fn": of_nothing},
        r"model: parameter w has shape \(0, 6\) and no elements",
    ),
    "more devices than there are": (
        {"mesh": jaxpar.MeshShape(data=16)},
        r"mesh: MeshShape\(data=16, pipe=1, tensor=1\) needs 16 devices, but there are "
        r"8\. Change the shape",
    ),
    "fewer devices than the shape needs": (
        {"devices": jax.devices()[:4]},
        r"mesh: MeshShape\(data=4, pipe=1, tensor=2\) needs 8 devices, but there are 4",
    ),
    "open axis that does not divide": (
        {"mesh": jaxpar.MeshShape(data=-1, tensor=3)},
        r"needs a multiple of 3 devices, but there are 8\. Change the shape",
    ),
    "pipelines": (
        {"mesh": jaxpar.MeshShape(data=2, pipe=2, tensor=2)},
        r"mesh: pipe=2 needs a model that can be cut into stages: give model=jaxpar\."
        r"PipelineModel",
    ),
    "rows do not divide by data x accumulate": (
        {"accumulate": 3},
        r"sample_batch: 16 rows must be a multiple of data x accumulate = 4 x 3 = 12\. "
        r"Change the batch, the mesh or accumulate",
    ),
    "accumulate": (
        {"accumulate": 0},
        r"accumulate=0 must be a positive number of micro-batches",
    ),
    "stage": ({"zero": 4}, r"zero=4 must be 0 \(replicate\), 1 .* or 3"),
    "precision": (
        {"precision": "bf61"},
        r"precision='bf61' must be one of 'fp32', 'bf16', 'fp16'\. Did you mean 'bf16'",
    ),
    "clip_norm": (
        {"clip_norm": 0.0},
        r"clip_norm=0\.0 must be positive, or None for no clipping",
    ),
    "unknown axis": (
        {"rules": {"kernel": P(None, "tenser")}},
        r"rules: 'kernel' maps to 'tenser', which is not a mesh axis\. Use 'tensor', "
        r"'expert' or None\. Did you mean 'tensor'",
    ),
    "rule for a name that the model lacks": (
        {"rules": {"mlp": "tensor"}},
        r"rules: 'mlp' names no dim of any parameter\. Known names: none: the model is "
        r"unannotated\. Correct it or remove it",
    ),
    "rule for a path that the model lacks": (
        {"rules": {"*/kernle": P(None, "tensor")}},
        r"rules: '\*/kernle' matches no parameter\. Known paths: bias, kernel\.",
    ),
    "rule of too many dims": (
        {"rules": {"bias": P(None, "tensor")}},
        r"rules: 'bias' gives P.* to bias, which has 1 dims \(shape \(6,\)\)\. Give at",
    ),
    "logical name that no rule knows": (
        {"model": lambda rngs: Annotated(("embed", "mlpp"))},
        r"rules: the model gives dims names that no rule knows: 'mlpp' \(w; did you "
        r"mean 'mlp'\?\)\. Pass rules=\{'mlpp': None\} to leave those dims unsharded",
    ),
    "more names than dims": (
        {"model": lambda rngs: Annotated((None, None, "mlp"))},
        r"rules: the model names 3 dims of w, .*, but it has 2 \(shape \(4, 6\)\)",
    ),
    "dim that does not divide": (
        {"model": lambda rngs: Annotated((None, "mlp"), (4, 7))},
        r"rules: dim 1 of w \(shape \(4, 7\)\) has 7 elements, which tensor=2 does not "
        r"divide\. Pad the dim to a multiple of 2, change the mesh, or map it to None",
    ),
    "large leaf that cannot be sharded": (
        {"model": lambda rngs: Annotated(None, (513, 513)),
         "loss_fn": lambda model, batch: model.w.sum()},
        r"zero=1: w \(shape \(513, 513\), 1\.0 MiB\) has no dim that data=4 divides, "
        r"so every device would hold all of it\. Pad .*, or pass allow_whole=\('w',\)",
    ),
    "allow_whole that matches nothing": (
        {"allow_whole": ("kernle",)},
        r"allow_whole: 'kernle' matches no parameter; known paths: bias, kernel\. Did "
        r"you mean 'kernel'",
    ),
    "allow_whole as a string": (
        {"allow_whole": "kernel"},
        r"allow_whole='kernel' must be a tuple .*; pass allow_whole=\('kernel',\)",
    ),
    "loss that is no scalar": (
        {"loss_fn": lambda model, batch: model(batch["x"]).mean(1)},
        r"loss_fn: loss has shape \(4,\), but must be a scalar\. Return a mean over "
        r"the examples \(\.mean\(\)\), or jaxpar\.Weighted",
    ),
    "loss that is a list": (
        {"loss_fn": lambda model, batch: [loss(model, batch)]},
        r"loss_fn: loss is \[.*\], but must be a scalar",
    ),
    "no loss": (
        {"loss_fn": lambda model, batch: None},
        r"loss_fn: loss is None, but must be a scalar",
    ),
    "metric that is no scalar": (
        {"loss_fn": lambda model, batch: (loss(model, batch), {"out": jnp.ones(3)})},
        r"loss_fn: out has shape \(3,\), but must be a scalar",
    ),
    "metrics that are no dict": (
        {"loss_fn": lambda model, batch: (loss(model, batch), [1.0])},
        r"loss_fn: it returned a tuple of \(.*, list\), but must return a loss, or "
        r"\(loss, metrics\) with metrics a dict of scalars by name",
    ),
    "logits beside the loss": (
        {"loss_fn": lambda model, batch: (loss(model, batch), model(batch["x"]))},
        r"loss_fn: it returned a tuple of \(float32\[\], float32\[4, 6\]\), but must .*"
        r"Logits and other arrays can't be returned; reduce them to scalars in loss_fn",
    ),
    "three results": (
        {"loss_fn": lambda model, batch: (loss(model, batch), {}, {})},
        r"loss_fn: it returned a tuple of \(.*, dict, dict\), but must return a",
    ),
    "metric of the engine's own name": (
        {"loss_fn": lambda model, batch: (loss(model, batch), {"grad_norm": 1.0})},
        r"loss_fn: metrics \['grad_norm'\] are names of the engine's own metrics "
        r"\(.*\); rename yours",
    ),
    "weight that depends on parameters": (
        {"loss_fn": weight_by_parameters},
        r"loss_fn: the weight of loss depends on the parameters; jaxpar\.Weighted\("
        r"total, weight\) needs a weight computed from the batch alone .* Divide in",
    ),
    "weight that depends on parameters through a scan": (
        {"loss_fn": weight_through_a_scan},
        r"loss_fn: the weight of loss depends on the parameters",
    ),
    "metric whose weight depends on parameters": (
        {"loss_fn": metric_by_parameters},
        r"loss_fn: the weight of grade/a depends on the parameters",
    ),
    "no sample batch": (
        {"sample_batch": None},
        r"sample_batch: rows by leaf are \{\}; every leaf must have the same number of "
        r"rows as its leading dim \(at least one leaf\)",
    ),
    "sample batch of different rows": (
        {"sample_batch": sample() | {"y": np.ones(8)}},
        r"sample_batch: rows by leaf are \{'x': 16, 'y': 8\}; every leaf must have",
    ),
    "sample batch of lists": (
        {"sample_batch": {"x": sample()["x"].tolist()}},
        r"sample_batch: leaf x is a list of numbers, not an array; convert it with np",
    ),
    "integer parameter": (
        {"model": Counted},
        r"model: parameter count is int32, but a parameter must be floating to be "
        r"trained\. Make it another kind of nnx\.Variable, or put it into another Lin",
    ),
    "no parameter": (
        {"model": lambda rngs: nnx.Dropout(0.5, rngs=rngs)},
        r"model: it has no parameters to train \(nnx\.Param, or Linen's params\)",
    ),
}  # fmt: skip

MODELS = {
    "loss of other arguments": (
        {"loss_fn": lambda model, batch, rng: loss(model, batch)},
        r"loss_fn: it takes rng besides \(model, batch\); it may take key, step and "
        r"training by these names\. Put other values in the batch",
    ),
    "model already made": (
        {"model": nnx.Linear(4, 6, rngs=nnx.Rngs(0))},
        r"model=Linear\(\.\.\.\) is already made, on one device; pass a factory",
    ),
    "no model": ({"model": None}, r"model=None must be an NNX factory \(lambda rngs: "),
    "factory of a Linen module": (
        {"model": lambda rngs: nn.Dense(6)},
        r"model: the factory returned Dense, which is not an nnx\.Module; return one",
    ),
    "factory without an argument": (
        {"model": lambda: nnx.Linear(4, 6, rngs=nnx.Rngs(0))},
        r"model: the factory takes no argument, but is called with one, rngs\. Pass "
        r"model=lambda rngs: MyModel\(\.\.\., rngs=rngs\)",
    ),
    "class that takes more": (
        {"model": nnx.Linear},
        r"model: the factory takes in_features, out_features, rngs, but is called with",
    ),
    "keyword by another name": (
        {"model": lambda *, keys: linear(keys)},
        r"model: the factory takes keys, but is called with one, rngs",
    ),
    "Linen model that is not called": (
        {"model": nn.Dense(6), "loss_fn": lambda model, batch: batch["x"].mean()},
        r"loss_fn: it never called model\(\.\.\.\), so a Linen model cannot be init",
    ),
}


@pytest.mark.parametrize("case", ARGUMENTS)
def test_wrong_argument_is_said_before_anything_compiles(case, compiled):
    change, message = ARGUMENTS[case]
    with pytest.raises(ValueError, match=message):
        make_engine(**change)
    assert compiled == []


@pytest.mark.parametrize("case", MODELS)
def test_wrong_model_is_said_before_anything_compiles(case, compiled):
    change, message = MODELS[case]
    with pytest.raises(TypeError, match=message):
        make_engine(**change)
    assert compiled == []


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"optimizer": optax.adamw}, TypeError,
         r"optimizer=<function adamw.*> must be an optax transformation, with init "
         r"and update, or .*; call its factory, as in optax\.adamw\(1e-3\)"),
        ({"mesh": "4x2"}, TypeError, r"mesh='4x2' must be a jaxpar\.MeshShape, such"),
        ({"precision": jnp.bfloat16}, ValueError, "precision=.*bfloat16.* must be one"),
        ({"zero": 3.0}, ValueError, r"zero=3\.0 must be 0 \(replicate\), 1"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else None,
)  # fmt: skip
def test_argument_of_a_wrong_type_is_said_too(
    change, error, message, compiled, unchecked_types
):
    with pytest.raises(error, match=message):
        make_engine(**change)
    assert compiled == []


def test_devices_beside_a_mesh_are_refused(compiled):
    mesh = jaxpar.make_mesh(RIGHT["mesh"])
    message = (
        r"devices: mesh= is already a mesh of 8 devices\. Pass a jaxpar\.MeshShape "
        r"with devices=, or the mesh alone"
    )
    with pytest.raises(ValueError, match=message):
        make_engine(**{"mesh": mesh, "devices": jax.devices()})
    assert compiled == []


def masked_loss(model, batch):
    """A weight out of the same scan as the total, and independent of parameters."""

    def body(carry, row):
        total, weight = carry
        kept = (row.sum() > 0).astype(jnp.float32)
        return (total + kept * model(row).sum(), weight + kept), None

    (total, weight), _ = jax.lax.scan(body, (0.0, 0.0), batch["x"])
    return jaxpar.Weighted(total, weight), {"kept": jaxpar.Weighted(weight, 4)}


def test_weight_of_the_batch_alone_is_taken():
    make_engine(**{"loss_fn": masked_loss})


def test_large_leaf_may_be_allowed_whole():
    engine = make_engine(
        **{
            "model": lambda rngs: Annotated(None, (513, 513)),
            "loss_fn": lambda model, batch: model.w.sum(),
            "allow_whole": ("w",),
        }
    )
    (row,) = (x for x in engine.explain().leaves if x.name == "params/w")
    assert row.bytes_per_device == 513 * 513 * 4
    assert "replicated over data: 4 divides no dim" in row.why
