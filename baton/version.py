"""The version of this installation."""

import importlib.metadata


def package_version() -> str:
    try:
        return importlib.metadata.version("baton-serve")
    except importlib.metadata.PackageNotFoundError:
        return "0+source"
