"""What the README shows is what happens."""

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_the_readme_example_prints_what_it_says(capsys):
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    exec(compile(code, "README.md", "exec"), {})
    (wanted,) = re.findall(r"print\(.*?\) +# (.*)", code)
    assert capsys.readouterr().out.strip() == wanted


def test_every_registered_method_is_in_the_readme():
    from jspec import REGISTRY

    readme = (ROOT / "README.md").read_text()
    assert all(f"`{name}`" in readme for name in REGISTRY)
