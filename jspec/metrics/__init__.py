"""What speculation earned: counts of a step, a log line, Prometheus counters, histories.

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
