"""Imported by Python as it starts, where this folder is on its path: the dry run's."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from benchmarks.gpu.imports import refuse_others

refuse_others()
