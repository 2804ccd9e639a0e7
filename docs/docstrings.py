"""Prepares docstrings, which are written as plain text, for the Markdown of the reference pages."""

import re
import textwrap
from typing import Any

import griffe


class PlainDocstrings(griffe.Extension):
    """Splits entries that name several things, and marks worked rows and examples as code."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rewrites the docstring of an object, before its sections are parsed."""
        if not obj.docstring:
            return
        text = re.sub(r"^Example:$", "Examples:", obj.docstring.value, flags=re.M)
        # "TypeError: a. ValueError: b." -> an entry each
        text = re.sub(r"(?<=\.) (\w+(?:Error|Warning)): ", r"\n  \1: ", text)
        # "  top_k, top_p: a" -> "  top_k,top_p: a": what follows a space is parsed as a type
        names = re.compile(r"^  \w+(?:, \w+)+:", re.M)
        text = names.sub(lambda m: "  " + m[0].replace(" ", ""), text)
        # "In: [[1 2] [3 4]]" -> code, as two pairs of brackets are a link in Markdown
        rows = re.compile(r"^In: .*?(?=\n\n|\Z)", re.M | re.S)
        obj.docstring.value = rows.sub(lambda m: textwrap.indent(m[0], "    "), text)
