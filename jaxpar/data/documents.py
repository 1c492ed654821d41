"""What does a row of a dataset say? A text, or a prompt and its answer, or messages.

A document is spans of text, of which some are to be learned. A text is one span. A
prompt is not learned, its answer and the end of it are; a line break is put between
them where neither has white space. Messages are written as

    <|user|>
    What is 1 + 1?
    <|assistant|>
    2

of which the contents of "assistant", and the end after each, are learned.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

ANSWERS = ("completion", "response")
MESSAGES = "messages"


class BadRowError(ValueError):
    """A row is not a document."""


@dataclasses.dataclass(frozen=True)
class TextSpan:
    """A part of a document.

    Attributes:
      text: as it is encoded.
      is_learned: whether its tokens, and the end after it, are to be learned.
      ends: whether the token that ends a document follows.
    """

    text: str
    is_learned: bool = True
    ends: bool = False


@dataclasses.dataclass(frozen=True)
class Fields:
    """Where in a row a document is: the first of these forms that the row has.

    Attributes:
      text: the field of a text. Messages are in the field "messages".
      prompt: the field of a prompt; None for "prompt", where the row has neither a text
        nor messages.
      answer: the field of its answer; None for "completion" or "response".
    """

    text: str = "text"
    prompt: str | None = None
    answer: str | None = None

    def __post_init__(self):
        if (self.prompt is None) != (self.answer is None):
            raise ValueError(
                f"prompt={self.prompt!r} and answer={self.answer!r}: give the fields "
                "of both (--prompt-field, --answer-field), or neither."
            )

    def of(self, names: Sequence[str]) -> tuple[str, ...]:
        """Choose the fields of a document among those of a row.

        Args:
          names: the row's fields.

        Returns:
          The field of a text or of messages, or those of a prompt and of its answer.

        Raises:
          BadRowError: if the row has none of the forms; it lists the fields.
        """
        if self.prompt is not None and self.answer is not None:
            forms = [(self.prompt, self.answer)]
        else:
            pairs = [("prompt", answer) for answer in ANSWERS]
            forms = [(self.text,), (MESSAGES,), *pairs]
        for form in forms:
            if set(form) <= set(names):
                return form
        wanted = " or ".join(" with ".join(map(repr, form)) for form in forms)
        raise BadRowError(
            f"has the fields {', '.join(map(repr, names)) or 'none'}, not {wanted}; "
            "name the field of the text (text=, --text-field), or those of prompt and "
            "answer (prompt= and answer=, --prompt-field and --answer-field)"
        )

    def document(self, row: Mapping[str, Any]) -> list[TextSpan]:
        """Read the document of a row.

        Args:
          row: names and values.

        Returns:
          Its spans; none if there is no text to be learned, or it is empty.

        Raises:
          BadRowError: if a field is missing or of another type, or text is not Unicode.
        """
        form = self.of(list(row))
        if form == (MESSAGES,):
            spans = _conversation(row[MESSAGES])
        else:
            spans = _of_texts(*(_text(row[name], name) for name in form))
        return spans if any(span.is_learned and span.text for span in spans) else []


def _of_texts(first: str, answer: str | None = None) -> list[TextSpan]:
    """A text, or a prompt and its answer."""
    if answer is None:
        return [TextSpan(first, ends=True)]
    apart = first[-1:].isspace() or answer[:1].isspace() or not first
    before = first if apart else f"{first}\n"
    return [TextSpan(before, is_learned=False), TextSpan(answer, ends=True)]


def _conversation(messages: Any) -> list[TextSpan]:
    if isinstance(messages, Mapping):  # Columns: as datasets below version 4 wrote it.
        columns = [messages.get(name) or [] for name in ("role", "content")]
        messages = [
            {"role": role, "content": content}
            for role, content in zip(*columns, strict=False)
        ]
    if not isinstance(messages, list) or not messages:
        raise BadRowError(f"{MESSAGES!r} must be a list of messages, {_is(messages)}")
    spans, is_answered = [], False
    for number, message in enumerate(messages):
        name = f"{MESSAGES}[{number}]"
        if not isinstance(message, Mapping):
            raise BadRowError(f"{name} must have a role and a content, {_is(message)}")
        role, content = (
            _text(message.get(part), f"{name}.{part}") for part in ("role", "content")
        )
        is_answer = role == "assistant"
        is_answered |= is_answer
        start = "\n" if number else ""
        is_last = number == len(messages) - 1
        spans.append(TextSpan(f"{start}<|{role}|>\n", is_learned=False))
        spans.append(TextSpan(content, is_learned=is_answer, ends=is_answer or is_last))
    if not is_answered:
        raise BadRowError(f"{MESSAGES!r} has no message of the role 'assistant'")
    return spans


def _text(value: Any, name: str) -> str:
    if not isinstance(value, str):
        raise BadRowError(f"{name!r} must be text, {_is(value)}")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise BadRowError(f"{name!r} is not Unicode text ({error.reason})") from None
    return value


def _is(value: Any) -> str:
    if value is None:
        return "but is missing or null"
    kinds = {dict: "an object", list: "a list", str: "text", bool: "true or false"}
    kind = kinds.get(type(value), "a number")
    return f"but is {kind}" if value or kind != "a list" else "but is empty"
