"""Imports, also those inside functions, only point to lower layers of the design."""

import re
from pathlib import Path

import pytest

from tests.layers import MODULES, ROOT, imports_of

# What each package may import besides itself. Packages of one layer may not import each other.
LAYERS = [
    {"accelerators", "downloads", "errors", "liveness", "registry", "suggest", "tables", "toml_text"},
    {"fsdp"},
    {"device_tools", "layout", "pages", "policy", "foreign", "hub", "together"},
    {"comm", "files"},
    {"sharded"},
    {"modules", "offload"},
    {"engine"},
    {"model_tools", "watchdog"},
    {"optim"},
    {"plan", "checkpoint"},
    {"generation", "diagnosis"},
    {"train", "integrations", "compat", "export"},
    {"cli"},
]
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}
SELF = {
    "jax": {"errors", "suggest", "tables", "hub", "together", "fsdp", "layout", "policy", "files", "checkpoint"}
}  # beside the layers
USERS_OF_SELF = {"train", "cli"}
# What each folder or module of a package may import of that package; "." is the modules that are not named.
ROOMS: dict[str, dict[str, set[str]]] = {
    "comm": {".": set(), "backends": {"."}},
    "offload": {"tiers": set(), ".": {"tiers"}},
    "engine": {".": set(), "extensions": {"."}, "setup": {".", "extensions"}},
    "checkpoint": {
        "io": set(),
        "names": {"io"},
        "ranks": {"io", "names"},
        "format": {"io", "names", "ranks"},
        "publish": {"io", "names", "ranks", "format"},
        ".": {"io", "names", "ranks", "format", "publish"},
        "interchange": {"io", "names", "ranks", "format", "publish", "."},
    },
    "plan": {
        "hardware": set(),
        "cache": set(),
        "models": {"cache", "hardware"},
        "dry_run": {"hardware", "models"},
        "offload": {"hardware", "dry_run"},
        "simulate": {"hardware", "models", "dry_run", "offload"},
        "search": {"cache", "hardware", "models", "dry_run", "simulate"},
        "report": {"hardware", "models", "dry_run", "simulate", "search"},
        ".": {"hardware", "models", "dry_run", "simulate", "search", "report"},
    },
    "train": {
        "config": set(),
        "data": {"config"},
        "run": {"config", "data"},
        "process": set(),
        "build": {"config", "data", "process"},
        "report": {"config", "run"},
        "profile": {"run", "process"},
        "output": {"config", "data", "run", "process", "build", "report"},
        "on_jax": {"config", "data", "run", "process", "output", "report"},
        "tasks": {"config", "data", "run", "process", "build", "output"},
        ".": {"config", "data", "run", "process", "build", "report", "profile", "output", "tasks"},
    },
    "cli": {"process": set(), ".": {"process"}},
}
NO_TORCH = {
    "errors",
    "liveness",
    "pages",
    "registry",
    "suggest",
    "tables",
    "toml_text",
    "layout",
    "policy",
    "foreign",
    "hub",
    "together",
    "files",
    "jax",
    "shardwise.fsdp.layout",
    "shardwise.fsdp.strategy",
}
TOP = "the package itself"


def package_of(name: str) -> str | None:
    """Return the package of shardwise that a dotted name belongs to; None for other libraries."""
    parts = name.split(".")
    if parts[0] != "shardwise":
        return None
    if len(parts) == 1 or (parts[1] not in LEVEL and parts[1] not in SELF):
        return TOP
    return parts[1]


def violations(source: str, module: str) -> list[str]:
    """Return the imports of a module that do not point to a lower layer."""
    own = package_of(module)
    found = []
    for name in imports_of(source, module):
        if name.split(".")[0] == "torch" and (own in NO_TORCH or module in NO_TORCH):
            found.append(f"{module} imports {name}: {own} may not know torch")
        target = package_of(name)
        if target == "fsdp" and own in NO_TORCH and ".".join(name.split(".")[:3]) not in NO_TORCH:
            found.append(f"{module} imports {name}, which knows torch")
        if target is None or target == own or own == TOP or allowed(own, target):
            continue
        found.append(f"{module} imports {name}: {own} may not import {target}")
    return found


