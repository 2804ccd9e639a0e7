"""Counts of drafts and accepted tokens: for a step, a log line, Prometheus, each request.

Source: vLLM v1/spec_decode/metrics.py; the histories and the histogram are ours.
"""

from jspec.metrics.log import SpecDecodingLogging
from jspec.metrics.prometheus import SpecDecodingProm
from jspec.metrics.stats import AcceptanceHistory, SpecDecodingStats

__all__ = [
    "AcceptanceHistory",
    "SpecDecodingLogging",
    "SpecDecodingProm",
    "SpecDecodingStats",
]
