"""Is a row's document what its form says, and a row of no form refused?"""

import pytest

from jaxpar.data.documents import BadRowError, Fields, TextSpan


def parts(spans: list[TextSpan]) -> list[tuple[str, bool, bool]]:
    return [(span.text, span.is_learned, span.ends) for span in spans]


def message(role: str, content: object) -> dict[str, object]:
    return {"role": role, "content": content}


def test_text_is_learned_and_ended():
    row = {"id": 1, "text": "Once.", "messages": None}
    assert parts(Fields().document(row)) == [("Once.", True, True)]
    assert Fields().document({"text": ""}) == []
    assert parts(Fields("story").document({"story": "x"})) == [("x", True, True)]


@pytest.mark.parametrize("answer", ["completion", "response"])
def test_prompt_is_not_learned_and_its_answer_is(answer):
    row = {"prompt": "1 + 1?", answer: "2"}
    assert parts(Fields().document(row)) == [
        ("1 + 1?\n", False, False),
        ("2", True, True),
    ]


@pytest.mark.parametrize(
    ("prompt", "answer"), [("1 + 1 =", " 2"), ("1 + 1 = ", "2"), ("", "2")]
)
def test_white_space_between_prompt_and_answer_stays(prompt, answer):
    first, second = Fields().document({"prompt": prompt, "completion": answer})
    assert (first.text, second.text) == (prompt, answer)


def test_fields_of_prompt_and_answer_may_be_named():
    row = {"text": "no", "question": "q", "reply": "r"}
    spans = Fields(prompt="question", answer="reply").document(row)
    assert [span.text for span in spans] == ["q\n", "r"]


CHAT = [
    message("system", "Be short."),
    message("user", "1 + 1?"),
    message("assistant", "2"),
    message("user", "And 3?"),
    message("assistant", "5"),
]
WRITTEN = [
    ("<|system|>\n", False, False),
    ("Be short.", False, False),
    ("\n<|user|>\n", False, False),
    ("1 + 1?", False, False),
    ("\n<|assistant|>\n", False, False),
    ("2", True, True),
    ("\n<|user|>\n", False, False),
    ("And 3?", False, False),
    ("\n<|assistant|>\n", False, False),
    ("5", True, True),
]


def test_messages_are_written_by_the_template():
    assert parts(Fields().document({"messages": CHAT, "prompt": "1 + 1?"})) == WRITTEN


def test_messages_as_columns_are_the_same():
    columns = {name: [each[name] for each in CHAT] for name in ("role", "content")}
    assert parts(Fields().document({"messages": columns})) == WRITTEN


def test_conversation_that_the_user_ends_is_ended_too():
    last = Fields().document({"messages": CHAT[:4]})[-1]
    assert (last.text, last.is_learned, last.ends) == ("And 3?", False, True)


@pytest.mark.parametrize(
    "row",
    [
        {"text": ""},
        {"prompt": "q", "completion": ""},
        {"prompt": "", "response": ""},
        {"messages": [message("user", "q"), message("assistant", "")]},
    ],
)
def test_row_without_anything_to_learn_is_empty(row):
    assert Fields().document(row) == []


def test_one_answer_is_enough():
    spans = Fields().document({"messages": [*CHAT, message("assistant", "")]})
    assert parts(spans)[-1] == ("", True, True)


@pytest.mark.parametrize(
    ("row", "said"),
    [
        (
            {"body": "x", "id": 1},
            r"has the fields 'body', 'id', not 'text' or 'messages' or 'prompt' with "
            r"'completion' or 'prompt' with 'response'; name the field of .*text-field",
        ),
        ({}, "has the fields none, not 'text'"),
        ({"text": None}, "'text' must be text, but is missing or null"),
        ({"text": 3.5}, "'text' must be text, but is a number"),
        ({"text": {}}, "'text' must be text, but is an object"),
        ({"text": "\ud800"}, "'text' is not Unicode text"),
        ({"prompt": "x", "completion": ["y"]}, "'completion' must be .* is a list"),
        ({"messages": "x"}, "'messages' must be a list of messages, but is text"),
        ({"messages": []}, "'messages' must be a list of messages, but is empty"),
        (
            {"messages": [None]},
            r"messages\[0\] must have a role and a content, but is m",
        ),
        ({"messages": [{"role": "user"}]}, r"messages\[0\].content' must be text"),
        ({"messages": CHAT[:2]}, "has no message of the role 'assistant'"),
    ],
)
def test_row_that_is_no_document_says_why(row, said):
    with pytest.raises(BadRowError, match=said):
        Fields().document(row)


def test_missing_field_is_the_one_that_was_named():
    with pytest.raises(BadRowError, match="has the fields 'text', not 'q' with 'a'"):
        Fields(prompt="q", answer="a").of(["text"])


@pytest.mark.parametrize("names", [{"prompt": "q"}, {"answer": "a"}])
def test_prompt_without_an_answer_raises(names):
    with pytest.raises(ValueError, match=r"give the fields of both \(--prompt-"):
        Fields(**names)