def allowed(own: str | None, target: str) -> bool:
    if target == TOP:  # `import shardwise as sw` brings every layer up to the engine's facade
        return own in LAYERS[-1] | LAYERS[-2] | LAYERS[-3]
    if own in SELF:
        return target in SELF[own]
    if target in SELF:
        return own in USERS_OF_SELF
    return own in LEVEL and target in LEVEL and LEVEL[target] < LEVEL[own]


def reading_order() -> list[str]:
    """Return the modules of the engine in the order in which they are read, as the package names them."""
    text = (ROOT / "fsdp" / "__init__.py").read_text(encoding="utf-8")
    _, _, listed = text.partition("In reading order: ")
    return [f"shardwise.fsdp.{name}" for name in re.findall(r"`(\w+)`", listed)]


def later_ones(source: str, module: str, order: list[str]) -> list[str]:
    """Return the modules that one of the engine's imports, also for types, though they are read after it."""
    later = order[order.index(module) :]
    return [name for name in imports_of(source, module) if any(f"{name}.".startswith(f"{each}.") for each in later)]


def room_of(name: str, package: str) -> str | None:
    """Return the folder of a package that a dotted name belongs to; None for names outside the package."""
    parts = name.split(".")
    if parts[:2] != ["shardwise", package]:
        return None
    return parts[2] if len(parts) > 2 and parts[2] in ROOMS[package] else "."


def room_violations(source: str, module: str) -> list[str]:
    """Return the imports of a module that do not follow the order of its package's folders."""
    package = package_of(module)
    if package not in ROOMS or module == f"shardwise.{package}.__init__":
        return []
    own = room_of(module, package)
    assert own is not None
    found = []
    for name in imports_of(source, module):
        target = room_of(name, package)
        if target is not None and target not in {own, *ROOMS[package][own]}:
            found.append(f"{module} imports {name}: {own} may not import {target}")
    return found


def circle_in(imports: dict[str, set[str]]) -> list[str]:
    """Return the modules of one circular import, the first one again at the end; empty if there is none.

    Args:
        imports: by module, the modules that it imports.
    """
    done: set[str] = set()

    def search(module: str, path: list[str]) -> list[str]:
        if module in path:
            return [*path[path.index(module) :], module]
        if module in done:
            return []
        for target in sorted(imports.get(module, ())):
            if circle := search(target, [*path, module]):
                return circle
        done.add(module)
        return []

    return next((circle for module in sorted(imports) if (circle := search(module, []))), [])


@pytest.mark.parametrize("module", MODULES)
def test_imports_point_down(module: str) -> None:
    assert violations(MODULES[module].read_text(encoding="utf-8"), module) == []


@pytest.mark.parametrize("module", [module for module in MODULES if package_of(module) in ROOMS])
def test_imports_follow_the_order_of_the_folders(module: str) -> None:
    assert room_violations(MODULES[module].read_text(encoding="utf-8"), module) == []


@pytest.mark.parametrize("module", reading_order())
def test_the_engine_is_read_in_the_order_of_its_imports(module: str) -> None:
    assert later_ones(MODULES[module].read_text(encoding="utf-8"), module, reading_order()) == []


def test_every_module_of_the_engine_is_in_the_reading_order() -> None:
    assert sorted([*reading_order(), "shardwise.fsdp.__init__"]) == [name for name in MODULES if ".fsdp." in name]


def test_an_import_of_a_later_module_of_the_engine_is_found() -> None:
    source = "if TYPE_CHECKING:\n    from shardwise.fsdp.engine import Engine\nfrom shardwise.fsdp.layout import Entry"
    assert later_ones(source, "shardwise.fsdp.unit", reading_order()) == ["shardwise.fsdp.engine.Engine"]


def dtensors_in(source: str, module: str) -> list[str]:
    """Return what a module imports of torch's tensor parallelism."""
    return [name for name in imports_of(source, module) if f"{name}.".startswith("torch.distributed.tensor.")]


def test_the_engine_knows_no_dtensor() -> None:
    """Tensor parallelism attaches to it from above (docs/design/tensor-parallel.md)."""
    modules = [module for module in MODULES if package_of(module) == "fsdp"]
    assert len(modules) > 10
    assert [name for module in modules for name in dtensors_in(MODULES[module].read_text("utf-8"), module)] == []


