"""Whether shardwise can be imported, module by module, and whether torch has the private names that it uses."""

import importlib
import pkgutil
from collections.abc import Iterator

from benchmarks.accelerator.bench import Bench, Cases
from benchmarks.accelerator.private_names import NAMES, missing
from benchmarks.accelerator.row import Row, correct

_SHOWN = 4
_ELSEWHERE = ("shardwise.jax", "shardwise.cli.process.worker")
"""Another framework's; and programs rather than modules."""


def names(bench: Bench) -> Iterator[Row]:
    gone = missing()
    yield correct(
        "private names of torch",
        not gone,
        f"{len(NAMES) - len(gone)} of {len(NAMES)} found",
        "all",
        f"missing: {', '.join(gone)}" if gone else "",
    )


def public(bench: Bench) -> Iterator[Row]:
    shardwise = importlib.import_module("shardwise")
    for name in shardwise.__all__:
        getattr(shardwise, name)
    yield correct("import shardwise", True, f"{len(shardwise.__all__)} names", "all")


def modules(bench: Bench) -> Iterator[Row]:
    """Every module of shardwise. One that wants a package that is not installed is no failure."""
    shardwise = importlib.import_module("shardwise")
    found = [module.name for module in pkgutil.walk_packages(shardwise.__path__, "shardwise.", onerror=lambda _: None)]
    imported, wanted, broken = 0, set[str](), list[str]()
    for name in found:
        if name.startswith(_ELSEWHERE):
            continue
        try:
            importlib.import_module(name)
            imported += 1
        except ModuleNotFoundError as error:
            package = (error.name or "").split(".")[0]
            if package in {"", "torch", "shardwise"}:
                broken.append(f"{name}: {error}")
            wanted.add(package)
        except Exception as error:
            broken.append(f"{name}: {type(error).__name__}: {error}")
    reason = "; ".join(broken[:_SHOWN]) or (f"others want {', '.join(sorted(wanted))}" if wanted else "")
    yield correct("all modules", not broken, f"{imported} imported", "none broken", reason)


CASES: Cases = {"names": names, "public": public, "modules": modules}
