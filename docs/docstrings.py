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
        # "  top_k, top_p: ..." -> one name to the parser, which takes what follows a space for a type
        text = re.sub(
            r"^  \w+(?:, \w+)+: ", lambda m: "  " + m[0].replace(" ", "") + " ", text, 0, re.M
        )
        # "In: [[1 2] [3 4]]" -> code: Markdown would take two pairs of brackets for a link
        rows = re.compile(r"^In: .*?(?=\n\n|\Z)", re.M | re.S)
        obj.docstring.value = rows.sub(lambda m: textwrap.indent(m[0], "    "), text)
