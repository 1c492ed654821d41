"""What ended a worker, in a line, from it to its supervisor."""

import json

from jaxpar.launch.worker_environment import Worker


def say_error(worker: Worker, error: str) -> None:
    """Write down what ends a worker, before it ends."""
    worker.error.write_text(json.dumps({"error": error}), encoding="utf-8")


def read_error(worker: Worker) -> str | None:
    """What a worker said that ended it; None if it said nothing."""
    try:
        return json.loads(worker.error.read_text(encoding="utf-8"))["error"]
    except (FileNotFoundError, json.JSONDecodeError):
        return None
