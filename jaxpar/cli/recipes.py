"""What does ``jaxpar recipes`` do: list the recipes that come with it, and copy one."""

import ast
import dataclasses
import difflib
from pathlib import Path
from typing import Annotated

import tyro


@dataclasses.dataclass(frozen=True)
class ListRecipes:
    """List the recipes, each with what it does."""


@dataclasses.dataclass(frozen=True)
class CopyRecipe:
    """Copy a recipe, to run it and to change it; and the recipes that it reads.

    Attributes:
      name: of the recipe, such as pretrain.
      folder: where it goes; made if missing.
      force: replace a file that is there.
    """

    name: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="NAME")]
    folder: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="FOLDER")] = (
        Path()
    )
    force: bool = False


_Command = (
    Annotated[ListRecipes, tyro.conf.subcommand("list")]
    | Annotated[CopyRecipe, tyro.conf.subcommand("copy")]
)


@dataclasses.dataclass(frozen=True)
class Recipes:
    """List the recipes, complete runs of one file each, and copy one.

    Attributes:
      command: the subcommand.
    """

    command: Annotated[
        _Command, tyro.conf.arg(name=""), tyro.conf.OmitSubcommandPrefixes
    ]


def run_recipes(args: Recipes) -> None:
    """Run ``jaxpar recipes``."""
    if isinstance(args.command, CopyRecipe):
        _copy(args.command)
        return
    found = _recipes()
    width = max(map(len, found))
    for name, file in found.items():
        print(f"{name:<{width}}  {_first_line(file)}")


def _copy(args: CopyRecipe) -> None:
    found = _recipes()
    name = args.name.removesuffix(".py")
    if name not in found:
        close = difflib.get_close_matches(name, found, n=1)
        guess = f" Did you mean {close[0]!r}?" if close else ""
        raise ValueError(
            f"there is no recipe {args.name!r}.{guess} The recipes are "
            f"{', '.join(found)}."
        )
    text = found[name].read_text(encoding="utf-8")
    target = args.folder / f"{name}.py"
    if target.exists() and not args.force:
        raise FileExistsError(
            f"{str(target)!r} is there already: name another folder, or give --force "
            "to replace it"
        )
    args.folder.mkdir(parents=True, exist_ok=True)
    target.write_text(text, encoding="utf-8")
    print(f"{target}: `python {target} --help` lists its flags")
    for other, file in found.items():
        beside = args.folder / file.name
        # A recipe names the file of another one that it reads.
        if other != name and f'"{file.name}"' in text and not beside.exists():
            beside.write_text(file.read_text(encoding="utf-8"), encoding="utf-8")
            print(f"{beside}: {name} reads it")


def _recipes() -> dict[str, Path]:
    """Name -> file: in the package, or beside it where that is a checkout."""
    package = Path(__file__).resolve().parents[1]
    folders = package / "recipes", package.parent / "recipes"
    found = next((each for each in folders if each.is_dir()), None)
    if found is None:
        raise FileNotFoundError(
            f"{str(folders[0])!r} is not there: install jaxpar again, its wheel has it"
        )
    return {file.stem: file for file in sorted(found.glob("*.py"))}


def _first_line(file: Path) -> str:
    docstring = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
    return docstring.partition("\n")[0]
