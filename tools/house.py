"""Figures of the code base: sizes, large classes, shared names, writes to other objects, docstrings, circles.

`python tools/house.py [ROOT ...] [--list] [--json]` reads `src/shardwise` of every checkout ROOT, or of this one.
Of several checkouts every cell shows the figures side by side, before → after. Nothing that is read is imported or run.
"""

import argparse
import ast
import io
import json
import re
import statistics
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import UnionType
from typing import TypeGuard

PACKAGE = "shardwise"
CROWDED_FOLDER = 15  # files
LARGE_CLASS = 25  # attributes
LONG_FUNCTION = 60  # lines
LARGEST = 5  # classes shown
# Receivers that are by their name an object of the engine, and endings of such names.
OWNERS = ("unit", "parent", "child", "group", "slot", "call", "parameters", "gradients")
OWNER_ENDINGS = ("_unit", "_group", "_slot")
# Classes of one name and one meaning that are defined several times, each with its reason.
SHARED_NAMES = {
    "Attention": "of each model of the JAX front end, as transformers has it",
    "Box": "torch's half and JAX's",
    "Checkpoints": "torch's half and JAX's",
    "Layers": "of each model of the JAX front end",
    "MLP": "of each model of the JAX front end, as transformers has it",
    "Ranks": "a class, and the protocol by which files of a run know it without torch",
    "Reading": "torch's half and JAX's",
    "ShardwiseStrategy": "Lightning's and Fabric's: both names are promised",
    "TakenStep": "torch's half and JAX's",
    "Trainer": "torch's half, JAX's and the one promised for transformers",
}
TENSOR_FIELDS = ("grad", "requires_grad", "data")  # torch's, whoever holds the tensor
SIZES = (
    *("files", "lines", "code lines", "lines with a comment", "type: ignore"),
    *("writes to other objects", "of these to the engine's"),
)
LAYOUT_TOKENS = (tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)


Function = ast.FunctionDef | ast.AsyncFunctionDef
Definition = Function | ast.ClassDef
Graph = dict[str, set[str]]


@dataclass(frozen=True)
class Module:
    """One file: its path below the package, and its text."""

    path: Path
    text: str

    @cached_property
    def tree(self) -> ast.Module:
        """What it parses to."""
        return ast.parse(self.text)

    @property
    def is_init(self) -> bool:
        """Whether it is the `__init__` of its folder."""
        return self.path.stem == "__init__"

    @property
    def parts(self) -> tuple[str, ...]:
        """The names on its dotted path, `__init__` among them."""
        return (PACKAGE, *self.path.with_suffix("").parts)

    @property
    def name(self) -> str:
        """The name it is imported by."""
        return ".".join(self.parts[:-1] if self.is_init else self.parts)

    @property
    def package(self) -> str:
        """The first folder it is in."""
        return self.path.parts[0] if len(self.path.parts) > 1 else "top"

    @property
    def folder(self) -> str:
        """The folder it is in; of a file right under the package, the file."""
        return (self.path.parent if len(self.path.parts) > 1 else self.path).as_posix()

    @cached_property
    def comments(self) -> list[str]:
        """Its comments, at most one a line."""
        return [token.string for token in self._tokens if token.type == tokenize.COMMENT]

    @cached_property
    def code_lines(self) -> set[int]:
        """Numbers of the lines that hold more than blanks, comments and docstrings."""
        documented = {line for text in ast.walk(self.tree) if _is_bare_string(text) for line in _lines(text)}
        code: set[int] = set()
        for token in self._tokens:
            is_docstring = token.type == tokenize.STRING and token.start[0] in documented
            if not is_docstring and token.type != tokenize.COMMENT and token.type not in LAYOUT_TOKENS:
                code.update(range(token.start[0], token.end[0] + 1))
        return code

    @cached_property
    def _tokens(self) -> list[tokenize.TokenInfo]:
        return list(tokenize.generate_tokens(io.StringIO(self.text).readline))

    def at(self, node: ast.stmt | ast.expr) -> str:
        """Where a part of it stands, as `file:line`."""
        return f"{self.path.as_posix()}:{node.lineno}"


