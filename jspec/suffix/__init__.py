"""Suffix decoding: drafts from what this request, and others before it, have said."""

from jspec.suffix.cache import SuffixDecodingCache, SuffixDecodingDraft

__all__ = ["SuffixDecodingCache", "SuffixDecodingDraft"]
