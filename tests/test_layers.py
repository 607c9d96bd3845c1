"""Imports point down the layers of the design, wherever in a module they stand."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent / "src" / "shardwise"

# What each package may import besides itself. Packages of one layer may not import each other.
LAYERS = [
    {"errors", "suggest"},
    {"layout", "policy"},
    {"comm"},
    {"sharded"},
    {"modules"},
    {"engine"},
    {"model_tools"},
    {"plan", "checkpoint", "offload", "optim"},
    {"train", "integrations"},
    {"cli"},
]
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}
SELF = {"jax": {"errors", "layout", "policy", "checkpoint"}}  # beside the layers
NO_TORCH = {"errors", "suggest", "layout", "policy"}
TOP = "the package itself"

# Rooms: the folders and files at the top of a package, and what each may import of the others.
ROOMS = {
    "train": {
        "config": set(),
        "data": {"config"},
        "run": {"config", "data"},
        "interruption": set(),
        "ranks": {"interruption"},
        "build": {"config", "data", "ranks"},
        "loss": {"data", "interruption", "ranks"},
        "output": {"config", "data", "run", "ranks", "build"},
        "trainer": {"config", "data", "run", "interruption", "ranks", "build", "loss", "output"},
    },
}


def imports_of(source: str, module: str) -> Iterator[str]:
    """Absolute names of everything that a module imports, at any depth.

    Args:
        source: its text.
        module: its dotted name; of a package, with `.__init__`.
    """
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = module.split(".")[: -node.level] if node.level else []
            prefix = ".".join([*base, *([node.module] if node.module else [])])
            yield from (f"{prefix}.{alias.name}" for alias in node.names)


def package_of(name: str) -> str | None:
    """The part of shardwise that a dotted name belongs to; None for other libraries."""
    parts = name.split(".")
    if parts[0] != "shardwise":
        return None
    if len(parts) == 1 or (parts[1] not in LEVEL and parts[1] not in SELF):
        return TOP
    return parts[1]


def violations(source: str, module: str) -> list[str]:
    """Every import of a module that does not point down."""
    own = package_of(module)
    found = []
    for name in imports_of(source, module):
        if name.split(".")[0] == "torch" and own in NO_TORCH:
            found.append(f"{module} imports {name}: {own} may not know torch")
        target = package_of(name)
        if target is None or target == own or own == TOP or allowed(own, target):
            continue
        found.append(f"{module} imports {name}: {own} may not import {target}")
    return found


def allowed(own: str | None, target: str) -> bool:
    if target == TOP:  # `import shardwise as sw` brings every layer up to the engine's facade
        return own in LAYERS[-1] | LAYERS[-2]
    if own in SELF:
        return target in SELF[own]
    return own in LEVEL and target in LEVEL and LEVEL[target] < LEVEL[own]


MODULES = {
    ".".join(("shardwise", *path.relative_to(ROOT).with_suffix("").parts)): path for path in sorted(ROOT.rglob("*.py"))
}


@pytest.mark.parametrize("module", MODULES)
def test_imports_point_down(module: str) -> None:
    assert violations(MODULES[module].read_text(encoding="utf-8"), module) == []


def test_every_package_has_a_layer() -> None:
    packages = {path.name for path in ROOT.iterdir() if path.is_dir() and any(path.rglob("*.py"))}
    assert packages <= LEVEL.keys() | SELF.keys()


def room_of(name: str) -> str | None:
    """The room that a dotted name of a package with rooms belongs to; None for other names."""
    parts = name.split(".")
    if len(parts) < 3 or parts[0] != "shardwise" or parts[2] not in ROOMS.get(parts[1], {}):
        return None
    return parts[2]


def room_violations(source: str, module: str) -> list[str]:
    """Every import of a module from a room of its package that its own may not import."""
    package, own = module.split(".")[1], room_of(module)
    if own is None:
        return []
    targets = {(name, room_of(name)) for name in imports_of(source, module) if name.split(".")[1:2] == [package]}
    allowed_rooms = {None, own, *ROOMS[package][own]}
    return [f"{module} imports {name}" for name, target in sorted(targets) if target not in allowed_rooms]


@pytest.mark.parametrize("module", [name for name in MODULES if name.split(".")[1] in ROOMS])
def test_imports_stay_in_the_rooms_of_their_package(module: str) -> None:
    assert room_violations(MODULES[module].read_text(encoding="utf-8"), module) == []


@pytest.mark.parametrize("package", ROOMS)
def test_every_folder_and_file_is_a_room(package: str) -> None:
    found = {path.stem for path in (ROOT / package).iterdir() if path.suffix == ".py" or any(path.glob("*.py"))}
    assert found - {"__init__"} == ROOMS[package].keys()


def circle(imports: dict[str, set[str]]) -> list[str]:
    """Modules that import one another in a circle; none where there is no circle."""
    left = dict(imports)
    while free := [name for name, targets in left.items() if not targets & left.keys()]:
        for name in free:
            del left[name]
    return sorted(left)


@pytest.mark.parametrize("package", ROOMS)
def test_no_circle_of_imports(package: str) -> None:
    """Imports inside functions and for type checkers count too."""
    modules = {name.removesuffix(".__init__"): name for name in MODULES if name.split(".")[1] == package}
    imports = {}
    for name, module in modules.items():
        targets = set(imports_of(MODULES[module].read_text(encoding="utf-8"), module))
        found = {target if target in modules else target.rpartition(".")[0] for target in targets}
        imports[name] = (found & modules.keys()) - {name}
    assert circle(imports) == []


def test_a_circle_is_found() -> None:
    assert circle({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": set()}) == ["a", "b", "c"]
    assert circle({"a": {"b"}, "b": set()}) == []


@pytest.mark.parametrize(
    "source", ["def f():\n    from shardwise.train.build import auto", "from shardwise.train.trainer import run"]
)
def test_an_import_of_a_room_above_is_found(source: str) -> None:
    assert len(room_violations(source, "shardwise.train.data.batches")) == 1
    assert room_violations("from shardwise.train.config import files", "shardwise.train.data.batches") == []


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("shardwise.layout.flat", "import torch"),
        ("shardwise.layout.flat", "def f():\n    from torch import Tensor"),
        ("shardwise.layout.flat", "from ..policy import strategy"),
        ("shardwise.engine.units.unit", "from shardwise import train"),
        ("shardwise.engine.units.unit", "if TYPE_CHECKING:\n    from shardwise.optim.clip import clip"),
        ("shardwise.engine.units.unit", "import shardwise"),
        ("shardwise.optim.clip", "from shardwise.checkpoint import save"),
        ("shardwise.jax.shard", "import shardwise.engine.units.unit"),
        ("shardwise.errors", "from shardwise.policy import strategy"),
    ],
)
def test_an_import_that_points_up_or_aside_is_found(module: str, source: str) -> None:
    assert len(violations(source, module)) == 1


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("shardwise.engine.units.unit", "from ...layout.flat import FlatLayout\nfrom . import arena\nimport torch"),
        ("shardwise.cli.app", "from shardwise.train.config.schema import load"),
        ("shardwise.train.trainer", "import shardwise as sw"),
        ("shardwise.layout.__init__", "from .flat import FlatLayout"),
    ],
)
def test_an_import_that_points_down_is_fine(module: str, source: str) -> None:
    assert violations(source, module) == []
