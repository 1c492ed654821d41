"""Are secrets kept out of a run's files, and all other settings kept in them?"""

import dataclasses
import json
import sys
from pathlib import Path

import pytest

from jaxpar.config import HIDDEN, parse
from jaxpar.training.opening import open_run
from jaxpar.training.options import StartOptions
from jaxpar.training.record import write
from jaxpar.training.secret_values import (
    command_without_secrets,
    is_secret,
    without_secrets,
)

SECRET = "PRIVATE-7f3a"


@pytest.mark.parametrize(
    "name",
    [
        *("token", "hf_token", "--hf-token", "auth.token", "accessToken", "HF_TOKEN"),
        *("key", "api_key", "--wandb.api-key", "secret_key", "apikey", "private_key"),
        *("password", "db_password", "passwd", "secret", "client_secret", "secrets"),
        *("credential", "credentials", "credentials_file", "password_hash"),
    ],
)
def test_names_of_secrets(name):
    assert is_secret(name)


@pytest.mark.parametrize(
    "name",
    [
        *("tokenizer", "num_tokens", "tokens", "keep", "keys", "key_bias", "keyword"),
        *("eos_token", "pad-token", "text_key", "token_drop", "monkey", "token_ids"),
        *("tokens_per_step", "secretary", "", "out", "--steps", "hf"),
    ],
)
def test_names_of_other_settings(name):
    assert not is_secret(name)


def test_values_are_hidden_wherever_they_are():
    made = {
        "hub": {"token": SECRET, "user": "me"},
        "keys": [{"api_key": SECRET}, {"api_key": None}],
        "token": 3,
        "password": "",
        "passwords": "plain",
        "secret": ["", SECRET],
        "store": f"s3://me:{SECRET}@host/x",
        "plain": "https://host:80/x@y",
    }
    hidden = without_secrets(made)
    assert SECRET not in json.dumps(hidden)
    assert hidden == made | {
        "hub": {"token": HIDDEN, "user": "me"},
        "keys": [{"api_key": HIDDEN}, {"api_key": None}],
        "secret": ["", HIDDEN],
        "store": f"s3://{HIDDEN}@host/x",
    }


def test_command_keeps_its_other_words():
    words = [
        "x.py",
        "--token",
        SECRET,
        f"--a.secret={SECRET}",
        "-k",
        "v",
        "--use-token",
    ]
    words += ["--steps", "3", f"--db=x://u:{SECRET}@h", f"PASSWORD={SECRET}", "--key"]
    shown = command_without_secrets(words)
    assert SECRET not in " ".join(shown)
    assert [len(shown), shown[4:9]] == [len(words), words[4:9]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(StartOptions):
    out: str = "runs/x"
    steps: int = 3
    hf_token: str = ""
    tokenizer: str = "bytes"


def test_no_file_of_a_run_has_a_secret_and_another_one_goes_on(
    tmp_path: Path, monkeypatch
) -> None:
    folder = tmp_path / "run"
    monkeypatch.setattr(sys, "argv", ["x.py", "--hf-token", SECRET, "--steps", "3"])
    run = open_run(folder, Config(hf_token=SECRET), {})
    assert run.config.hf_token == SECRET, "the run itself has it"
    (folder / "metrics.jsonl").touch()
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert not [path for path in files if SECRET in path.read_text()]
    record = json.loads((folder / "run.json").read_text())
    assert record["config"]["hf_token"] == HIDDEN
    assert record["config"]["tokenizer"] == "bytes"
    assert record["command"] == ["x.py", "--hf-token", HIDDEN, "--steps", "3"]
    given = ["--config", str(folder / "run.json")]
    assert parse(Config, None, given) == Config(out="runs/x")
    assert parse(Config, None, [*given, "--hf-token", "mine"]).hf_token == "mine"
    again = open_run(folder, Config(hf_token="another"), {})
    assert again.config.hf_token == "another"
    record["config"]["hf_token"] = SECRET  # As written before they were hidden.
    (folder / "run.json").write_text(json.dumps(record))
    assert SECRET not in json.dumps(open_run(folder, Config(hf_token="c"), {}).record)


def test_record_is_this_users_alone_by_option(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    modes = []
    for private in (False, True, False):
        open_run(folder, Config(private=private), {})
        (folder / "metrics.jsonl").touch()
        modes.append((folder / "run.json").stat().st_mode & 0o777)
    others = (folder / "metrics.jsonl").stat().st_mode & 0o777
    assert modes == [others, 0o600, 0o600], "and it stays so"
    new = tmp_path / "new"
    record = open_run(new, Config(private=True), {}).record
    assert (new / "run.json").stat().st_mode & 0o777 == 0o600
    write(new, record)
    assert (new / "run.json").stat().st_mode & 0o777 == 0o600
