"""Named shapes that benchmarks and tests share, and how a result names its command."""

import sys
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class StepShape:
    """A decode step in which every request verified its drafts.

    Attributes:
      requests: B.
      num_drafts: K; each request ran K + 1 rows.
      page_size: slots a page.
      max_model_len: positions a request may have; the block table reaches them.
      vocab_size: ids of the target.
    """

    requests: int
    num_drafts: int = 5
    page_size: int = 16
    max_model_len: int = 8192
    vocab_size: int = 128_256

    @property
    def width(self) -> int:
        """Verified tokens a request (W)."""
        return self.num_drafts + 1

    @property
    def rows(self) -> int:
        """Flat tokens of the step (T)."""
        return self.requests * self.width

    @property
    def pages(self) -> int:
        """Columns of the block table (M)."""
        return -(-self.max_model_len // self.page_size)


STEPS = {f"b{requests}": StepShape(requests=requests) for requests in (1, 8, 64, 256)}
"""One request (latency), small and large serving batches; Llama-3.1's vocabulary."""


def command_line(module: str) -> str:
    """Returns the command that gives a result: this process's words but the output's path."""
    words = sys.argv[1:]
    if "--output" in words:
        at = words.index("--output")
        words = words[:at] + words[at + 2 :]
    return " ".join([f"python -m benchmarks.{module}", *words])
