"""Does `jaxpar layout` show the pattern that its flags make?"""

import pytest

from jaxpar.cli.main import main
from jaxpar.sparse_attention import Fixed, make_layout


def shown(capsys: pytest.CaptureFixture, *args: str) -> str:
    main(["layout", *args])
    return capsys.readouterr().out


@pytest.mark.parametrize(
    ("args", "share"),
    [
        # Of 4 x 4 blocks; a causal window sees the diagonal, and the one before it.
        (("dense", "--attention", "bidirectional"), 16 / 16),
        (("sliding",), 7 / 16),
        (("longformer", "--global-block-indices", "0"), 14 / 16),
    ],
)
def test_layout_of_each_pattern_is_drawn_with_its_share(capsys, args, share) -> None:
    text = shown(capsys, "--seq-len", "64", *args, "--num-heads", "1")
    assert f"{share:.1%}" in text, text


def test_picture_is_drawn_into_its_file_and_only_where_asked(
    capsys, tmp_path, monkeypatch
) -> None:
    drawn = []
    monkeypatch.setattr("jaxpar.show.sparse_attention.draw", lambda *a: drawn.append(a))
    args = ("fixed", "--num-heads", "2", "--num-local-blocks", "2")
    shown(capsys, "--seq-len", "64", *args)
    assert drawn == []
    file = tmp_path / "layout.png"
    shown(capsys, "--seq-len", "64", "--head", "1", "--png", str(file), *args)
    layout = make_layout(Fixed(2, num_local_blocks=2), 64)
    assert drawn == [(layout, 1, file)]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--seq-len", "63", "dense", "--num-heads", "1"), "seq_len=63"),
        (("--seq-len", "64", "sliding", "--num-heads", "0"), "num_heads=0: must be 1"),
        (
            ("--head", "2", "--seq-len", "64", "dense", "--num-heads", "2"),
            "head",
        ),
    ],
)
def test_what_can_not_be_shown_says_why(capsys, args, message) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["layout", *args])
    assert stopped.value.code == 2
    assert message in " ".join(capsys.readouterr().err.split())
