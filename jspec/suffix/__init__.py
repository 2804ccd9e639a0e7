"""Suffix decoding: drafts from suffix trees over this request's and earlier requests' tokens."""

from jspec.suffix.cache import SuffixDecodingCache, SuffixDecodingDraft

__all__ = ["SuffixDecodingCache", "SuffixDecodingDraft"]
