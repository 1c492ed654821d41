"""Is a bucket found by its URL and the environment?"""

import pytest

from jaxpar.launch.object_stores import as_url, is_url, kvstore


def test_urls_are_told_from_paths() -> None:
    assert is_url("s3://bucket/run")
    assert not is_url("runs/s3")
    assert as_url("gs://bucket/runs/a//") == "gs://bucket/runs/a"


@pytest.mark.parametrize("url", ["s3://bucket", "s3://b/", "ftp://b/run", "s3://b//a"])
def test_what_is_no_folder_of_a_bucket_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match=f"folder is '{url}'; it must be a path"):
        as_url(url)


def test_environment_says_which_server_and_who(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ENDPOINT_URL", "AWS_REGION", "AWS_ACCESS_KEY_ID"):
        monkeypatch.delenv(name, raising=False)
    plain = kvstore("s3://bucket/runs/a")
    assert (plain["driver"], plain["bucket"]) == ("s3", "bucket")
    assert plain["path"] == "runs/a/"
    assert not {"endpoint", "aws_region", "aws_credentials"} & set(plain)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9000")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "me")
    found = kvstore("s3://bucket/runs/a")
    assert found["endpoint"] == "http://127.0.0.1:9000"
    assert found["aws_credentials"] == {"type": "environment"}
    assert kvstore("gs://bucket/runs/a")["driver"] == "gcs"
