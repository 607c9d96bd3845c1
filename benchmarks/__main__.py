"""Start a benchmark, from any directory and without an installation.

python benchmarks                     # the list
python benchmarks NAME [options]      # options: python benchmarks NAME --help
torchrun --nproc-per-node=2 benchmarks NAME [options]      # for those whose first lines say so
"""

from __future__ import annotations

import ast
import importlib
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
BENCHMARKS = {
    "steps": (
        "peers",
        "overhead",
        "overhead_pairs",
        "launches",
        "initialisation",
        "abandoned",
        "faults",
        "soak",
        "same_bits",
        "context_parallel",
        "tensor_parallel",
        "axis_bytes",
        "uneven_tensor",
        "experts",
        "seeing",
        "hosts",
        "uneven",
    ),
    "checkpoints": ("checkpoint", "async_save", "stream"),
    "plans": (
        "planner",
        "planner_here",
        "planner_search",
        "planner_speed",
        "architectures",
        "exposed",
        "exposed_changes",
    ),
    "less_memory": ("offload", "offload_15b", "less_state", "few_bits", "lora_memory", "whole_matrix", "generate"),
    "compare": ("compare",),
    "doors": ("integrations", "fsdp2_tests", "torchtitan_llama", "jax_step", "hub", "export", "missions"),
    "accelerator": ("gpu",),
}
"""By room; each is a module with `main`, which takes its options from `sys.argv` and returns a status or None."""


def about(room: str, name: str) -> str:
    """Return the first sentence of a benchmark's docstring, without importing it."""
    text = ast.get_docstring(ast.parse((HERE / room / f"{name}.py").read_text(encoding="utf-8"))) or ""
    return " ".join(text.partition("\n\n")[0].split())


def main() -> int:
    name, *options = sys.argv[1:] or [""]
    rooms = {one: room for room, names in BENCHMARKS.items() for one in names}
    if name in rooms:
        sys.path[:1] = [str(HERE.parent), str(HERE.parent / "src")]  # the first was this folder
        sys.argv = [f"benchmarks {name}", *options]
        return importlib.import_module(f"benchmarks.{rooms[name]}.{name}").main() or 0
    if name not in {"", "-h", "--help"}:
        print(f"unknown benchmark {name!r}; known are {', '.join(rooms)}", file=sys.stderr)
        return 2
    print(str(__doc__).strip())
    for room, names in BENCHMARKS.items():
        print(f"\n{room}")
        for one in names:
            print(f"  {one:17} {about(room, one)}")
    return 0


if __name__ == "__main__":
    try:
        raise SystemExit(main())
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        raise SystemExit(130) from None
