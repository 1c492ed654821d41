"""Do values with quotes, line breaks or commands stay values, in scripts and manifests?

Each string is given in place of each flag's value. It arrives unchanged in a script or
a manifest that has nothing more, or is refused with its flag.
"""

import dataclasses
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from jaxpar.cli.main import main
from jaxpar.launch.k8s import commands, manifest
from jaxpar.launch.sbatch import Batch, write_script
from tests.launch.jobs import SECURE, arguments, pod

ATTACKS = [
    "a b",
    "it's",
    'say "x"',
    "a\n#SBATCH --wrap=x",
    "a\r\nb",
    "a\n---\nkind: Pod",
    "$(touch pwned)",
    "`touch pwned`",
    "${HOME} $1 $$",
    "x; touch pwned",
    "# x",
    "a #x",
    "---",
    "back\\slash",
    "end\\",
    "100% !x *?[a]",
    "{a: 1}",
    "a\u2028b",
    "a\x7fb",
    "caf\udce9",
]
every_attack = pytest.mark.parametrize("attack", ATTACKS)

TAKES_NO = ("a\n", "a\r", "\u2028", "\x7f", "\udce9", "\\")
"""What no line of Slurm's options can have."""


def lines_of(text: str) -> list[str]:
    """The script's own lines; Slurm reads its options from those that begin so."""
    return [line for line in text.splitlines() if line.startswith("#SBATCH")]


SOUND = write_script(Batch("x", option=("comment=x",)), ["true"], Path("/logs/x"))


@every_attack
@pytest.mark.parametrize("flag", ["option", "folder"])
def test_options_of_slurm_have_the_value_or_refuse_it(attack, flag):
    def written() -> str:
        if flag == "folder":
            batch, folder = Batch("x", option=("comment=x",)), Path("/logs", attack)
        else:
            batch, folder = Batch("x", option=(f"comment={attack}",)), Path("/logs/x")
        return write_script(batch, ["true"], folder)

    if any(part in attack for part in TAKES_NO):
        with pytest.raises(ValueError, match=r"^--(out|batch\.option) '.*; |such as"):
            written()
        return
    lines = lines_of(written())
    assert len(lines) == len(lines_of(SOUND))
    given = [word for line in lines for word in shlex.split(line)[1:]]
    own = attack.replace("%", "%%")
    wanted = f"--comment={attack}" if flag == "option" else f"--output=/logs/{own}/"
    assert any(word.startswith(wanted) for word in given)


@every_attack
def test_scripts_flags_reach_the_task_unchanged(attack, tmp_path, monkeypatch, capsys):
    """By the command's own script, which bash runs with Slurm's srun faked."""
    train, file = tmp_path / "train.py", tmp_path / "job.sh"
    train.touch()
    args = ["launch", "slurm", f"--out={tmp_path / 'run'}", f"--sbatch={file}"]
    args += [str(train), "--", "--note", attack]
    monkeypatch.setattr(sys, "argv", ["jaxpar", *args])
    main(args)
    text = file.read_text(encoding="utf-8")
    assert text.count("\n") == SOUND.count("\n") - 1, "no line was added"
    fake = """srun() { printf '%s\\0' "$@"; }\n"""
    empty = tmp_path / "empty"
    empty.mkdir()
    done = subprocess.run(
        ["bash", "-c", fake + text], capture_output=True, cwd=empty, check=True
    )
    *_, flag, value = os.fsdecode(done.stdout).rstrip("\0").split("\0")
    assert (flag, value) == ("--note", attack)
    assert not list(empty.iterdir()), "nothing was run"


@pytest.mark.parametrize("flag", ["name", "partition", "account", "time"])
def test_names_of_slurm_are_refused(flag):
    for attack in ATTACKS:
        with pytest.raises(ValueError, match=rf"--batch\.{flag} "):
            Batch(**{"name": "x", flag: attack if attack != "---" else "- -"})


def test_line_of_shell_is_one_line():
    with pytest.raises(ValueError, match=r"--batch\.preamble .* one line.* several"):
        Batch("x", preamble=("module load cuda\n#SBATCH --wrap=x",))


REFUSED = {
    "script": "",
    "out": "",
    "flags": "",
    "mount": ":",
    "image": " \n\u2028\x7f",
    "file": "\n\r\u2028\x7f",
}
"""Flags of a manifest with a text that is no name -> characters that they can't have,
beside those that are not of UTF-8."""


@every_attack
@pytest.mark.parametrize("flag", REFUSED)
def test_manifest_has_the_value_or_refuses_it(attack, flag):
    """As one document of YAML, which JSON is; and the kubelet's variables."""
    under = {"mount": "/data", "out": "/data/runs"}.get(flag, "/app")
    value = {"image": f"team/{attack}", "flags": ("--note", attack)}.get(
        flag, Path(under, attack)
    )
    more = {"out": None} if flag == "mount" else {}
    job = dataclasses.replace(SECURE, **{flag: value}, **more)
    if any(character in attack for character in (*REFUSED[flag], "\udce9")):
        start = {"script": "SCRIPT", "flags": "--"}.get(flag, f"--{flag}")
        with pytest.raises(ValueError, match=rf"(?s)^{start} .*(;|, for example) "):
            manifest(job)
        return
    text = manifest(job)
    (read,) = yaml.safe_load_all(text)
    assert read == json.loads(text)
    assert shape(read) == shape(json.loads(manifest(SECURE))) or flag == "flags"
    given, (only,) = arguments(job, 0), pod(job)["containers"]
    told = commands(job)
    assert len(told) == len(commands(SECURE))
    assert {
        "script": lambda: given[2],
        "out": lambda: given[given.index("--out") + 1],
        "flags": lambda: tuple(given[given.index("--") + 1 :]),
        "mount": lambda: only["volumeMounts"][0]["mountPath"],
        "image": lambda: only["image"],
        "file": lambda: shlex.split(told[-1])[-1],
    }[flag]() == (value if flag == "flags" else str(value))


def shape(value: object) -> object:
    """Names and numbers of values, without the texts."""
    if isinstance(value, dict):
        return {name: shape(each) for name, each in value.items()}
    if isinstance(value, list):
        return [shape(each) for each in value]
    return None


NAMES = ("name", "namespace", "subdomain", "domain", "claim", "secret")


@pytest.mark.parametrize("flag", NAMES)
def test_names_in_a_cluster_are_refused(flag):
    for attack in ATTACKS:
        with pytest.raises(ValueError, match=rf"^--{flag} "):
            manifest(dataclasses.replace(SECURE, **{flag: attack}))
