"""Imports go downward only, and torch stays in the bridge."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "architecture.md").read_text()


def levels(package: str) -> dict[str, int]:
    """Reads a table of docs/architecture.md: the level of each module or folder of a package."""
    rows = PAGE.split(f"| {package} | has |")[1].split("\n\n")[0].splitlines()[2:]
    names = [re.findall(r"`(\w+)`", row.split("|")[1]) for row in rows]
    return {name: level for level, some in enumerate(names) for name in some}


LEVELS = {package: levels(package) for package in ("jspec", "torch_bridge")}
FILES = [path for package in LEVELS for path in sorted((ROOT / package).rglob("*.py"))]


def imported(path: Path) -> set[str]:
    """Names the modules that a file imports, in full."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}: relative import"
            names |= {f"{node.module}.{alias.name}" for alias in node.names} | {node.module}
    return names


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_go_downward_only(path):
    package, part = path.relative_to(ROOT).parts[:2]
    part, level = part.removesuffix(".py"), LEVELS[package]
    if part == "__init__":
        return
    assert part in level, f"{path.name} is in no table of docs/architecture.md: add it there"
    for name in imported(path):
        owner, other = [*name.split("."), ""][:2]
        if owner == package and other in level and other != part:
            assert level[other] < level[part], f"{part} imports {name}, which is not below it"


@pytest.mark.parametrize("package", LEVELS)
def test_the_architecture_page_names_every_room(package):
    there = {path.stem for path in (ROOT / package).iterdir() if path.suffix in ("", ".py")}
    assert set(LEVELS[package]) == there - {"__init__", "__pycache__", "py.typed"} - {"py"}


@pytest.mark.parametrize(
    "path", sorted((ROOT / "jspec").rglob("*.py")), ids=lambda p: str(p.relative_to(ROOT))
)
def test_torch_and_vllm_appear_in_the_bridge_only(path):
    roots = {name.split(".")[0] for name in imported(path)}
    # The command hands folders that PyTorch pickled to the bridge, when it meets one.
    allowed = {"torch_bridge"} if path == ROOT / "jspec" / "cli" / "convert.py" else set()
    assert not roots & {"torch", "vllm", "torch_bridge"} - allowed


@pytest.mark.parametrize(("package", "most"), [("jspec", 14), ("torch_bridge", 4)])
def test_few_modules_stand_beside_the_rooms(package, most):
    assert len(list((ROOT / package).glob("*.py"))) <= most
