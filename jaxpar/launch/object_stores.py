"""How are the stores of a cloud reached: which bucket, where, with which credentials?

The environment is that of the clouds' own tools: AWS_ENDPOINT_URL for a server that
speaks S3 elsewhere, AWS_REGION, AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY or a
profile or the machine's role; GOOGLE_APPLICATION_CREDENTIALS.
"""

import os
import re
from typing import Any

SCHEMES = ("gs://", "s3://")

_URL = re.compile(r"(gs|s3)://([a-z0-9][a-z0-9._-]+)/(.*[^/])/*")
_RETRIES = {"max_retries": 6, "initial_delay": "200ms", "max_delay": "10s"}


def is_url(folder: str | os.PathLike[str]) -> bool:
    """Whether a folder is not on a file system."""
    return "://" in os.fspath(folder)


def as_url(folder: str) -> str:
    """A folder of a bucket, without slashes at its end.

    Raises:
      ValueError: if it is of another kind of store, or has no bucket or folder.
    """
    match = _URL.fullmatch(folder)
    if match is None or "//" in match[3]:
        raise ValueError(
            f"folder is {folder!r}; it must be a path on a file system, or a folder of "
            "a bucket: s3://bucket/folder, gs://bucket/folder. Mount a store of "
            "another kind, and give the path where it is mounted"
        )
    return f"{match[1]}://{match[2]}/{match[3]}"


def kvstore(url: str) -> dict[str, Any]:
    """TensorStore's description of a folder of a bucket.

    Args:
      url: by `as_url`.
    """
    scheme, _, rest = url.partition("://")
    bucket, _, path = rest.partition("/")
    place = {"bucket": bucket, "path": f"{path}/"}
    if scheme == "gs":
        return {"driver": "gcs", "gcs_request_retries": _RETRIES, **place}
    found: dict[str, Any] = {"driver": "s3", "s3_request_retries": _RETRIES, **place}
    names = {"endpoint": "AWS_ENDPOINT_URL", "aws_region": "AWS_REGION"}
    found |= {
        own: os.environ[name] for own, name in names.items() if name in os.environ
    }
    if "AWS_ACCESS_KEY_ID" in os.environ:
        found["aws_credentials"] = {"type": "environment"}
    return found
