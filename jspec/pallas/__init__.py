"""Index ops of the drafting step: a plain JAX definition and a GPU kernel of each."""

from jspec.pallas.next_token import next_token
from jspec.pallas.sample_index import sample_index

__all__ = ["next_token", "sample_index"]
