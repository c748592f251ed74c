"""Packages that tests need and that may not be installed. To ask for one imports none: torch alone takes seconds."""

from __future__ import annotations

import importlib.util

import pytest


def need(name: str) -> None:
    """Skip a test, or a module at its head, with one line that says how to install the package."""
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"{name} is not installed: pip install -e '.[dev,gallery]'", allow_module_level=True)
