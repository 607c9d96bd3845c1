"""Figures of small code bases, counted by hand."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from textwrap import dedent

import pytest

from tools.house import SHARED_NAMES, House, main, survey

Figures = dict[str, float]
Build = Callable[[Mapping[str, str]], House]


@pytest.fixture
def house(tmp_path: Path) -> Build:
    def build(sources: Mapping[str, str]) -> House:
        return survey(checkout(tmp_path, sources))

    return build


def checkout(root: Path, sources: Mapping[str, str]) -> Path:
    """A checkout with these files in its package."""
    for name, text in sources.items():
        path = root / "src" / "shardwise" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(dedent(text), encoding="utf-8")
    return root


def figures(told: House, title: str) -> dict[str, Figures]:
    """The shown rows of the one table whose title begins so."""
    (table,) = (table for table in told.tables if table.title.startswith(title))
    return {label: table.figures(label) for label in table.labels}


def figure(told: House, title: str, label: str) -> float:
    return figures(told, title)[label]["figure"]


COMMENTED = '''\
"""A module
of two lines."""

import os  # why

# a comment alone


def f(a="x"):
    """Doc."""
    return """

not a docstring"""  # type: ignore[no-any-return]


def g(): """Doc on the line of the def."""
'''


def test_code_lines_have_no_blanks_comments_and_docstrings(house: Build) -> None:
    row = figures(house({"a.py": COMMENTED}), "Packages")["all"]
    assert row["lines"] == 16
    assert row["code lines"] == len(["import", "def f", *["return"] * 3, "def g"])


def test_lines_with_a_comment_and_ignored_types_are_counted(house: Build) -> None:
    row = figures(house({"a.py": COMMENTED, "b.py": 'x = "# type: ignore"\n'}), "Packages")["all"]
    assert (row["lines with a comment"], row["type: ignore"]) == (3, 1)


def test_a_package_is_the_first_folder(house: Build) -> None:
    told = house({"a.py": "x = 1\n", "p/__init__.py": "", "p/b.py": "y = 1\nz = 2\n", "p/q/c.py": "w = 1\n"})
    counts = {name: (row["files"], row["lines"]) for name, row in figures(told, "Packages").items()}
    assert counts == {"all": (4, 4), "top": (1, 1), "p": (3, 3)}


def test_folders_are_counted_without_init_the_largest_first(house: Build) -> None:
    told = house({"__init__.py": "", "p/__init__.py": "", "p/b.py": "", "p/c.py": "", "p/q/d.py": ""})
    assert [(name, row["files"]) for name, row in figures(told, "Files").items()] == [("p", 2), ("p/q", 1), (".", 0)]


@pytest.mark.parametrize(("count", "shown"), [(15, "| p | 15 |"), (16, "| p | **16** |")])
def test_folders_above_fifteen_files_are_bold(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], count: int, shown: str
) -> None:
    main([str(checkout(tmp_path, {f"p/m{i}.py": "" for i in range(count)}))])
    assert shown in capsys.readouterr().out.splitlines()


def test_an_attribute_is_counted_once_however_it_is_declared(house: Build) -> None:
    told = house(
        {
            "a.py": """\
            class Thing:
                __slots__ = ("slotted", "both")
                annotated: int
                plain = 1

                def __init__(self):
                    self.both, self.pair = 1, 2

                    def later():
                        self.nested += 1

                    class Other:
                        def f(self):
                            self.others = 1

                def f(self, other):
                    self.both = 2
                    self.pair.inner = other.foreign = 1
                    del self.deleted
                    return self.read
            """
        }
    )
    row = figures(told, "The 5 largest")["Thing (a.py)"]
    assert row["attributes"] == len({"slotted", "both", "annotated", "pair", "nested"})
    assert (row["methods"], row["lines"], row["code lines"]) == (2, 20, 16)


def test_the_five_largest_classes_are_shown_by_code_lines(house: Build) -> None:
    sources = {f"m{n}.py": f"class C{n}:\n" + "    x = 1\n" * n for n in range(1, 8)}
    told = house({**sources, "wordy.py": "class Wordy:\n" + "    # x\n" * 20 + "    x = 1\n"})
    assert list(figures(told, "The 5 largest")) == [f"C{n} (m{n}.py)" for n in (7, 6, 5, 4, 3)]


def test_classes_are_listed_from_26_attributes_on(house: Build) -> None:
    classes = {n: f"class C{n}:\n" + "".join(f"    x{i}: int\n" for i in range(n)) for n in (25, 26)}
    assert list(figures(house({"a.py": classes[25] + classes[26]}), "Classes with more")) == ["C26 (a.py)"]


@pytest.mark.parametrize(
    ("statement", "count"),
    [
        ("unit.state = 1", 1),
        ("self._group.count += 1", 1),
        ("unit.state: int = 1", 1),
        ("del slot.x", 1),
        ("a.x, (b.y, *c.z) = d", 3),
        ("a.x = b.y = 1", 2),
        ("for a.x in b: pass", 1),
        ("setattr(unit, 'state', 1)", 1),
        ("setattr(unit, STATE, 1)", 1),
        ("module.config = 1", 1),
        ("setattr(unit, name, 1)", 0),
        ("setattr(self, 'state', 1)", 0),
        ("self.state = 1", 0),
        ("cls.state = 1", 0),
        ("unit.states[0] = 1", 0),
        ("unit.states.append(1)", 0),
        ("unit = self.unit", 0),
    ],
)
def test_writes_to_fields_of_other_objects_are_counted(house: Build, statement: str, count: int) -> None:
    row = figures(house({"a.py": f"def f(self, unit):\n    {statement}\n"}), "Packages")["top"]
    assert row["writes to other objects"] == count


@pytest.mark.parametrize(
    ("statement", "count"),
    [
        ("thing = Thing()", 0),
        ("thing: Thing = Thing()", 0),
        ("thing = cls()", 0),
        ("thing = cls.__new__(cls)", 0),
        ("thing = object.__new__(Thing)", 0),
        ("thing = Elsewhere()", 1),
        ("thing = Elsewhere.__new__(Elsewhere)", 1),
        ("thing = find()", 1),
        ("other = Thing()", 1),
        ("def inner():\n        thing = Thing()", 1),
    ],
)
def test_writes_to_what_the_function_has_made_are_not_counted(house: Build, statement: str, count: int) -> None:
    told = house({"a.py": f"class Thing: ...\ndef f(cls, thing):\n    {statement}\n    thing.x = 1\n"})
    assert figures(told, "Packages")["all"]["writes to other objects"] == count


def test_a_write_of_a_module_to_what_it_has_made_is_counted(house: Build) -> None:
    told = house({"a.py": "class Thing: ...\nthing = Thing()\nthing.x = 1\n"})
    assert figures(told, "Packages")["all"]["writes to other objects"] == 1


@pytest.mark.parametrize(
    ("target", "is_engines"),
    [
        ("unit.x", True),
        ("self._child.x", True),
        ("self.own_slot.x", True),
        ("calls.call.x", True),
        ("group(0).x", True),
        ("slot[0].x", True),
        ("unit.module.x", False),
        ("units.x", False),
        ("subunit.x", False),
        ("engine.x", False),
        ("child.grad", False),
        ("parent.requires_grad", False),
    ],
)
def test_the_engines_objects_are_known_by_name(house: Build, target: str, is_engines: bool) -> None:
    told = house({"p/a.py": f"def f(self):\n    {target} = 1\n"})
    row = figures(told, "Packages")["p"]
    assert (row["writes to other objects"], row["of these to the engine's"]) == (1, is_engines)
    assert told.lists["Writes to the engine's objects"] == ([f"p/a.py:2 {target}"] if is_engines else [])


def function(name: str, lines: int) -> str:
    return f"def {name}():\n" + "    x = 1\n" * (lines - 1)


def test_a_class_name_is_counted_where_it_is_defined_twice_whatever_its_underscores(house: Build) -> None:
    told = house({"a.py": "class Part: ...\nclass Box: ...", "b/c.py": "class _Part: ...", "d.py": "class Box: ..."})
    assert figures(told, "Class names") == {
        "names of several classes": {"names": 2, "classes": 4},
        "of these without a reason": {"names": 1, "classes": 2},
    }
    assert told.lists["Class names defined twice without a reason"] == ["Part: a.py:1 b/c.py:1"]


def test_no_class_name_of_the_package_is_defined_twice_without_a_reason() -> None:
    told = survey(Path(__file__).resolve().parents[2])
    assert told.lists["Class names defined twice without a reason"] == [], "one word, one meaning"
    assert figures(told, "Class names")["names of several classes"]["names"] == len(SHARED_NAMES), (
        "one is no longer shared"
    )


def test_functions_over_sixty_lines_are_listed_with_their_length(house: Build) -> None:
    told = house({"a.py": function("f", 60) + function("g", 61), "b.py": function("h", 70) + function("i", 2)})
    assert told.lists["Functions over 60 lines"] == ["b.py:1 h: 70 lines", "a.py:61 g: 61 lines"]
    assert figure(told, "Functions", "functions over 60 lines") == 2
    assert figure(told, "Functions", "functions over 60 lines, %") == 50
    assert figure(told, "Functions", "longest") == 70
    assert figure(told, "Functions", "median length") == 60.5


def test_a_function_is_as_long_as_its_def_with_docstring_and_what_is_in_it(house: Build) -> None:
    told = house({"a.py": '@cache\ndef f():\n    """Doc.\n\n    More."""\n    def g():\n        pass\n\n\n'})
    assert figure(told, "Functions", "functions") == 2
    assert figure(told, "Functions", "longest") == 6
    assert figure(told, "Functions", "median length") == 4


DOCUMENTED = '''\
def said():
    """Doc."""
    def nested(): ...

def unsaid(): ...

def _private(): ...

if True:
    class Thing:
        """Doc."""
        def __init__(self): ...
        @overload
        def f(self): ...
        @property
        def p(self): ...
        @p.setter
        def p(self, value): ...

class _Hidden:
    def f(self): ...
'''


def test_public_names_without_a_docstring_are_listed(house: Build) -> None:
    told = house({"p/__init__.py": "def g(): ...\n", "p/a.py": DOCUMENTED, "p/_b.py": "def f(): ...\n"})
    assert told.lists["Public names without a docstring"] == [
        "p/__init__.py:1 shardwise.p.g",
        "p/a.py:5 shardwise.p.a.unsaid",
        "p/a.py:16 shardwise.p.a.Thing.p",
    ]
    assert figure(told, "Docstrings", "public functions, methods and classes") == 5
    assert figure(told, "Docstrings", "with a docstring") == 2
    assert figure(told, "Docstrings", "with a docstring, %") == 40


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("from . import b", "from .a import x"),
        ("from .b import x", "import shardwise.p.a"),
        ("from ..p import b", "from shardwise.p.a import *"),
        ("try:\n    from shardwise.p import b\nexcept ImportError: ...", "class C:\n    from . import a"),
    ],
)
def test_a_circle_of_modules_is_found_however_they_import(house: Build, one: str, other: str) -> None:
    told = house({"__init__.py": "", "p/__init__.py": "", "p/a.py": one, "p/b.py": other, "p/c.py": "from . import a"})
    assert told.lists["Circles: modules, at run time"] == ["shardwise.p.a shardwise.p.b"]
    assert figures(told, "Circles")["modules, at run time"]["members"] == 2


@pytest.mark.parametrize(
    "late",
    [
        "def f():\n    from . import a",
        "if TYPE_CHECKING:\n    from . import a",
        "if typing.TYPE_CHECKING:\n    from . import a",
    ],
)
def test_late_and_typing_imports_make_no_circle_at_run_time(house: Build, late: str) -> None:
    told = house({"p/a.py": "from . import b", "p/b.py": late})
    assert told.lists["Circles: modules, at run time"] == []
    assert told.lists["Circles: modules, of all imports"] == ["shardwise.p.a shardwise.p.b"]


def test_an_import_beside_type_checking_is_one_at_run_time(house: Build) -> None:
    told = house({"p/a.py": "from . import b", "p/b.py": "if TYPE_CHECKING:\n    x = 1\nelse:\n    from . import a"})
    assert told.lists["Circles: modules, at run time"] == ["shardwise.p.a shardwise.p.b"]


def test_a_package_is_in_a_circle_only_where_it_is_imported_by_name(house: Build) -> None:
    implied = {"p/__init__.py": "from .a import x", "p/a.py": "from .b import y", "p/b.py": ""}
    assert house(implied).lists["Circles: modules, at run time"] == []
    named = house({**implied, "p/b.py": "from . import x"})
    assert named.lists["Circles: modules, at run time"] == ["shardwise.p shardwise.p.a shardwise.p.b"]


def test_a_circle_of_folders_needs_no_circle_of_modules(house: Build) -> None:
    told = house(
        {"p/a.py": "from ..q import c", "p/b.py": "", "q/c.py": "", "q/d.py": "def f():\n    from ..p import b"}
    )
    assert told.lists["Circles: modules, of all imports"] == []
    assert told.lists["Circles: folders, of all imports"] == ["p q"]
    assert told.lists["Circles: folders, at run time"] == []


def test_a_folder_and_the_folders_in_it_may_meet_in_its_init_only(house: Build) -> None:
    down = {"p/__init__.py": "from .q.c import x", "p/a.py": "", "p/b.py": "", "p/q/c.py": "from ..a import y"}
    assert house(down).lists["Circles: folders, at run time"] == []
    up = {**down, "p/__init__.py": "x = 1", "p/b.py": "from .q import c", "p/q/c.py": "from .. import x"}
    assert house(up).lists["Circles: folders, at run time"] == []
    round_it = {**down, "p/b.py": "from .q import c"}
    assert house(round_it).lists["Circles: folders, at run time"] == ["p p/q"]


def test_modules_right_under_the_package_make_no_circle_of_their_neighbours(house: Build) -> None:
    told = house(
        {"__init__.py": "", "__main__.py": "from .p import a", "errors.py": "", "p/a.py": "from ..errors import x"}
    )
    assert told.lists["Circles: folders, at run time"] == []


def test_two_checkouts_stand_side_by_side(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = checkout(tmp_path / "before", {"old/a.py": "x = 1\n"})
    after = checkout(tmp_path / "after", {"new/a.py": "x = 1\ny = 2\n"})
    main([str(before), str(after)])
    lines = capsys.readouterr().out.splitlines()
    assert "| all | 1 → 1 | 1 → 2 | 1 → 2 | 0 → 0 | 0 → 0 | 0 → 0 | 0 → 0 |" in lines
    assert {"| old | 1 → - |", "| new | - → 1 |"} <= set(lines)


def test_lists_are_printed_where_they_are_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = str(checkout(tmp_path, {"a.py": "def f(unit):\n    unit.x = 1\n"}))
    main([root])
    assert "- a.py:2 unit.x" not in capsys.readouterr().out
    main([root, "--list"])
    assert "- a.py:2 unit.x" in capsys.readouterr().out.splitlines()


def test_json_has_the_tables_and_the_lists(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = str(checkout(tmp_path, {"a.py": "def f(unit):\n    unit.x = 1\n"}))
    main([root, "--json"])
    told = json.loads(capsys.readouterr().out)[root]
    assert told["tables"]["Packages"]["top"]["lines"] == 2
    assert told["lists"]["Writes to the engine's objects"] == ["a.py:2 unit.x"]


def test_a_folder_without_the_package_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([str(tmp_path)])
    assert f"{tmp_path} has no modules in src/shardwise" in capsys.readouterr().err
