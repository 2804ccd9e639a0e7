"""Examples, names, tables and links of the documents are correct."""

import importlib
import inspect
import json
import pkgutil
import re
from pathlib import Path

import pytest

import jspec
from benchmarks import adaptive

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
LINKED = [*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"]
PUBLIC = (
    "jspec",
    "jspec.checkpoint",
    "jspec.runtime.decode",
    "jspec.metadata",
    "jspec.metrics",
    "jspec.pallas",
    "jspec.verification.rejection",
    "jspec.runtime.replay",
    "jspec.verification.sampling",
    "jspec.suffix",
    "jspec.runtime.target",
    "jspec.text",
    "jspec.verification.greedy",
)
BRIDGE = (
    "torch_bridge",
    "torch_bridge.convert",
    "torch_bridge.proposers.ngram",
    "torch_bridge.ops",
    "torch_bridge.vllm_plugin",
)


def blocks(page: Path) -> list[str]:
    """Lists the Python examples of a page."""
    return re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)


def reference() -> set[str]:
    """Lists the names whose docstrings the reference pages show."""
    pages = sorted((ROOT / "docs" / "reference").glob("*.md"))
    return set(re.findall(r"^::: ([\w.]+)$", "\n".join(p.read_text() for p in pages), re.MULTILINE))


def path_of(page: Path) -> str:
    """Names a page from the root on."""
    return str(page.relative_to(ROOT))


def names_in_code_style(text: str) -> set[str]:
    """Lists the dotted names of ours that stand between backticks, calls of them too."""
    return set(re.findall(r"`((?:jspec|torch_bridge)(?:\.\w+)+)[`(]", text))


def names_in_examples(page: Path) -> set[str]:
    """Lists what the examples of a page import from jspec, and use of modules so imported."""
    code, found = "\n".join(blocks(page)), set()
    for module, imported in re.findall(
        r"^from (jspec[\w.]*) import ([\w, ]+)$", code, re.MULTILINE
    ):
        for name in (f"{module}.{name}" for name in imported.split(", ")):
            if inspect.ismodule(pkgutil.resolve_name(name)):
                used = re.findall(rf"(?<![\w.]){name.split('.')[-1]}\.(\w+)", code)
                found |= {f"{name}.{attribute}" for attribute in used}
            else:
                found.add(name)
    return found


def public_names(module: str) -> dict[str, object]:
    """Lists `__all__`, or else what the module itself defines without an underscore."""
    imported = importlib.import_module(module)
    found = vars(imported)
    listed = found.get("__all__") or [
        name
        for name, value in found.items()
        if not name.startswith("_") and getattr(value, "__module__", None) == module
    ]
    return {name: getattr(imported, name) for name in listed}  # some come when asked for


@pytest.fixture
def registry():
    """A method that an example registers is gone after it."""
    before = dict(jspec.REGISTRY)
    yield
    jspec.REGISTRY.clear()
    jspec.REGISTRY.update(before)


@pytest.mark.parametrize("page", [p for p in PAGES if blocks(p)], ids=path_of)
def test_the_examples_of_a_page_run(page, capsys, registry):
    names = {"__name__": "example"}
    if any("torch" in code for code in blocks(page)):
        pytest.importorskip("torch")
    for code in blocks(page):
        exec(compile(code, page.name, "exec"), names)
        printed = capsys.readouterr().out
        for wanted in re.findall(r"^print\(.*?\) +# (.*)$", code, re.MULTILINE):
            assert wanted in printed


@pytest.mark.parametrize("page", ["README.md", "docs/which-drafter.md"])
def test_every_registered_method_is_in_the_tables(page):
    text = (ROOT / page).read_text()
    assert not [name for name in jspec.REGISTRY if f"`{name}`" not in text]


@pytest.mark.parametrize("module", BRIDGE)
def test_every_public_name_of_the_bridge_is_in_the_reference(module):
    pytest.importorskip("torch")
    shown = reference()
    names = set(public_names(module)) - {"dlpack", "ops"}  # which are modules
    assert names
    assert not [n for n in names if not {f"{module}.{n}", f"torch_bridge.{n}"} & shown]


@pytest.mark.parametrize("module", PUBLIC)
def test_every_public_name_is_in_the_reference(module):
    """A name that `jspec` has too stands there under its short form."""
    shown = reference()
    names = public_names(module)
    assert names
    missing = [
        name
        for name, value in names.items()
        if f"{module}.{name}" not in shown
        and not (f"jspec.{name}" in shown and getattr(jspec, name) is value)
    ]
    assert not missing


def test_every_config_of_a_method_is_in_the_reference():
    configs = {f"jspec.{proposer.Config.__name__}" for proposer in jspec.REGISTRY.values()}
    assert configs <= reference()


def test_every_name_in_the_reference_exists_and_has_a_docstring():
    """Constants have theirs under the assignment, where `mkdocs build` finds it."""
    for name in sorted(reference()):
        if name.startswith("torch_bridge"):
            pytest.importorskip("torch")
        value = pkgutil.resolve_name(name)
        assert not callable(value) or value.__doc__, name


@pytest.mark.parametrize("page", LINKED, ids=path_of)
def test_every_link_leads_to_a_page_and_a_heading(page):
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if re.match(r"https?://", link):
            continue
        path, _, anchor = link.partition("#")
        leads_to = page.parent / path if path else page
        assert leads_to.exists(), link
        if anchor:
            headings = re.findall(r"^#+ (.*)$", leads_to.read_text(), re.MULTILINE)
            slugs = [re.sub(r"[^\w\- ]", "", h).strip().lower().replace(" ", "-") for h in headings]
            assert anchor in slugs, link


def test_every_page_is_in_the_navigation():
    navigation = (ROOT / "mkdocs.yml").read_text()
    docs = ROOT / "docs"
    assert all(f" {page.relative_to(docs)}\n" in navigation for page in PAGES[1:])


@pytest.mark.parametrize("page", PAGES, ids=path_of)
def test_every_name_of_ours_in_a_page_exists_and_is_in_the_reference(page):
    """In the reference under this name or another one of the same object; modules need no line."""
    shown = reference()
    names = names_in_code_style(page.read_text())
    if page.name != "adding-a-proposer.md":  # its example is a module of jspec
        names |= names_in_examples(page)
    for name in sorted(names - shown):
        package, short = name.split(".")[0], name.split(".")[-1]
        if package == "torch_bridge":
            pytest.importorskip("torch")
        value = pkgutil.resolve_name(name)
        same = f"{package}.{short}" if f"{package}.{short}" in shown else None
        assert inspect.ismodule(value) or (same and pkgutil.resolve_name(same) is value), name


@pytest.mark.parametrize("page", ["README.md", "docs/which-drafter.md"])
def test_the_table_of_default_drafting_has_the_measured_figures(page):
    results = json.loads((ROOT / "benchmarks" / "results" / "adaptive-cpu.json").read_text())
    assert "\n".join(adaptive.table(results["cells"])) in (ROOT / page).read_text()
    assert all(cell["identical_to_plain"] for cell in results["cells"])
