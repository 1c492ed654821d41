"""Is what the benchmark plans Megatron's table: its models, meshes and operations?"""

import jax
import jax.numpy as jnp
import pytest

from benchmarks.plan_megatron import GPUS_PER_HOST, ROWS, Row, choices
from jaxpar.models import make_decoder
from jaxpar.models.decoder.presets import decoder_config

# teraFLOP/s of a GPU in % of its peak, and petaFLOP/s of all
PUBLISHED = {
    "1.7b": (44, 4.4),
    "3.6b": (44, 8.8),
    "7.5b": (46, 18.2),
    "18.4b": (43, 34.6),
    "39.1b": (44, 70.8),
    "76.1b": (45, 143.8),
    "145.6b": (47, 227.1),
    "310.1b": (50, 297.4),
    "529.6b": (52, 410.2),
    "1008b": (52, 502.0),
}


@pytest.fixture(params=ROWS, ids=lambda row: row.model)
def row(request) -> Row:
    return request.param


def test_model_has_the_tables_parameters(row):
    config = decoder_config(row.model)
    tokens = jax.ShapeDtypeStruct((1, 2), jnp.int32)
    params = jax.eval_shape(lambda: make_decoder(config).init(0, tokens).params)
    count = sum(leaf.size for leaf in jax.tree.leaves(params))
    tolerance = 0.01 * row.billions if row.model == "1008b" else 0.05
    assert count / 1e9 == pytest.approx(row.billions, abs=tolerance)


def test_speed_is_the_tables_in_percent_and_in_all(row):
    percent, petaflops = PUBLISHED[row.model]
    # 142 of 312 is 45.5, which the table rounds up.
    assert 100 * row.measured == pytest.approx(percent, abs=0.6)
    assert row.gpus * row.teraflops / 1e3 == pytest.approx(petaflops, rel=0.01)


def test_mesh_is_of_the_rows_gpus_and_its_layers_and_batch_divide(row):
    mesh = row.mesh
    assert mesh["data"] * mesh["pipe"] * mesh["tensor"] == row.gpus
    assert mesh["pipe"] * mesh["tensor"] == row.model_parallel
    assert mesh["tensor"] <= GPUS_PER_HOST
    assert row.gpus % GPUS_PER_HOST == 0
    assert decoder_config(row.model).num_layers % mesh["pipe"] == 0
    for _, microbatch in choices(row):
        assert row.batch % (mesh["data"] * microbatch) == 0


def test_operations_are_eight_a_parameter_and_token_and_attentions(row):
    """Two forward, four backward, two again; the head's own are not run again."""
    config = decoder_config(row.model)
    tokens = row.batch * config.seq_len
    per_layer = 2 * tokens * config.seq_len * config.width * 2
    attention = 4 * config.num_layers * per_layer
    head = 6 * tokens * config.vocab_size * config.width
    blocks = 12 * config.num_layers * config.width**2
    assert row.flops == pytest.approx(8 * blocks * tokens + attention + head, rel=1e-6)


def test_pipelines_take_single_rows_and_the_state_is_whole_if_it_fits():
    first = {row.model: next(choices(row)) for row in ROWS}
    assert first["18.4b"] == (0, 8)
    assert first["39.1b"] == (0, 1)
    assert list(choices(ROWS[-1])) == [(0, 1), (1, 1)]
