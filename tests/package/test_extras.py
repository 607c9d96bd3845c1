"""Every extra can be installed: what it asks for is pinned in constraints.txt, and pip finds versions that agree."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS: dict[str, list[str]] = PROJECT["optional-dependencies"]
CONSTRAINTS = (ROOT / "constraints.txt").read_text().splitlines()
PINS = dict(line.split("==") for line in CONSTRAINTS if not line.startswith("#"))
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input"]


def required(extra: str) -> Iterator[Requirement]:
    """What an extra brings along by name, also through other extras of ours."""
    for requirement in map(Requirement, [*PROJECT["dependencies"], *EXTRAS[extra]]):
        if requirement.name == PROJECT["name"]:
            for other in requirement.extras:
                yield from required(other)
        else:
            yield requirement


@pytest.mark.parametrize("extra", EXTRAS)
def test_what_an_extra_asks_for_is_pinned(extra: str) -> None:
    for requirement in required(extra):
        pin = PINS[canonicalize_name(requirement.name)]
        assert requirement.specifier.contains(pin, prereleases=True), f"{requirement}: {pin}"


def test_pins_are_one_a_package_in_order() -> None:
    assert [line for line in CONSTRAINTS[1:] if not re.fullmatch(r"[a-z0-9-]+==[\w.]+", line)] == []
    assert len(PINS) == len(CONSTRAINTS) - 1
    assert all(name == canonicalize_name(name) for name in PINS)


def test_constraints_are_of_every_extra() -> None:
    """Its first line names the extras whose packages were pinned; through these it has all."""
    [named] = re.findall(r"shardwise\[(.*)\]", CONSTRAINTS[0])
    left = named.split(",")
    reached: set[str] = set()
    while left:
        extra = left.pop()
        reached.add(extra)
        left += [
            other
            for requirement in map(Requirement, EXTRAS[extra])
            if requirement.name == PROJECT["name"]
            for other in requirement.extras
        ]
    assert reached == EXTRAS.keys()


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("dist")
    build = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(out)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    [path] = out.iterdir()
    return path


@pytest.fixture(scope="module")
def index() -> None:
    """Where pip finds packages; tests that need it skip if there is none."""
    asked = ["--dry-run", "--ignore-installed", "--no-deps", "--retries", "0", "--timeout", "15"]
    found = subprocess.run([*PIP, "install", *asked, f"xxhash=={PINS['xxhash']}"], capture_output=True, text=True)
    if found.returncode:
        pytest.skip("pip finds no package index")


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.usefixtures("index")
@pytest.mark.parametrize("extra", EXTRAS)
def test_pip_resolves_the_wheel_with_an_extra(extra: str, wheel: Path, tmp_path: Path) -> None:
    """Under the pins, and all that comes along is pinned. What is installed here already is not fetched again."""
    found = tmp_path / "report.json"
    ask = ["--dry-run", "--quiet", "-c", str(ROOT / "constraints.txt"), "--report", str(found)]
    clean = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    named = f"{PROJECT['name']}[{extra}] @ {wheel.as_uri()}"
    ended = subprocess.run([*PIP, "install", *ask, named], capture_output=True, text=True, env=clean)
    assert ended.returncode == 0, ended.stderr
    chosen = {
        canonicalize_name(item["metadata"]["name"]): item["metadata"]["version"]
        for item in json.loads(found.read_text())["install"]
    }
    chosen.pop(PROJECT["name"], None)
    assert {name: (version, PINS.get(name)) for name, version in chosen.items() if version != PINS.get(name)} == {}
