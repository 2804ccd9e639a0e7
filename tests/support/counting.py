"""Counts what the backend compiles: traces may repeat, compilations must not."""

import contextlib
from collections.abc import Iterator

import jax

_EVENT = "/jax/core/compile/backend_compile_duration"
_counters: list[list[str]] = []


def _listen(event: str, duration: float, **kwargs) -> None:
    if event == _EVENT:
        for counter in _counters:
            counter.append(str(kwargs.get("fun_name", event)))


jax.monitoring.register_event_duration_secs_listener(_listen)


@contextlib.contextmanager
def backend_compiles() -> Iterator[list[str]]:
    """Yields a list that grows by one entry per backend compilation."""
    counter: list[str] = []
    _counters.append(counter)
    try:
        yield counter
    finally:
        _counters.remove(counter)