@dataclass(frozen=True)
class Write:
    """An assignment to, or a delete of, a field of an object that is not `self`."""

    at: str
    receiver: ast.expr
    field: str

    @property
    def is_engines(self) -> bool:
        """Whether the object is, by its name, a unit, group, slot or call of the engine."""
        name = last_name(self.receiver).lstrip("_")
        return self.field not in TENSOR_FIELDS and (name in OWNERS or name.endswith(OWNER_ENDINGS))

    def __str__(self) -> str:
        return f"{self.at} {ast.unparse(self.receiver)}.{self.field}"


@dataclass(frozen=True)
class Table:
    """Figures by name. Of all rows only the picked ones are shown; cells above `bold_above` are set in bold."""

    title: str
    headings: tuple[str, ...]
    rows: Mapping[str, tuple[float, ...]]
    picked: Sequence[str] | None = None
    bold_above: int | None = None

    @property
    def labels(self) -> Sequence[str]:
        """Names of the rows that are shown."""
        return list(self.rows) if self.picked is None else self.picked

    def figures(self, label: str) -> dict[str, float]:
        """One row, by heading."""
        return dict(zip(self.headings, self.rows[label], strict=True))

    def cell(self, label: str, column: int) -> str:
        """One figure as text; a dash where there is none."""
        if label not in self.rows:
            return "-"
        value = self.rows[label][column]
        text = f"{value:.1f}" if isinstance(value, float) else str(value)
        return f"**{text}**" if self.bold_above is not None and value > self.bold_above else text


@dataclass(frozen=True)
class House:
    """What is told of a checkout: figures, and lists of what is counted, by title."""

    tables: list[Table]
    lists: dict[str, list[str]]


def _is_bare_string(node: ast.AST) -> TypeGuard[ast.Expr]:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def _lines(node: ast.stmt) -> range:
    return range(node.lineno, (node.end_lineno or node.lineno) + 1)


def inside(node: ast.AST, walls: type[ast.AST] | UnionType) -> Iterator[ast.AST]:
    """Everything below a node, in the order of the text. Nodes of the kinds `walls` are yielded, but not entered."""
    todo = [node]
    while todo:
        current = todo.pop()
        if current is node or not isinstance(current, walls):
            todo.extend(reversed(list(ast.iter_child_nodes(current))))
        if current is not node:
            yield current


def last_name(node: ast.expr) -> str:
    """The name that an expression ends in: `unit` of `a.unit`, of `a.unit[0]` and of `a.unit()`."""
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
        case ast.Subscript(value=inner) | ast.Call(func=inner):
            return last_name(inner)
    return ""


def attributes(kind: ast.ClassDef) -> set[str]:
    """Names that a class assigns on `self` in its own methods, annotates in its body or has in its `__slots__`."""
    names: set[str] = set()
    for statement in kind.body:
        match statement:
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                names.update(_assigned_on_self(statement))
            case ast.Assign(targets=[ast.Name(id="__slots__")]) | ast.AnnAssign(target=ast.Name(id="__slots__")):
                names.update(_strings(statement))
            case ast.AnnAssign(target=ast.Name(id=name)):
                names.add(name)
    return names


def _strings(statement: ast.stmt) -> Iterator[str]:
    for node in ast.walk(statement):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def _assigned_on_self(method: Function) -> Iterator[str]:
    for node in inside(method, ast.ClassDef):
        match node:
            case ast.Attribute(value=ast.Name(id="self"), attr=name, ctx=ast.Store()):
                yield name


def writes(module: Module) -> Iterator[Write]:
    """Every write to a field of an object other than `self`, less those to what the same function has just made."""
    classes = {node.name for node in ast.walk(module.tree) if isinstance(node, ast.ClassDef)} | {"cls"}
    functions = [node for node in inside(module.tree, ast.expr) if isinstance(node, Function)]
    for scope in (module.tree, *functions):
        nodes = list(inside(scope, Function))
        own = {"self", "cls"} | (set() if scope is module.tree else set(made(nodes, classes)))
        for node in nodes:
            for receiver, name in written(node):
                if not (isinstance(receiver, ast.Name) and receiver.id in own):
                    yield Write(module.at(receiver), receiver, name)


def written(node: ast.AST) -> Iterator[tuple[ast.expr, str]]:
    """The object and the field that a node writes, if it does. A name in capitals is a constant, too."""
    match node:
        case ast.Attribute(value=receiver, attr=field, ctx=ast.Store() | ast.Del()):
            yield receiver, field
        case ast.Call(func=ast.Name(id="setattr" | "delattr"), args=[receiver, ast.Constant(value=str(field)), *_]):
            yield receiver, field
        case ast.Call(func=ast.Name(id="setattr" | "delattr"), args=[receiver, ast.Name(id=field), *_]):
            if field.isupper():
                yield receiver, field


