"""What did others write? Files by pandas 3.1 and Hugging Face's datasets 5.2.

``both`` was a DatasetDict of "train" and "test"; ``chats`` was saved in two shards.
"""

import shutil
from pathlib import Path

import pytest

_WRITTEN = Path(__file__).resolve().parents[1] / "fixtures" / "datasets_of_2026_11"


@pytest.fixture
def foreign(tmp_path: Path) -> Path:
    """A copy of the files, beside which caches may be written."""
    return shutil.copytree(_WRITTEN, tmp_path / "foreign")