@pytest.mark.parametrize(
    "source", ["import torch.distributed.tensor", "def f():\n    from torch.distributed.tensor import DTensor"]
)
def test_an_import_of_dtensors_is_found(source: str) -> None:
    assert len(dtensors_in(source, "shardwise.fsdp.unit")) == 1


@pytest.mark.parametrize("package", ROOMS)
def test_every_folder_has_a_place_in_the_order(package: str) -> None:
    paths = list((ROOT / package).iterdir())
    folders = {path.name for path in paths if path.is_dir() and any(path.rglob("*.py"))}
    assert folders <= ROOMS[package].keys()
    assert ROOMS[package].keys() <= folders | {path.stem for path in paths if path.suffix == ".py"} | {"."}


@pytest.mark.parametrize("package", sorted({package_of(module) for module in MODULES} - {TOP}))
def test_no_circle_of_imports(package: str) -> None:
    imports = {}
    for module, path in MODULES.items():
        if package_of(module) == package and not module.endswith(".__init__"):
            names = imports_of(path.read_text(encoding="utf-8"), module)
            imports[module] = {part for name in names for part in (name, name.rpartition(".")[0]) if part in MODULES}
    assert circle_in(imports) == []


def test_every_package_has_a_layer() -> None:
    packages = {path.name for path in ROOT.iterdir() if path.is_dir() and any(path.rglob("*.py"))}
    assert packages <= LEVEL.keys() | SELF.keys()


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("shardwise.fsdp.layout", "import torch"),
        ("shardwise.fsdp.layout", "def f():\n    from torch import Tensor"),
        ("shardwise.fsdp.layout", "from ..policy import strategy"),
        ("shardwise.fsdp.unit", "from shardwise import train"),
        ("shardwise.fsdp.unit", "if TYPE_CHECKING:\n    from shardwise.optim.clip import clip"),
        ("shardwise.fsdp.unit", "import shardwise"),
        ("shardwise.optim.clip", "from shardwise.checkpoint import save"),
        ("shardwise.jax.shard", "import shardwise.fsdp.unit"),
        ("shardwise.jax.shard", "from shardwise.train.config.schema import Config"),
        ("shardwise.checkpoint.saving", "import shardwise.jax"),
        ("shardwise.jax.report.memory", "import torch"),
        ("shardwise.errors", "from shardwise.policy import strategy"),
    ],
)
def test_an_import_that_points_up_or_aside_is_found(module: str, source: str) -> None:
    assert len(violations(source, module)) == 1


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("shardwise.fsdp.unit", "from .layout import FlatLayout\nfrom . import slots\nimport torch"),
        ("shardwise.cli.app", "from shardwise.train.config.schema import load"),
        ("shardwise.train.trainer", "import shardwise as sw"),
        ("shardwise.train.on_jax.trainer", "import shardwise.jax as swj"),
        ("shardwise.layout.__init__", "from .groups import of"),
    ],
)
def test_an_import_that_points_down_is_fine(module: str, source: str) -> None:
    assert violations(source, module) == []


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("shardwise.plan.search.exploration", "from shardwise.plan.report.report import PlanReport"),
        ("shardwise.plan.search.exploration", "if TYPE_CHECKING:\n    from shardwise.plan.planner import Plan"),
        ("shardwise.plan.dry_run.job", "def f():\n    from shardwise.plan.simulate import forecast"),
        ("shardwise.plan.hardware.devices", "from shardwise.plan import forecast"),
    ],
)
def test_an_import_against_the_order_of_the_folders_is_found(module: str, source: str) -> None:
    assert len(room_violations(source, module)) == 1


def test_a_circle_of_imports_is_found() -> None:
    assert circle_in({"a": {"b", "c"}, "b": {"d"}, "c": {"a"}, "d": set()}) == ["a", "c", "a"]
    assert circle_in({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == []


def test_no_module_of_tests_imports_another() -> None:
    """What several share is in a rig: a module of tests may be changed without a look at others."""
    tests = Path(__file__).parent
    found = [
        (str(path.relative_to(tests)), name)
        for path in tests.rglob("test_*.py")
        for name in imports_of(path.read_text(encoding="utf-8"), path.stem)
        if name.startswith("tests.") and ".test_" in name and path != Path(__file__)
    ]
    assert found == []
