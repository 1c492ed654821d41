"""Are documents found again in bytes, with what of them is learned?"""

import tracemalloc

import numpy as np
import pytest

from jaxpar.data import Tokens
from jaxpar.data.documents import TextSpan
from jaxpar.data.text_documents import chunks, documents_of, require_bytes


def text(content: bytes, **known: object) -> Tokens:
    return Tokens((np.frombuffer(content, np.uint8),), ("a",), 256, **known)


def spans(tokens: Tokens, **how: object) -> list[list[TextSpan]]:
    return [[*document.spans] for document in documents_of(tokens, **how)]


def test_documents_begin_at_their_starts():
    tokens = text("one größer".encode(), starts=np.array([0, 4]))
    assert spans(tokens) == [[TextSpan("one ")], [TextSpan("größer")]]
    assert spans(tokens, ends=True) == [
        [TextSpan("one ", ends=True)],
        [TextSpan("größer", ends=True)],
    ]
    assert all(each.is_heldout for each in documents_of(tokens, is_heldout=True))


def test_text_without_starts_is_one_document():
    assert spans(text(b"one")) == [[TextSpan("one")]]


def test_end_is_a_token_and_not_text():
    tokens = text(b"one\0two", starts=np.array([0, 4]), end_id=0)
    assert spans(tokens) == [[TextSpan("one", ends=True)], [TextSpan("two")]]


def test_what_is_learned_is_found_again():
    content = b"ask\nanswer\0again?yes\0"
    mask = np.array([0] * 4 + [1] * 7 + [0] * 6 + [1] * 4, np.uint8)
    (document,) = spans(text(content, loss_mask=mask, end_id=0))
    assert document == [
        TextSpan("ask\n", is_learned=False),
        TextSpan("answer", ends=True),
        TextSpan("again?", is_learned=False),
        TextSpan("yes", ends=True),
    ]


def test_long_documents_are_cut_before_line_breaks():
    lines = "def f(x):\n    return 'größer'\n\n" * 20_000
    found = [*chunks(text(lines.encode()))]
    assert "".join(found) == lines
    assert len(found) > 4
    assert all(chunk[0] == "\n" and not chunk[-1].isspace() for chunk in found[1:-1])


def test_line_longer_than_a_chunk_keeps_its_characters():
    line = "x" + "π" * 200_000
    assert "".join(chunks(text(line.encode()))) == line
    assert "".join(chunks(text(b"ab\xcf"))) == "ab\ufffd"


def test_bytes_that_are_done_are_counted():
    done = []
    tokens = text(b"one two", starts=np.array([0, 4]))
    assert len([*documents_of(tokens, advance=done.append)]) == 2
    assert done == [4, 3]


def test_ids_are_not_bytes():
    with pytest.raises(ValueError, match=r"'a\.bin' holds uint16 ids, not bytes"):
        require_bytes(Tokens((np.arange(5, dtype=np.uint16),), ("a.bin",)))


def test_many_documents_take_no_memory_before_they_are_read():
    num = 1 << 18
    text = Tokens((np.zeros(num, np.uint8),), ("a",), starts=np.arange(num))
    tracemalloc.start()
    next(documents_of(text))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1e6
