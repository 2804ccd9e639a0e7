"""Prompts of the demo: code to repeat, HumanEval problems, and open questions.

SmolLM2-135M follows instructions badly: compare throughput and tokens, not the answers.
"""

import calendar
import colorsys
import gzip
import html
import inspect
import itertools
import json
import shlex
import string
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from jspec.demo import assets

# Short functions in plain Python that hardly change between Python versions, each with a task for
# which SmolLM2 repeats most of the code.
_RENAME = "Rename the function `{name}` to `my_{name}` and print the whole code again:"
_COPY = "Print the whole code again:"
_EDITS = (
    (_RENAME, textwrap.shorten),
    (_COPY, colorsys.rgb_to_yiq),
    (_RENAME, calendar.leapdays),
    (_COPY, html.escape),
    (_RENAME, shlex.join),
    (_COPY, textwrap.indent),
    (_RENAME, string.capwords),
    (_COPY, colorsys.rgb_to_hsv),
)

_QUESTIONS = {
    "photosynthesis": "What is photosynthesis, and why do plants need it?",
    "capital": "What is the capital of France, and what is it known for?",
    "story": "Write a short story about a lighthouse keeper and a whale.",
    "sorting": "How does binary search work, and when is it better than a linear search?",
}

_MAX_PROBLEM_LENGTH = 600  # characters, about 200 tokens


@dataclass(frozen=True)
class Prompt:
    """A prompt of the suite.

    Attributes:
      kind: "copy" (an edit that repeats given code), "humaneval" or "chat".
      name: unique in the suite.
      text: of the user.
    """

    kind: Literal["copy", "humaneval", "chat"]
    name: str
    text: str


def demo_prompts(cache_dir: str | Path | None = None, *, progress: bool = True) -> list[Prompt]:
    """Lists the whole suite in a fixed order, with alternating kinds.

    Args:
      cache_dir: of HumanEval, see `assets.fetch`.
      progress: whether to show the download's progress.

    Returns:
      The prompts; each has less than about 250 tokens.

    Raises:
      RuntimeError, ValueError: HumanEval could not be fetched; see `assets.fetch`.
    """
    problems = humaneval_prompts(len(_EDITS), cache_dir, progress=progress)
    turns = itertools.zip_longest(copy_prompts(), problems, chat_prompts())
    return [prompt for turn in turns for prompt in turn if prompt is not None]


def copy_prompts() -> list[Prompt]:
    """Makes prompts that ask to repeat functions of the standard library, some renamed."""
    prompts = []
    for task, function in _EDITS:
        name = f"{function.__module__}.{function.__name__}"
        question = task.format(name=function.__name__)
        prompts.append(Prompt("copy", name, f"{question}\n\n{_fence(inspect.getsource(function))}"))
    return prompts


def humaneval_prompts(
    n: int, cache_dir: str | Path | None = None, *, progress: bool = True
) -> list[Prompt]:
    """Makes prompts that ask to complete the first `n` short HumanEval problems.

    Args, Raises: see `demo_prompts`.
    """
    path = assets.fetch(assets.HUMANEVAL, cache_dir, progress=progress)
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        problems = [json.loads(line) for line in lines]
    short = [p for p in problems if len(p["prompt"]) <= _MAX_PROBLEM_LENGTH]
    return [
        Prompt(
            "humaneval",
            problem["task_id"],
            f"Complete this function:\n\n{_fence(problem['prompt'])}",
        )
        for problem in short[:n]
    ]


def chat_prompts() -> list[Prompt]:
    """Makes prompts of questions whose answers repeat little of the prompt."""
    return [Prompt("chat", name, text) for name, text in _QUESTIONS.items()]


def _fence(code: str) -> str:
    return f"```python\n{code.strip()}\n```"
