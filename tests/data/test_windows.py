import numpy as np
import pytest

from jaxpar.data import Loader, RowSource, Tokens, Windows


def make_tokens(length: int = 17, **given: np.ndarray) -> Tokens:
    return Tokens((np.arange(length, dtype=np.uint16),), ("counting",), **given)


def test_windows_overlap_by_one_token():
    windows = Windows(make_tokens(), seq_len=5)
    assert isinstance(windows, RowSource)
    assert len(windows) == 3
    rows = windows.read([2, 0])
    assert rows["tokens"].tolist() == [list(range(10, 16)), list(range(6))]
    assert rows["tokens"].dtype == np.int32
    assert windows.description == "17 tokens, 3 windows of seq_len=5"


def test_loss_mask_weighs_targets():
    mask = np.random.default_rng(0).integers(0, 2, 17, dtype=np.uint8)
    windows = Windows(make_tokens(loss_mask=mask), seq_len=5)
    weights = windows.read([0, 2])["weights"]
    assert weights.dtype == np.float32
    assert weights.tolist() == [mask[1:6].tolist(), mask[11:16].tolist()]
    batch = Loader(windows, batch_size=2).sample_batch
    assert {name: (x.shape, x.dtype) for name, x in batch.items()} == {
        "tokens": ((2, 6), np.int32),
        "weights": ((2, 5), np.float32),
    }


def test_identity_is_of_the_tokens_and_the_mask():
    mask = np.ones(17, np.uint8)
    plain = Windows(make_tokens(), seq_len=5).identity()
    assert plain == {
        "seq_len": 5,
        "num_tokens": 17,
        "sha256": make_tokens().sha256,
    }
    masked = Windows(make_tokens(loss_mask=mask), seq_len=5).identity()
    other = Windows(make_tokens(loss_mask=mask * 0), seq_len=5).identity()
    assert len({each["sha256"] for each in (plain, masked, other)}) == 3


def test_corpus_without_a_window_raises():
    with pytest.raises(
        ValueError, match="17 tokens, but a window of seq_len=17 has 18"
    ):
        Windows(make_tokens(), seq_len=17)
