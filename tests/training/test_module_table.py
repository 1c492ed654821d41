"""Do the rows of a model add up to what is known of all of it?"""

import io

import jax
import numpy as np
import optax
import pytest
from rich.console import Console

import jaxpar
from jaxpar.compiled.hlo import parse
from jaxpar.models import DecoderConfig, decoder_loss, make_decoder
from jaxpar.models.decoder.config import num_params
from jaxpar.planner.work import memory_traffic
from jaxpar.training.module_table import as_json, as_table, read_modules

CONFIG = DecoderConfig(
    num_layers=3, num_heads=2, width=32, seq_len=16, tied_embedding=False
)
ROWS = 8


@pytest.fixture(scope="module")
def engine():
    return jaxpar.initialize(
        model=make_decoder(CONFIG),
        loss_fn=decoder_loss,
        optimizer=optax.adamw(1e-3),
        sample_batch={"tokens": jax.ShapeDtypeStruct((ROWS, 17), np.int32)},
        mesh=jaxpar.make_mesh(jaxpar.MeshShape(data=2), jax.devices()[:2]),
        zero=3,
    )


@pytest.fixture(scope="module")
def rows(engine):
    return read_modules(engine).rows()


def test_rows_add_up_to_the_step(engine, rows):
    rows = {row.path: row for row in rows}
    tops = [row for path, row in rows.items() if len(path) == 1]
    assert sum(row.parameters for row in tops) == num_params(CONFIG)
    # The backward pass computes attention's scores again.
    scores = CONFIG.num_layers * 2 * ROWS * 16 * 16 * CONFIG.width
    # The gradient of positions is a matmul with ones.
    ones = 2 * ROWS * 16 * CONFIG.width
    expected = 3 * engine.spec.forward_flops + scores + ones
    assert sum(row.flops for row in tops) == expected
    moved = memory_traffic(parse(engine.lower().compile().as_text() or ""))
    assert sum(row.bytes for row in tops) == moved.products + moved.others
    assert rows["blocks", "mlp"].count == 3
    tokens, width = ROWS * 16, CONFIG.width
    assert rows["blocks", "mlp"].flops == 3 * 3 * 2 * tokens * 8 * width**2
    assert rows["head",].flops == 3 * 2 * tokens * width * CONFIG.vocab_size
    by_path = {row["path"]: row for row in as_json(list(rows.values()))}
    assert by_path["blocks/mlp"]["flops"] == rows["blocks", "mlp"].flops


def test_table_shows_modules_to_a_depth(rows):
    def shown(depth: int) -> list[str]:
        console = Console(file=io.StringIO(), width=100)
        console.print(as_table(rows, depth=depth))
        assert isinstance(console.file, io.StringIO)
        return [" ".join(x.split()) for x in console.file.getvalue().splitlines()]

    assert any(line.startswith("mlp x 3 ") for line in shown(2))
    assert not any(line.startswith("up x 3 ") for line in shown(2))
    assert any(line.startswith("up x 3 ") for line in shown(3))
