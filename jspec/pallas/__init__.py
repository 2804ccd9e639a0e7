"""Ops of the drafting step: a plain JAX definition and a GPU kernel of each."""

from jspec.pallas.eagle_step import eagle_step
from jspec.pallas.expand_dflash import BlockRows, expand_dflash
from jspec.pallas.expand_eagle import ExpandedRows, expand_eagle
from jspec.pallas.next_token import next_token
from jspec.pallas.ngram_match import ngram_match
from jspec.pallas.paged_attention import Attended, paged_attention
from jspec.pallas.sample_index import sample_index

__all__ = [
    "Attended",
    "BlockRows",
    "ExpandedRows",
    "eagle_step",
    "expand_dflash",
    "expand_eagle",
    "next_token",
    "ngram_match",
    "paged_attention",
    "sample_index",
]