def made(nodes: Iterable[ast.AST], classes: set[str]) -> Iterator[str]:
    """Names that are assigned a new object of one of these classes."""
    for node in nodes:
        match node:
            case (
                ast.Assign(targets=[ast.Name(id=name)], value=ast.Call(func=maker))
                | ast.AnnAssign(target=ast.Name(id=name), value=ast.Call(func=maker))
                | ast.NamedExpr(target=ast.Name(id=name), value=ast.Call(func=maker))
            ) if _makes(maker, classes):
                yield name


def _makes(maker: ast.expr, classes: set[str]) -> bool:
    match maker:
        case ast.Name(id=name):
            return name in classes
        case ast.Attribute(value=ast.Name(id=name), attr="__new__"):
            return name in classes or name == "object"
    return False


def public(node: ast.AST, path: str) -> Iterator[tuple[str, Definition]]:
    """Public classes, functions and methods below a module or class, by dotted path; no overloads and no setters."""
    for child in inside(node, Definition):
        if not isinstance(child, Definition) or child.name.startswith("_"):
            continue
        if {last_name(decorator) for decorator in child.decorator_list} & {"overload", "setter", "deleter"}:
            continue
        yield f"{path}.{child.name}", child
        if isinstance(child, ast.ClassDef):
            yield from public(child, f"{path}.{child.name}")


def imports(modules: Sequence[Module], *, at_run_time: bool) -> Graph:
    """Which modules each module imports: anywhere, or only those that importing it imports."""
    names = {module.name for module in modules}
    return {
        module.name: {
            target
            for node in (executed(module.tree) if at_run_time else ast.walk(module.tree))
            for target in imported(node, module, names)
        }
        for module in modules
    }


def executed(tree: ast.Module) -> Iterator[ast.AST]:
    """What runs when a module is imported: no bodies of functions, nothing under `TYPE_CHECKING`."""
    guards = (node for node in ast.walk(tree) if isinstance(node, ast.If) and last_name(node.test) == "TYPE_CHECKING")
    skipped = {node for guard in guards for statement in guard.body for node in ast.walk(statement)}
    return (node for node in inside(tree, Function) if node not in skipped)


