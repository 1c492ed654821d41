"""Does `jaxpar hf` say what a folder holds, and move models in and out?"""

import json
import re
from pathlib import Path

import jax
import numpy as np
import optax
import pytest
from safetensors.numpy import load_file

import jaxpar
from jaxpar.cli.main import main
from jaxpar.models.hf.pretrained import from_huggingface
from jaxpar.training.origin import load_parameters
from tests.models.hf.test_pretrained import LLAMA, TOKENS, engine_of, write
from tests.object_server import BUCKET, serving


def test_inspect_says_what_it_is(tmp_path: Path, capsys) -> None:
    folder = write(tmp_path / "model")
    main(["hf", "inspect", str(folder)])
    said = capsys.readouterr().out
    assert "llama" in said
    assert re.search(r"^ num_kv_heads +2 *$", said, re.M), said
    assert "every tensor has its leaf" in said


def test_a_model_goes_in_by_init_from_and_out_again(tmp_path: Path, capsys) -> None:
    folder = write(tmp_path / "model")
    main(["hf", "import", str(folder), str(tmp_path / "imported")])
    assert "begin with it by --init-from" in capsys.readouterr().out
    ours = from_huggingface(folder)
    engine, right = (engine_of(ours, jaxpar.MeshShape(data=2)) for _ in range(2))
    load_parameters(engine, tmp_path / "imported")
    ours.load(right)
    losses = [float(e.evaluate({"tokens": TOKENS})["loss"]) for e in (engine, right)]
    assert losses[0] == losses[1]
    engine.step({"tokens": TOKENS})
    engine.save(tmp_path / "run")
    engine.wait()
    out = tmp_path / "out"
    args = ("--like", str(folder), "--dtype", "float32")
    main(["hf", "export", str(tmp_path / "run"), str(out), *args])
    before, after = (load_file(x / "model.safetensors") for x in (folder, out))
    assert before.keys() == after.keys()
    name = "model.layers.3.mlp.down_proj.weight"
    kernel = engine.state.params["blocks"]["mlp"]["down"]["kernel"]
    np.testing.assert_array_equal(after[name], np.asarray(kernel)[3].T)
    assert np.abs(after[name] - before[name]).max() > 0


@pytest.mark.thorough
def test_a_model_goes_out_of_a_bucket(tmp_path: Path) -> None:
    folder = write(tmp_path / "model")
    engine = engine_of(from_huggingface(folder), jaxpar.MeshShape(data=2))
    with serving():
        for place, out in (
            (f"s3://{BUCKET}/run", "one"),
            (str(tmp_path / "run"), "two"),
        ):
            engine.save(place)
            engine.wait()
            args = ("--like", str(folder), "--dtype", "float32")
            main(["hf", "export", place, str(tmp_path / out), *args])
    one, two = (tmp_path / out / "model.safetensors" for out in ("one", "two"))
    assert one.read_bytes() == two.read_bytes()


def test_a_run_of_another_model_is_refused(tmp_path: Path, capsys) -> None:
    engine = jaxpar.initialize(
        model=jaxpar.models.make_decoder(jaxpar.models.DecoderConfig(num_layers=1)),
        loss_fn=jaxpar.models.decoder_loss,
        optimizer=optax.sgd(0.1),
        sample_batch={"tokens": TOKENS},
        mesh=jaxpar.MeshShape(data=2),
        devices=jax.devices()[:2],
    )
    engine.save(tmp_path / "run")
    engine.wait()
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    given = [str(tmp_path / "run"), str(tmp_path / "out"), "--like", str(tmp_path)]
    with pytest.raises(SystemExit):
        main(["hf", "export", *given])
    assert (
        "the model has 4 of these, but the parameters have 1" in capsys.readouterr().err
    )
