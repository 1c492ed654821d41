"""Runs one case in this process and prints what it finds: see `benchmarks.gpu.day`.

python -m benchmarks.gpu.case MODULE:FUNCTION ARGUMENTS --keep FOLDER
"""

import argparse
import importlib
import json
from pathlib import Path

from benchmarks.gpu.processes import MARK
from benchmarks.gpu.session import NotHereError, Session


def main() -> None:
    """Call the function; a line for each result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("call", help="a function of a Session that yields results")
    parser.add_argument("arguments", type=json.loads, help="its others, as JSON")
    parser.add_argument("--keep", type=Path, required=True)
    parser.add_argument("--torch-python", required=True)
    parser.add_argument("--dry-run", action="store_true")
    args = parser.parse_args()
    module, _, name = args.call.partition(":")
    session = Session(args.keep, args.torch_python, args.dry_run)
    function = getattr(importlib.import_module(module), name)
    try:
        for row, found in function(session, **args.arguments):
            print(MARK + json.dumps({"name": row, "found": found}), flush=True)
    except NotHereError as error:
        print(MARK + json.dumps({"skip": str(error)}), flush=True)


if __name__ == "__main__":
    main()
