"""Suffix decoding."""
