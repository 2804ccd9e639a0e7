"""What the documents show is what happens."""

import pkgutil
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def blocks(page: Path) -> list[str]:
    """Lists the Python examples of a page."""
    return re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)


@pytest.mark.parametrize("page", [p for p in PAGES if blocks(p)], ids=lambda p: p.name)
def test_the_examples_of_a_page_run(page, capsys):
    names = {"__name__": "example"}
    for code in blocks(page):
        exec(compile(code, page.name, "exec"), names)
        printed = capsys.readouterr().out
        for wanted in re.findall(r"^print\(.*?\) +# (.*)$", code, re.MULTILINE):
            assert wanted in printed


def test_every_registered_method_is_in_the_readme():
    from jspec import REGISTRY

    readme = (ROOT / "README.md").read_text()
    assert all(f"`{name}`" in readme for name in REGISTRY)


def test_every_page_is_in_the_navigation():
    navigation = (ROOT / "mkdocs.yml").read_text()
    assert all(f" {page.name}\n" in navigation for page in PAGES[1:])


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_every_name_of_ours_in_a_page_exists(page):
    for name in set(re.findall(r"`(jspec(?:\.\w+)+)`", page.read_text())):
        pkgutil.resolve_name(name)
