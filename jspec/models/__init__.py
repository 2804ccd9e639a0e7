"""Transformer models as functions over plain dicts of weights."""
