"""Do documents become ids, with their ends, their starts and what is learned?"""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpar.data import encoding
from jaxpar.data.documents import TextSpan
from jaxpar.data.encoding import (
    Document,
    bytes_encoder,
    encode_documents,
    read_tokenizer,
    tokenizer_encoder,
)
from tests.data.tokenizers_of_others import bert_like, byte_level, save

PIECE = st.tuples(st.text(max_size=6), st.booleans(), st.booleans())
DOCUMENT = st.tuples(st.lists(PIECE, max_size=4), st.booleans())


def joined(stream, split: bool) -> tuple[list[int], list[int], list[int]]:
    """(ids, learned, starts) of a split."""
    ids, learned, starts = [], [], []
    for each in stream:
        if each.is_heldout == split:
            starts += [len(ids) + start for start in each.starts]
            ids += each.ids.tolist()
            learned += each.learned.tolist()
    return ids, learned, starts


@settings(max_examples=30)
@given(st.lists(DOCUMENT, max_size=8), st.sampled_from([1, 5, 1 << 20]))
def test_bytes_ends_and_starts_are_those_of_a_plain_loop(content, batch):
    documents = [
        Document([TextSpan(*span) for span in spans], is_heldout)
        for spans, is_heldout in content
    ]
    expected = {False: ([], [], []), True: ([], [], [])}
    for document in documents:
        ids, learned, starts = expected[document.is_heldout]
        before = len(ids)
        for span in document.spans:
            own = [*span.text.encode(), *([0] if span.ends else [])]
            ids += own
            learned += [int(span.is_learned)] * len(own)
        if len(ids) > before:
            starts.append(before)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(encoding, "_BATCH_CHARACTERS", batch)
        stream = [*encode_documents(documents, bytes_encoder())]
    for split, arrays in expected.items():
        assert joined(stream, split) == arrays
    num_bytes = sum(len(p.text.encode()) for d in documents for p in d.spans)
    assert sum(each.num_bytes for each in stream) == num_bytes


def test_tokens_are_the_tokenizers_and_end_with_its_token():
    tokenizer = byte_level("<pad>", "<|endoftext|>")
    encoder = tokenizer_encoder(tokenizer)
    end = tokenizer.token_to_id("<|endoftext|>")
    assert (encoder.end_id, encoder.end.tolist()) == (end, [end])
    documents = [
        Document([TextSpan("A prompt ", False), TextSpan("größer, π", ends=True)]),
        Document([TextSpan("A little story", ends=True)]),
    ]
    ids, learned, starts = joined(encode_documents(documents, encoder), False)
    texts = [tokenizer.encode(text).ids for text in ("A prompt ", "größer, π")]
    story = tokenizer.encode("A little story").ids
    assert ids == [*texts[0], *texts[1], end, *story, end]
    assert learned == [0] * len(texts[0]) + [1] * (len(ids) - len(texts[0]))
    assert starts == [0, len(texts[0]) + len(texts[1]) + 1]


def test_tokenizer_without_an_end_ends_documents_with_a_line_break():
    tokenizer = byte_level()
    encoder = tokenizer_encoder(tokenizer)
    assert encoder.end_id is None
    assert tokenizer.decode(encoder.end.tolist()) == "\n"


def test_named_token_ends_documents():
    tokenizer = byte_level("<|endoftext|>", "<turn>")
    assert tokenizer_encoder(tokenizer, "<turn>").end_id == 1
    with pytest.raises(ValueError, match=r"eos_token='<no>' is not a token of the tok"):
        tokenizer_encoder(tokenizer, "<no>")


def test_texts_are_not_cut_padded_or_surrounded():
    tokenizer = bert_like()
    encoder = tokenizer_encoder(tokenizer)
    (long, short) = encoder.encode(["A little story , number " * 3, "story"])
    assert len(long) == 15
    assert tokenizer.decode(short.tolist()) == "story"


@pytest.mark.parametrize(("size", "dtype"), [(300, "uint16"), (70_000, "uint32")])
def test_ids_have_the_smallest_dtype_for_the_vocabulary(size, dtype):
    tokenizer = byte_level()
    tokenizer.add_tokens([f"<{number}>" for number in range(size - 300)])
    encoder = tokenizer_encoder(tokenizer)
    assert encoder.dtype == encoder.encode(["text"])[0].dtype == np.dtype(dtype)
    assert encoder.vocab_size == max(tokenizer.get_vocab().values()) + 1


def test_end_of_bytes_is_one_byte():
    assert bytes_encoder().end.tolist() == [0]
    assert bytes_encoder("\n").end_id == ord("\n")
    with pytest.raises(ValueError, match="eos_token='<eos>' must be one byte where"):
        bytes_encoder("<eos>")


@pytest.mark.parametrize("named", ["<turn>", {"content": "<turn>", "lstrip": False}])
def test_config_beside_a_tokenizer_names_its_end(tmp_path, named):
    path = save(byte_level("<|endoftext|>", "<turn>"), tmp_path, eos_token=named)
    tokenizer, end = read_tokenizer(path)
    assert (tokenizer.token_to_id("<turn>"), end) == (1, "<turn>")


def test_tokenizer_without_a_config_names_none(tmp_path):
    assert read_tokenizer(save(byte_level(), tmp_path))[1] is None


@pytest.mark.parametrize(
    ("content", "error", "said"),
    [
        (None, FileNotFoundError, "is not a file; give the tokenizer.json"),
        ("not JSON", ValueError, "is not JSON"),
        ('{"vocab": {}}', ValueError, 'has no "model", so it is not of the tokenizers'),
    ],
)
def test_file_that_is_no_tokenizer_is_refused(tmp_path, content, error, said):
    path = tmp_path / "tokenizer.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(error, match=said):
        read_tokenizer(path)
