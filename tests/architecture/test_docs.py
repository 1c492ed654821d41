"""Is what the documents say of the code true: reading order, public names, words?"""

import re
from itertools import pairwise

import pytest

from tests.architecture.test_layers import LAYER, ROOT, python_files, unit_of
from tests.architecture.test_public_names import literal_all

ARCHITECTURE = ROOT / "docs" / "architecture.md"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]

# What the field has a word for -> a pattern of what this project used to say.
FORMER_WORDS = {
    "is stored, sharded": r"\b(at rest|rests (at|on|over|in|as|sharded|whole|where))\b",
    "is communicated, reduced over data": r"\bcross(es|ing)\b",
    "reports, says": r"(?<!\.)\b(tells|told)\b",
    "gathered at use": r"\bmade whole\b|\bDeferred\b",
    "leaf sharding": r"\bLeafPlan\b",
    "placement": r"\bLayout\b(?!\()",
    "collectives": r"\b(Manual|Automatic)?Exchange\b",
    "closed form": r"\bMeant\b|`meant`",
    "stage functions, blocks": r"\b[Tt]runk\b",
    "attention placeholder": r"\bplanned attention\b",
    "heartbeat": r"\bpulse\b",
    "subprocess": r"\bApartError\b|_apart\b",
    "is not a": r"(?<![Tt]here )\bis no (?!longer|more|less|need)\w+\b",
    "shared folder": r"\bhosts see one folder\b",
}
OWN_USE = {
    "is communicated, reduced over data": {"jaxpar/compiled/budget.py"},  # Older files.
    "placement": {"jaxpar/sharding/collectives.py"},  # jax.experimental.layout.Layout
}


def reading_orders() -> list[list[str]]:
    sections = ARCHITECTURE.read_text().split("\n## ")
    chosen = [text for text in sections if text.startswith("Reading order")]
    return [re.findall(r"^\d+\. `([\w/.]+)`", text, re.MULTILINE) for text in chosen]


def test_reading_order_is_of_files_that_exist_in_the_order_of_layers():
    down, up = reading_orders()
    for name in (*down, *up):
        assert (ROOT / name).is_file(), name
    layers = [[LAYER[unit_of(ROOT / name)] for name in order] for order in (down, up)]
    assert all(a >= b for a, b in pairwise(layers[0])), layers[0]
    assert all(a <= b for a, b in pairwise(layers[1])), layers[1]


def test_layers_of_the_page_are_those_of_the_map():
    rows = re.findall(r"^\| (\d+) \| (.*) \|$", ARCHITECTURE.read_text(), re.MULTILINE)
    found = {
        unit: int(number) - 1
        for number, text in rows
        for unit in re.findall(r"`(\w+)`", text)
    }
    doors = {"__init__", "__main__"}
    assert found == {unit: at for unit, at in LAYER.items() if unit not in doors}


@pytest.mark.parametrize("name", literal_all())
def test_public_name_is_used_by_a_recipe_or_a_page(name):
    texts = [page.read_text() for page in PAGES]
    texts += [path.read_text() for path in sorted((ROOT / "recipes").glob("*.py"))]
    assert any(re.search(rf"\bjaxpar\.{name}\b", text) for text in texts), name


@pytest.mark.parametrize("word", FORMER_WORDS)
def test_glossary_is_kept(word):
    pattern, files = re.compile(FORMER_WORDS[word]), [*python_files("jaxpar"), *PAGES]
    found = [
        f"{name}:{number}: {line.strip()}"
        for file in files
        if (name := str(file.relative_to(ROOT))) not in OWN_USE.get(word, ())
        for number, line in enumerate(file.read_text().splitlines(), start=1)
        if pattern.search(line)
    ]
    assert not found, f"say {word!r}: {found}"


def test_patterns_of_former_words_find_them():
    said = {
        "is stored, sharded": "each leaf rests over data",
        "is communicated, reduced over data": "what crosses data",
        "gathered at use": "it is made whole",
        "is not a": "'x' is no folder",
    }
    for word, text in said.items():
        assert re.search(FORMER_WORDS[word], text), word
    assert not re.search(FORMER_WORDS["is not a"], "there is no longer a file")
