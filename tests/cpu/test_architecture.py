"""The rooms and the direction of their imports."""

from __future__ import annotations

import ast
import contextlib
import re
import subprocess
import sys
from pathlib import Path
from re import _constants as codes
from re import _parser as expressions

import pytest

from trainer.config.schema import KEYS, NAME

PACKAGE = Path(__file__).resolve().parents[2] / "trainer"
LEAVES = {"episodes", "errors", "files", "import_utils", "process", "seeding"}
"""Modules and packages that every room may import."""

# What else each room, and each module on top of them, may import, from the bottom to the top. All but `config` itself
# may import `config`.
ALLOWED: dict[str, set[str]] = {
    "config": set(),
    "algorithms": set(),
    "parallel": set(),
    "sandbox": set(),
    "data": set(),
    "rewards": {"data", "sandbox"},
    "metrics": set(),
    "models": {"parallel"},
    "cluster": set(),
    "checkpoint": {"models"},
    "journal": {"checkpoint", "data"},
    "objectives": {"algorithms", "parallel", "sandbox"},
    "workers": {"models", "parallel", "algorithms", "objectives"},
    "generation": {"checkpoint", "cluster", "models", "parallel"},
    "inference": {"cluster", "generation", "models", "parallel", "sandbox"},
    "environments": {"journal", "generation", "data", "sandbox", "rewards"},
    "agents": {"environments", "generation", "data", "sandbox", "rewards"},
    "run": {"checkpoint", "metrics"},
    "learner": {"workers", "cluster", "models", "metrics", "algorithms", "parallel", "objectives"},
    "sources": {"journal", "checkpoint", "environments", "agents", "generation", "data", "rewards", "models",
                "algorithms", "metrics"},
    "trainer": {"journal", "sources", "learner", "objectives", "run", "checkpoint", "metrics", "models", "parallel"},
    "reports": {"run", "checkpoint", "metrics"},
    "view": {"reports", "journal", "run", "checkpoint", "metrics", "data"},
    "tasks": {"journal", "trainer", "sources", "learner", "run", "checkpoint", "metrics", "generation", "environments",
              "data", "rewards", "models", "cluster"},
    "jobs": {"tasks", "reports", "trainer", "run", "checkpoint", "metrics", "models", "cluster"},
    "sweeps": {"reports", "metrics"},
    "plan": {"workers", "cluster", "models", "parallel", "metrics"},
    "main": {"jobs", "tasks", "run", "metrics", "objectives", "parallel", "cluster"},
    "evaluate": {"jobs", "tasks", "sources", "journal", "generation", "environments", "rewards", "run", "checkpoint",
                 "data", "metrics", "models", "parallel"},
    "api": {"main", "run", "checkpoint", "metrics", "models", "cluster"},
    "__main__": set(),
}  # fmt: skip
FORBIDDEN = {"ray", "hydra", "omegaconf", "vllm"}
MAY = {
    "config": {"hydra", "omegaconf"},
    "sweeps": {"hydra", "omegaconf"},
    "cluster": {"ray"},
    "generation": {"vllm"},
    "inference": {"vllm"},
}


def imports(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
    return found


def files_of(room: str) -> list[Path]:
    return sorted((PACKAGE / room).glob("*.py")) or [PACKAGE / f"{room}.py"]


@pytest.mark.parametrize("room", ALLOWED)
def test_a_room_imports_only_from_rooms_below_it(room):
    below = {room} | ALLOWED[room] | LEAVES | ({"config"} if room != "config" else set())
    for file in files_of(room):
        for name in imports(file):
            parts = name.split(".")
            assert parts[0] not in FORBIDDEN - MAY.get(room, set()), f"{file.name} imports {name}"
            if parts[0] == "trainer" and len(parts) > 1:
                assert parts[1] in below, f"{room}/{file.name} imports {name}"


def test_no_room_imports_one_above_it():
    order = list(ALLOWED)
    for room, below in ALLOWED.items():
        assert all(order.index(other) < order.index(room) for other in below), room


def test_leaves_import_leaves_alone_and_in_no_circle():
    imported = {
        leaf: {name.split(".")[1] for file in files_of(leaf) for name in imports(file) if name.startswith("trainer.")}
        - {leaf}
        for leaf in LEAVES
    }
    done: set[str] = set()
    while len(done) < len(LEAVES):
        free = {leaf for leaf, others in imported.items() if others <= done} - done
        assert free, f"these import each other, or a room: { {leaf: imported[leaf] for leaf in LEAVES - done} }"
        done |= free


def test_workers_leave_collectives_to_the_layout():
    for file in (PACKAGE / "workers").glob("*.py"):
        assert "torch.distributed" not in imports(file), file.name
        names = {node.attr for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Attribute)}
        assert not names & {"all_reduce", "all_gather_object", "broadcast_object_list", "get_rank", "get_world_size"}


