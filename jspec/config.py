"""Sizes that a compiled step depends on. Hashable; never an array."""

from dataclasses import dataclass

from jspec._checks import check_at_least, check_float_dtype


@dataclass(frozen=True, kw_only=True)
class CacheConfig:
    """Sizes the paged KV cache and the longest request.

    Attributes:
      num_pages: pages in the pool (P).
      page_size: slots (tokens) per page (S).
      max_model_len: most tokens a request may have, prompt and output together.
      dtype: element type of keys and values, for example "bfloat16".
    """

    num_pages: int
    page_size: int = 16
    max_model_len: int
    dtype: str = "bfloat16"

    def __post_init__(self):
        check_at_least(
            "CacheConfig",
            1,
            num_pages=self.num_pages,
            page_size=self.page_size,
            max_model_len=self.max_model_len,
        )
        object.__setattr__(self, "dtype", check_float_dtype("CacheConfig", self.dtype))

    @property
    def pages_per_request(self) -> int:
        """Columns of a block table that reaches `max_model_len` (M)."""
        return -(-self.max_model_len // self.page_size)


@dataclass(frozen=True, kw_only=True)
class Buckets:
    """The batch sizes that `warmup` compiles; calls are padded up to one of them.

    Attributes:
      requests: batch sizes (B), ascending.
      tokens: flat token counts (T), ascending; the largest has a token for each request.
      num_drafts: smaller numbers of drafts that calls ask for, ascending from 0 on, beside the
        config's own.
      axes: of the rows' positions: 3 for a target with M-RoPE.
      embeds: steps may bring input embeddings.
      hidden_dtype: of the target's hidden states and input embeddings, for example "bfloat16"; None
        = that of the drafter's weights or, where it has none, of the cache.
      max_drafts: steps bring `Scheduled.max_drafts`, all of them.
    """

    requests: tuple[int, ...]
    tokens: tuple[int, ...]
    num_drafts: tuple[int, ...] = ()
    axes: int = 1
    embeds: bool = False
    hidden_dtype: str | None = None
    max_drafts: bool = False

    def __post_init__(self):
        for name, least in (("requests", 1), ("tokens", 1), ("num_drafts", 0)):
            sizes = getattr(self, name)
            fits = isinstance(sizes, tuple) and all(type(size) is int for size in sizes)
            fits = fits and list(sizes) == sorted(set(sizes)) and (not sizes or sizes[0] >= least)
            if not fits or (least and not sizes):
                raise ValueError(
                    f"Buckets: `{name}` is {sizes!r}, wanted a tuple of ascending ints of at "
                    f"least {least}, for example (1, 4, 16)."
                )
        if self.tokens[-1] < self.requests[-1]:
            raise ValueError(
                f"Buckets: `tokens` ends at {self.tokens[-1]}, below the {self.requests[-1]} "
                "requests that a step may have, which run a token each. Add a larger size."
            )
        if self.axes not in (1, 3):
            raise ValueError(f"Buckets: `axes` is {self.axes!r}, wanted 1, or 3 for M-RoPE.")
        if self.hidden_dtype is not None:
            dtype = check_float_dtype("Buckets", self.hidden_dtype)
            object.__setattr__(self, "hidden_dtype", dtype)

    def pairs(self) -> list[tuple[int, int]]:
        """Lists each (requests, tokens) that a step can have: at least a token a request."""
        return [(b, t) for b in self.requests for t in self.tokens if t >= b]
