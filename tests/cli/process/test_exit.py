"""The words for errors."""

from __future__ import annotations

import pytest

from shardwise.cli.process.exit import mistake


@pytest.mark.parametrize(("module", "extra"), [("transformers.models", "train"), ("typer", "train"), ("jax", "jax")])
def test_a_missing_module_names_its_extra(module: str, extra: str) -> None:
    said = mistake(ModuleNotFoundError("No module", name=module))
    name = module.partition(".")[0]
    assert said == f"the module {name!r} is missing; install it with: pip install 'shardwise[{extra}]'"


def test_another_missing_module_is_no_mistake() -> None:
    assert mistake(ModuleNotFoundError("No module", name="shardwise.x")) is None
