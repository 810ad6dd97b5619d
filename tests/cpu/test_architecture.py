"""The rooms and the direction of their imports."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "trainer"
LEAVES = {
    "config",
    "documents",
    "durable",
    "errors",
    "failpoints",
    "hub",
    "plugins",
    "keyed",
    "output",
    "shared_memory",
    "signals",
}
ALLOWED = {
    "config": {"config"},
    "algorithms": {"algorithms"},
    "parallel": {"parallel"},
    "models": {"models", "parallel"},
    "checkpoint": {"checkpoint", "models"},
    "workers": {"workers", "models", "parallel", "algorithms"},
    "rewards": {"rewards"},
    "metrics": {"metrics"},
    "run": {"run", "checkpoint", "metrics", "models"},
    "data": {"data", "parallel"},
    "generation": {"generation", "cluster", "workers", "models", "parallel"},
    "cluster": {"cluster", "workers", "models", "parallel"},
}
FORBIDDEN = {"ray", "hydra", "omegaconf", "vllm"}
MAY = {"config": {"hydra", "omegaconf"}, "cluster": {"ray"}, "generation": {"vllm"}}


def imports(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
    return found


@pytest.mark.parametrize("room", sorted(ALLOWED))
def test_a_room_imports_only_from_rooms_below_it(room):
    files = list((PACKAGE / room).glob("*.py"))
    assert files
    for file in files:
        for name in imports(file):
            parts = name.split(".")
            assert parts[0] not in FORBIDDEN - MAY.get(room, set()), f"{file.name} imports {name}"
            if parts[0] == "trainer" and len(parts) > 1:
                assert parts[1] in ALLOWED[room] | LEAVES, f"{room}/{file.name} imports {name}"


def test_workers_leave_collectives_to_the_layout():
    for file in (PACKAGE / "workers").glob("*.py"):
        assert "torch.distributed" not in imports(file), file.name
        names = {node.attr for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Attribute)}
        assert not names & {"all_reduce", "all_gather_object", "broadcast_object_list", "get_rank", "get_world_size"}


def test_every_room_is_known():
    rooms = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    assert rooms == set(ALLOWED)


def test_workers_and_checkpoints_run_where_ray_hydra_and_vllm_are_not_installed():
    code = (
        "import sys\n"
        "class Block:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        f"        if name.split('.')[0] in {FORBIDDEN!r}: raise ModuleNotFoundError(name)\n"
        "sys.meta_path.insert(0, Block())\n"
        "import trainer.workers.rank, trainer.checkpoint.manager, trainer.algorithms, trainer.models.tiny\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


@pytest.mark.parametrize("module", ["trainer.config", "trainer.main", "trainer.sft"])
def test_help_needs_no_torch(module):
    """And signals are heard before it is imported, which takes seconds."""
    code = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
