import io
import json
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from jaxpar.training.metrics import MetricsLogger, read_metrics
from jaxpar.training.writers import TensorBoard


def shown(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def write_lines(folder, *lines: str) -> None:
    (folder / "metrics.jsonl").write_text("".join(lines))


def steps(folder) -> list[int]:
    return [record["step"] for record in read_metrics(folder / "metrics.jsonl")]


def test_line_is_one_json_object_of_floats(tmp_path, clock):
    with MetricsLogger(tmp_path / "new" / "run", console=False) as logger:
        logger.log(1, {"train/loss": jnp.float32(0.5), "train/skipped": 0})
        logger.log(2, {"train/loss": jnp.bfloat16(2), "grad_norm": np.float64(1.5)})
        clock.now += 1
    text = (tmp_path / "new" / "run" / "metrics.jsonl").read_text()
    assert text == (
        '{"step": 1, "time": 1000.0, "train/loss": 0.5, "train/skipped": 0.0}\n'
        '{"step": 2, "time": 1001.0, "train/loss": 2.0, "grad_norm": 1.5}\n'
    )


def test_step_is_written_once_the_next_is_logged(tmp_path):
    with MetricsLogger(tmp_path, console=False) as logger:
        logger.log(1, {"train/loss": 1.0})
        assert steps(tmp_path) == []
        logger.log(2, {"train/loss": 1.0})
        assert steps(tmp_path) == [1]
        logger.flush()
        assert steps(tmp_path) == [1, 2]
        logger.flush()
        logger.log(3, {"train/loss": 1.0})
    assert steps(tmp_path) == [1, 2, 3]


def test_newest_step_is_not_waited_for(tmp_path, monkeypatch):
    read = []
    real = jax.device_get
    monkeypatch.setattr(jax, "device_get", lambda tree: read.append(tree) or real(tree))
    first, second = {"train/loss": jnp.float32(1)}, {"train/loss": jnp.float32(2)}
    with MetricsLogger(tmp_path, console=False) as logger:
        logger.log(1, first)
        assert read == []
        logger.log(2, second)
        assert read == [first]
    assert read == [first, second]


def test_metrics_of_one_step_share_a_record(tmp_path):
    with MetricsLogger(tmp_path, console=False) as logger:
        logger.log(1, {"train/loss": 1.0})
        logger.log(1, {"eval/loss": 2.0})
        logger.log(2, {"train/loss": 0.5})
    first, second = read_metrics(tmp_path / "metrics.jsonl")
    assert (first["step"], first["train/loss"], first["eval/loss"]) == (1, 1.0, 2.0)
    assert "eval/loss" not in second


def test_later_change_of_the_mapping_is_not_seen(tmp_path):
    metrics = {"train/loss": 1.0}
    with MetricsLogger(tmp_path, console=False) as logger:
        logger.log(1, metrics)
        metrics["train/loss"] = 2.0
    assert read_metrics(tmp_path / "metrics.jsonl")[0]["train/loss"] == 1.0


def refuse(word: str) -> float:
    raise AssertionError(f"{word} is not JSON")


@given(st.lists(st.floats() | st.floats(width=32), min_size=1, max_size=4))
def test_any_float_comes_back_through_valid_json(tmp_path_factory, values):
    folder = tmp_path_factory.mktemp("run")
    with MetricsLogger(folder, console=False) as logger:
        for step, value in enumerate(values):
            logger.log(step, {"train/value": value})
    for line in (folder / "metrics.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=refuse)
    read = [record["train/value"] for record in read_metrics(folder / "metrics.jsonl")]
    assert all(isinstance(value, float) for value in read)
    np.testing.assert_array_equal(read, values)


def test_non_finite_numbers_are_strings(tmp_path):
    with MetricsLogger(tmp_path, console=False) as logger:
        logger.log(1, {"x/a": jnp.nan, "x/b": -jnp.inf, "x/c": jnp.float32(jnp.inf)})
    record = json.loads((tmp_path / "metrics.jsonl").read_text())
    assert (record["x/a"], record["x/b"], record["x/c"]) == (
        "nan",
        "-inf",
        "inf",
    )
    (record,) = read_metrics(tmp_path / "metrics.jsonl")
    assert math.isnan(record["x/a"])
    assert (record["x/b"], record["x/c"]) == (-math.inf, math.inf)


def test_append_drops_what_happens_again(tmp_path):
    with MetricsLogger(tmp_path, console=False) as logger:
        for step in range(1, 6):
            logger.log(step, {"train/loss": 1.0})
    with MetricsLogger(tmp_path, console=False, append=True, resume_at=3) as logger:
        assert steps(tmp_path) == [1, 2, 3]
        logger.log(4, {"train/loss": 9.0})
    records = read_metrics(tmp_path / "metrics.jsonl")
    assert [record["step"] for record in records] == [1, 2, 3, 4]
    assert records[-1]["train/loss"] == 9.0
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_append_without_a_resume_point_keeps_all(tmp_path):
    write_lines(tmp_path, '{"step": 1}\n', '{"step": 2}\n')
    with MetricsLogger(tmp_path, console=False, append=True) as logger:
        logger.log(3, {"train/loss": 1.0})
    assert steps(tmp_path) == [1, 2, 3]


def test_append_to_nothing_starts_a_file(tmp_path):
    with MetricsLogger(tmp_path, console=False, append=True, resume_at=0) as logger:
        logger.log(1, {"train/loss": 1.0})
    assert steps(tmp_path) == [1]


@pytest.mark.parametrize("torn", ['{"step": 2, "lo', "{", "\0\0", '{"step": 2.'])
def test_line_cut_short_is_dropped_with_a_warning(tmp_path, torn):
    write_lines(tmp_path, '{"step": 1}\n', torn)
    with pytest.warns(UserWarning, match=r"metrics\.jsonl: the last line was trunc"):
        assert steps(tmp_path) == [1]
    with (
        pytest.warns(UserWarning, match="the last line was truncated"),
        MetricsLogger(tmp_path, console=False, append=True) as logger,
    ):
        logger.log(2, {"train/loss": 1.0})
    assert steps(tmp_path) == [1, 2]


def test_whole_last_line_without_its_end_is_kept(tmp_path):
    write_lines(tmp_path, '{"step": 1}\n', '{"step": 2}')
    with MetricsLogger(tmp_path, console=False, append=True) as logger:
        logger.log(3, {"train/loss": 1.0})
    assert steps(tmp_path) == [1, 2, 3]


def test_crash_while_resuming_keeps_the_old_file(tmp_path, monkeypatch):
    write_lines(tmp_path, '{"step": 1}\n', '{"step": 2}\n')

    def fail(_):
        raise OSError("no space")

    monkeypatch.setattr("os.fsync", fail)
    with pytest.raises(OSError, match="no space"):
        MetricsLogger(tmp_path, console=False, append=True, resume_at=1)
    assert steps(tmp_path) == [1, 2]


def test_other_line_that_is_no_record_raises(tmp_path):
    write_lines(tmp_path, '{"step": 1}\n', "[2]\n", '{"step": 3}\n')
    message = r"metrics\.jsonl: line 2 is not a record of metrics: b'\[2\]'; repair"
    with pytest.raises(ValueError, match=message):
        read_metrics(tmp_path / "metrics.jsonl")
    with pytest.raises(ValueError, match=message):
        MetricsLogger(tmp_path, console=False, append=True)


def test_folder_of_another_run_raises_and_is_left_alone(tmp_path):
    write_lines(tmp_path, '{"step": 1}\n')
    with pytest.raises(
        FileExistsError, match=f"folder: '{re.escape(str(tmp_path))}' holds .* append="
    ):
        MetricsLogger(tmp_path, console=False)
    assert steps(tmp_path) == [1]


def test_resume_point_without_append_raises(tmp_path):
    with pytest.raises(ValueError, match="resume_at=3 needs append=True"):
        MetricsLogger(tmp_path, console=False, resume_at=3)


@pytest.mark.parametrize("name", ["step", "time"])
def test_reserved_name_raises(tmp_path, name):
    with (
        MetricsLogger(tmp_path, console=False) as logger,
        pytest.raises(ValueError, match=f"metrics: '{name}' is a field of every"),
    ):
        logger.log(1, {name: 1.0})


def test_metric_that_is_no_scalar_raises(tmp_path):
    with (
        MetricsLogger(tmp_path, console=False) as logger,
        pytest.raises(ValueError, match=r"metrics: 'train/loss' has shape \(2,\), but"),
    ):
        logger.log(1, {"train/loss": jnp.zeros(2)})


def test_log_after_close_raises(tmp_path):
    logger = MetricsLogger(tmp_path, console=False)
    logger.close()
    logger.close()
    with pytest.raises(ValueError, match="step 1 was logged after close"):
        logger.log(1, {"train/loss": 1.0})


def test_error_in_the_run_still_writes_the_last_step(tmp_path, terminal):
    def run():
        with MetricsLogger(tmp_path, console=terminal) as logger:
            logger.log(1, {"train/loss": 1.0})
            raise RuntimeError("the run broke")

    with pytest.raises(RuntimeError, match="the run broke"):
        run()
    assert steps(tmp_path) == [1]
    assert shown(terminal).endswith("\x1b[?25h")


def test_other_processes_write_nothing(tmp_path, monkeypatch, terminal):
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    folder = tmp_path / "run"
    with MetricsLogger(folder, console=terminal, writers=[TensorBoard()]) as logger:
        logger.log(1, {"train/loss": 1.0})
        logger.flush()
        assert logger.tokens_per_second is None
    assert not folder.exists()
    assert shown(terminal) == ""


def test_older_file_is_read_under_todays_names(tmp_path):
    write_lines(
        tmp_path,
        '{"step": 1, "time": 1.0, "loss": 2.0, "heldout_loss": "nan", "hits": 3.0, '
        '"data_seconds_max": 0.5, "train/new": 1.0}\n',
    )
    (record,) = read_metrics(tmp_path / "metrics.jsonl")
    assert math.isnan(record.pop("eval/loss"))
    assert record == {
        "step": 1,
        "time": 1.0,
        "train/loss": 2.0,
        "train/hits": 3.0,
        "workers/data_seconds_max": 0.5,
        "train/new": 1.0,
    }
