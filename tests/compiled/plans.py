"""What is planned in the process that has the compilers."""

from pathlib import Path
from typing import Any

from jaxpar.planner.recipe import plan_recipe

RECIPES = Path(__file__).resolve().parents[2] / "recipes"


def plan(recipe: str, target: str, *flags: str) -> dict[str, Any]:
    """A recipe's plan, as JSON's types."""
    return plan_recipe(RECIPES / recipe, target, flags).as_dict()
