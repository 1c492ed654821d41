"""What pyproject.toml can't say: in a wheel the recipes are in the package."""

from setuptools import find_namespace_packages, setup

setup(
    packages=[
        *find_namespace_packages(include=["jaxpar*", "kernels_pallas*"]),
        "jaxpar.recipes",
    ],
    package_dir={"jaxpar.recipes": "recipes"},
)