def imported(node: ast.AST, module: Module, names: set[str]) -> Iterator[str]:
    """Those of the modules `names` that a statement of a module imports by name."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names if alias.name in names)
    elif isinstance(node, ast.ImportFrom):
        above = module.parts[: -node.level] if node.level else ()
        base = ".".join([*above, *([node.module] if node.module else [])])
        for alias in node.names:
            full = f"{base}.{alias.name}"
            yield from {full if full in names else base} & names


def between_folders(modules: Sequence[Module], graph: Graph) -> Graph:
    """Which sub-packages import which; a module right under the package counts as one.

    A folder's own `__init__` and what is in the folders below it may import each other.
    """
    by_name = {module.name: module for module in modules}
    folders: Graph = {module.folder: set() for module in modules}
    for source, targets in graph.items():
        for target in targets:
            one, other = by_name[source], by_name[target]
            if not _is_init_above(one, other) and not _is_init_above(other, one):
                folders[one.folder].add(other.folder)
    return folders


def _is_init_above(one: Module, other: Module) -> bool:
    return one.is_init and one.path.parent in other.path.parents


def circles(graph: Graph) -> list[list[str]]:
    """Strongly connected components of more than one node, the largest first."""
    reach = {node: _reachable(graph, node) for node in graph}
    components = {frozenset(other for other in reach[node] if node in reach[other]) for node in graph}
    return sorted((sorted(members) for members in components if len(members) > 1), key=lambda c: (-len(c), c))


def _reachable(graph: Graph, start: str) -> set[str]:
    seen: set[str] = set()
    todo = [start]
    while todo:
        new = graph[todo.pop()] - seen
        seen |= new
        todo.extend(new)
    return seen


def read(root: Path) -> list[Module]:
    """Every module of the package in a checkout."""
    base = root / "src" / PACKAGE
    return [Module(path.relative_to(base), path.read_text(encoding="utf-8")) for path in sorted(base.rglob("*.py"))]


def survey(root: Path) -> House:
    """All figures of a checkout."""
    modules = read(root)
    tellers = (told_packages, told_folders, told_classes, told_names, told_functions, told_docstrings, told_circles)
    parts = [tell(modules) for tell in tellers]
    lists = {title: items for part in parts for title, items in part.lists.items()}
    return House([table for part in parts for table in part.tables], lists)


def told_packages(modules: Sequence[Module]) -> House:
    """Sizes, comments and writes to other objects, by package."""
    sizes: dict[str, list[tuple[int, ...]]] = defaultdict(list)
    listed: list[str] = []
    for module in modules:
        found = list(writes(module))
        listed += [str(write) for write in found if write.is_engines]
        for name in ("all", module.package):
            sizes[name].append(_sizes(module, found))
    rows = {name: tuple(map(sum, zip(*each, strict=True))) for name, each in sizes.items()}
    return House([Table("Packages", SIZES, rows)], {"Writes to the engine's objects": listed})


def _sizes(module: Module, found: Sequence[Write]) -> tuple[int, ...]:
    ignores = sum(bool(re.search(r"type:\s*ignore", comment)) for comment in module.comments)
    lines = len(module.text.splitlines())
    engines = sum(write.is_engines for write in found)
    return 1, lines, len(module.code_lines), len(module.comments), ignores, len(found), engines


def told_folders(modules: Sequence[Module]) -> House:
    """Files of every folder, the largest first."""
    counts = Counter({module.path.parent.as_posix(): 0 for module in modules})
    counts.update(module.path.parent.as_posix() for module in modules if not module.is_init)
    rows = {folder: (count,) for folder, count in sorted(counts.items(), key=lambda item: (-item[1], item[0]))}
    title = f"Files per folder, without __init__ (bold: above {CROWDED_FOLDER})"
    return House([Table(title, ("files",), rows, bold_above=CROWDED_FOLDER)], {})


def told_classes(modules: Sequence[Module]) -> House:
    """The largest classes, and those with many attributes."""
    rows: dict[str, tuple[int, ...]] = {}
    for module in modules:
        for kind in ast.walk(module.tree):
            if isinstance(kind, ast.ClassDef):
                code = len(module.code_lines.intersection(_lines(kind)))
                methods = sum(isinstance(statement, Function) for statement in kind.body)
                row = (len(_lines(kind)), code, methods, len(attributes(kind)))
                rows[f"{kind.name} ({module.path.as_posix()})"] = row
    headings = ("lines", "code lines", "methods", "attributes")
    largest = sorted(rows, key=lambda name: -rows[name][1])[:LARGEST]
    many = sorted((name for name in rows if rows[name][3] > LARGE_CLASS), key=lambda name: -rows[name][3])
    return House(
        [
            Table(f"The {LARGEST} largest classes by code lines", headings, rows, largest),
            Table(f"Classes with more than {LARGE_CLASS} attributes", headings, rows, many),
        ],
        {},
    )


def told_names(modules: Sequence[Module]) -> House:
    """Class names, without leading underscores, that are defined more than once, and those of them that may not be."""
    found: dict[str, list[str]] = defaultdict(list)
    for module in modules:
        for kind in ast.walk(module.tree):
            if isinstance(kind, ast.ClassDef):
                found[kind.name.lstrip("_")].append(module.at(kind))
    shared = {name: places for name, places in sorted(found.items()) if len(places) > 1}
    new = {name: places for name, places in shared.items() if name not in SHARED_NAMES}
    rows = {
        "names of several classes": (len(shared), sum(map(len, shared.values()))),
        "of these without a reason": (len(new), sum(map(len, new.values()))),
    }
    listed = [f"{name}: {' '.join(places)}" for name, places in new.items()]
    return House(
        [Table("Class names", ("names", "classes"), rows)],
        {"Class names defined twice without a reason": listed},
    )


def told_functions(modules: Sequence[Module]) -> House:
    """Lengths of functions, docstrings included, and the long ones."""
    found = [
        (len(_lines(node)), f"{module.at(node)} {node.name}")
        for module in modules
        for node in ast.walk(module.tree)
        if isinstance(node, Function)
    ]
    lengths = [length for length, _ in found] or [0]
    long = sorted((item for item in found if item[0] > LONG_FUNCTION), reverse=True)
    title = f"functions over {LONG_FUNCTION} lines"
    rows = {
        "functions": (len(found),),
        title: (len(long),),
        f"{title}, %": (_percent(len(long), len(found)),),
        "median length": (float(statistics.median(lengths)),),
        "longest": (max(lengths),),
    }
    listed = [f"{name}: {length} lines" for length, name in long]
    return House([Table("Functions", ("figure",), rows)], {title.capitalize(): listed})


def told_docstrings(modules: Sequence[Module]) -> House:
    """How many public names have a docstring, and those without."""
    visible = [module for module in modules if not any(part.startswith("_") for part in module.name.split("."))]
    found = [(m, name, node) for m in visible for name, node in public(m.tree, m.name)]
    bare = [f"{m.at(node)} {name}" for m, name, node in found if ast.get_docstring(node) is None]
    rows = {
        "public functions, methods and classes": (len(found),),
        "with a docstring": (len(found) - len(bare),),
        "with a docstring, %": (_percent(len(found) - len(bare), len(found)),),
    }
    return House([Table("Docstrings", ("figure",), rows)], {"Public names without a docstring": bare})


def _percent(part: int, whole: int) -> float:
    return 100 * part / whole if whole else 0.0


def told_circles(modules: Sequence[Module]) -> House:
    """Circles of imports between modules and between folders, and their members."""
    found: dict[str, list[list[str]]] = {}
    for kind, at_run_time in (("at run time", True), ("of all imports", False)):
        graph = imports(modules, at_run_time=at_run_time)
        found[f"modules, {kind}"] = circles(graph)
        found[f"folders, {kind}"] = circles(between_folders(modules, graph))
    headings = ("circles", "members", "members of the largest")
    rows = {name: (len(each), sum(map(len, each)), max(map(len, each), default=0)) for name, each in found.items()}
    lists = {f"Circles: {name}": [" ".join(members) for members in each] for name, each in found.items()}
    return House([Table("Circles of imports", headings, rows)], lists)


def side_by_side(tables: Sequence[Table]) -> str:
    """The same table of every checkout as one in Markdown, in the order of the last."""
    first = tables[0]
    labels = dict.fromkeys(label for table in reversed(tables) for label in table.labels)
    lines = [f"## {first.title}", "", f"| | {' | '.join(first.headings)} |", "|---|" + "---:|" * len(first.headings)]
    for label in labels:
        cells = (" → ".join(table.cell(label, column) for table in tables) for column in range(len(first.headings)))
        lines.append(f"| {label} | {' | '.join(cells)} |")
    return "\n".join([*lines, ""] if labels else [*lines[:2], "None.", ""])


def as_json(houses: Mapping[str, House]) -> str:
    """Every figure by checkout, table, row and column, and every list."""
    figures = {
        root: {
            "tables": {table.title: {label: table.figures(label) for label in table.labels} for table in house.tables},
            "lists": house.lists,
        }
        for root, house in houses.items()
    }
    return json.dumps(figures, indent=2)


def as_markdown(houses: Mapping[str, House], *, with_lists: bool) -> str:
    """Tables side by side, then the lists of each checkout."""
    parts = [f"# Figures of {' → '.join(houses)}", ""]
    parts += [side_by_side(tables) for tables in zip(*(house.tables for house in houses.values()), strict=True)]
    for root, house in houses.items() if with_lists else ():
        for title, items in house.lists.items():
            parts += [f"## {title} ({root})", "", *(f"- {item}" for item in items or ["none"]), ""]
    return "\n".join(parts)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the figures of the checkouts that the command line names."""
    parser = argparse.ArgumentParser(description="Figures of the code base, as Markdown tables.")
    parser.add_argument("roots", metavar="ROOT", nargs="*", type=Path, default=[Path(__file__).resolve().parent.parent])
    parser.add_argument("--list", action="store_true", help="also name what is counted, with file and line")
    parser.add_argument("--json", action="store_true", help="print everything as JSON instead")
    given = parser.parse_args(arguments)
    for root in given.roots:
        if not any((root / "src" / PACKAGE).rglob("*.py")):
            parser.error(f"{root} has no modules in src/{PACKAGE}")
    houses = {str(root): survey(root) for root in given.roots}
    print(as_json(houses) if given.json else as_markdown(houses, with_lists=given.list))


if __name__ == "__main__":
    main()
