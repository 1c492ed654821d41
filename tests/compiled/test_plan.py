"""Does a plan of a recipe say what the program for its target says?"""

import pytest

from tests.compiled.plans import plan

SMALL = ("--model", "124m", "--precision", "bf16", "--remat", "full")
# Of GPT-2 124M: 12 layers of 12 matrices' worth of 768 x 768, a table of 50,304 rows,
# 1,024 positions; norms and biases (keys have none). Data divides a dim of each.
PSI = 768 * (12 * 12 * 768 + 50_304 + 1024) + 768 * (12 * 12 + 2)


def communicated(found: dict, op: str, axis: str) -> int:
    return sum(
        row["bytes"]
        for row in found["collectives"]
        if (row["op"], row["axis"]) == (op, axis)
    )


@pytest.mark.parametrize(
    "kind",
    [
        "h100",
        *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("a100", "b200")),
    ],
)
def test_every_gpu_that_has_a_file_can_be_planned_for(compiled, kind):
    found = compiled(plan, "pretrain.py", f"{kind}:1x2", "--batch-size", "4")
    assert found["compiled_for"] == "cuda"
    assert found["fits"]
    assert found["estimate"]["step_seconds"] > 0


def test_124m_on_64_gpus_holds_and_moves_what_stage_3_does(compiled):
    flags = (*SMALL, "--batch-size", "64", "--zero", "3")
    found = compiled(plan, "pretrain.py", "h200:8x8", *flags)
    psi = found["num_params"]
    memory = found["bytes_per_device"]
    assert psi == PSI
    assert memory["state"] == pytest.approx(12 * PSI / 64, rel=1e-3)
    assert memory["padding"] == 0
    assert memory["parameters"] + memory["optimizer"] == pytest.approx(
        memory["state"], rel=1e-3
    )
    # The loss needs the head in the forward pass alone.
    expected = 4 * psi - 2 * 50_304 * 768
    gathered = communicated(found, "all-gather", "data")
    assert gathered == pytest.approx(expected, rel=0.05)
    assert communicated(found, "reduce-scatter", "data") == pytest.approx(
        2 * psi, rel=0.05
    )
    tokens = found["tokens_per_step"]
    assert tokens == 64 * 1024
    # 6 operations a parameter and token, with attention's on whole scores; blocks run
    # again, not the head (a third of this model) nor the scores above the diagonal.
    assert 6 < found["model_flops_per_step"] / psi / tokens < 7
    again = found["flops_per_step"] / found["model_flops_per_step"]
    assert 1.12 < again < 1.25
    assert (
        "attention is a call with the bytes and FLOPs of cuDNN's" in (found["notes"][0])
    )
    own = found["estimate"]
    assert own["tokens_per_second"] == pytest.approx(tokens / own["step_seconds"])
    assert 0 < own["mfu"] < 0.8


@pytest.mark.slow
def test_slice_of_tpus_is_planned_with_its_padding(compiled):
    flags = (*SMALL, "--batch-size", "16", "--zero", "1")
    found = compiled(plan, "pretrain.py", "v5e:4x4", *flags)
    assert found["compiled_for"] == "tpu"
    memory = found["bytes_per_device"]
    without = memory["state"] - memory["padding"]
    assert without == pytest.approx(12 * PSI / 16, rel=1e-3)
    assert 0 < memory["padding"] < 0.2 * without
    assert found["device_memory_bytes"] == 16 * 1024**3
    assert "TPUs pad arrays to tiles" in found["notes"][0]


@pytest.mark.slow
def test_pipeline_of_a_recipe_tells_its_bubble(compiled):
    flags = ("--mesh.pipe", "4", "--mesh.data", "2", "--accumulate", "8")
    found = compiled(plan, "pretrain.py", "h200:1x8", *flags, "--batch-size", "16")
    assert found["estimate"]["bubble"] == pytest.approx(3 / (8 + 3))
    assert any("pipe: 1f1b" in note for note in found["notes"])