def test_config_names_no_upper_room():
    for file in files_of("config"):
        texts = [n.value for n in ast.walk(ast.parse(file.read_text())) if isinstance(n, ast.Constant)]
        assert not [t for t in texts if isinstance(t, str) and re.search(r"^trainer(\.\w+)+:\w+$", t)], file.name
        assert "ast.parse(" not in file.read_text() or file.name == "reference.py", f"{file.name} reads source"


MOST_LINES = {
    "trainer main jobs __main__ tasks": (1369, 1400),
    "run process": (3444, 2600),
    "sources generation journal environments agents": (12829, 8500),
    "inference": (1595, 900),
    "rewards": (960, 900),
    "sandbox": (1278, 1200),
    "objectives algorithms learner workers parallel": (5936, 5400),
    "models": (4364, 3400),
    "checkpoint": (4019, 3200),
    "cluster": (2306, 2200),
    "data": (2905, 1900),
    "metrics reports": (2995, 3200),
    "config": (4109, 3200),
    "plan": (2142, 1650),
    "view": (818, 900),
    "evaluate": (620, 500),
    "api": (574, 350),
    "sweeps": (191, 200),
    "files errors episodes import_utils seeding": (1526, 1200),
}
"""Lines of packages and modules that belong together, with docstrings and blank lines: the limit, and the aim. A limit
falls with what goes."""


def test_a_package_does_not_grow():
    known = 0
    for names, (most, _) in MOST_LINES.items():
        files = [file for name in names.split() for file in files_of(name)]
        lines = sum(file.read_text().count("\n") for file in files)
        assert lines <= most, f"{names}: {lines} lines; merge, or delete, before you add"
        known += lines
    assert known == sum(
        file.read_text().count("\n")
        for file in PACKAGE.rglob("*.py")
        if file.parent != PACKAGE or file.stem != "__init__"
    )


MOST_KEYS = 190
"""Rows of `trainer config`, without the copies below `<name>`."""


def test_a_new_key_needs_an_old_one_to_go():
    assert len([key for key in KEYS if NAME not in key]) <= MOST_KEYS


def test_algorithms_are_functions_of_tensors_alone():
    for file in files_of("algorithms"):
        known = ("trainer.algorithms", "trainer.import_utils")  # the latter finds functions of the user
        assert all(name.startswith(known) for name in imports(file) if name.startswith("trainer.")), file.name


def test_every_room_and_module_is_known():
    rooms = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    modules = {path.stem for path in PACKAGE.glob("*.py")} - {"__init__"}
    assert rooms | modules == set(ALLOWED) | LEAVES
    assert len(modules) < 10, "few modules lie beside the packages"


def test_no_expression_has_alternatives_or_repeats_in_a_repeat_that_goes_back():
    # The time of such an expression may grow with a power of the length of a text, or worse.
    def is_slow(items, in_repeat=False):
        for operation, value in items:
            nested, inner = in_repeat, []
            if operation in (codes.MAX_REPEAT, codes.MIN_REPEAT, codes.POSSESSIVE_REPEAT):
                is_long = value[1] > 100 and operation is not codes.POSSESSIVE_REPEAT
                if in_repeat and is_long:
                    return True
                nested, inner = (in_repeat or is_long) and operation is not codes.POSSESSIVE_REPEAT, [value[2]]
            elif operation is codes.BRANCH:
                if in_repeat:
                    return True
                inner = value[1]
            elif operation is codes.SUBPATTERN:
                inner = [value[3]]
            elif operation in (codes.ASSERT, codes.ASSERT_NOT):
                inner = [value[1]]
            if any(is_slow(part, nested) for part in inner):
                return True
        return False

    found = []
    for file in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.JoinedStr):
                text = "".join(part.value if isinstance(part, ast.Constant) else "x" for part in node.values)
            else:
                text = node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""
            if "*" in text or "+" in text:
                with contextlib.suppress(re.error, OverflowError):  # it is no expression
                    found += [(file.name, node.lineno, text)] * is_slow(expressions.parse(text))
    assert found == []


def test_files_and_functions_are_short():
    for path in PACKAGE.rglob("*.py"):
        text = path.read_text()
        assert text.count("\n") <= 600, f"{path} is more than one thing"
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                assert (node.end_lineno or 0) - node.lineno < 70, f"{path}: {node.name} does more than one thing"


@pytest.mark.release
def test_workers_and_checkpoints_run_where_ray_hydra_and_vllm_are_not_installed():
    code = (
        "import sys\n"
        "class Block:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        f"        if name.split('.')[0] in {FORBIDDEN!r}: raise ModuleNotFoundError(name)\n"
        "sys.meta_path.insert(0, Block())\n"
        "import trainer.workers.rank, trainer.checkpoint.manager, trainer.algorithms, trainer.models.tiny\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)


def test_help_needs_no_torch():
    """And signals are heard before it is imported, which takes seconds."""
    modules = ["__main__", "config", "main", "api.running", "reports.diagnose", "view.build"]
    code = "import sys\n" + "".join(f"import trainer.{name}\nassert 'torch' not in sys.modules\n" for name in modules)
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)
