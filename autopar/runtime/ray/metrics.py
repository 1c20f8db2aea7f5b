"""Records of a cluster: counters and measurements for Prometheus, and events of the logger ``autopar.ray``.

`record` logs an event as a line for people, and the same as fields for programs.
"""

from __future__ import annotations

import logging
from importlib import import_module
from typing import Any

from autopar.errors import ClusterError

_LOGGER = logging.getLogger("autopar.ray")
#: Bounds of the seconds that steps take.
_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0)


def record(event: str, text: str, level: int = logging.INFO, **fields: Any) -> None:
    """Logs an event.

    Args:
        event: its name, the same for all of its kind.
        text: for people.
        level: of `logging`.
        fields: numbers and names, of which a formatter finds the event as ``record.event`` and these as
            ``record.fields``.
    """
    _LOGGER.log(level, text, extra={"event": event, "fields": fields})


class Metrics:
    """Numbers of one cluster, in a registry of their own.

    A driver serves them with ``prometheus_client.start_http_server(9000, registry=cluster.workers.metrics.registry)``.
    Without prometheus-client nothing is counted, and asking for the numbers says what to install.
    """

    def __init__(self) -> None:
        client = self._client = _client()
        registry = self._registry = client.CollectorRegistry()
        self.step_s = client.Histogram(
            "autopar_step_seconds", "Seconds of a step, with its call", registry=registry, buckets=_SECONDS
        )
        self.sent_bytes = client.Counter("autopar_sent_bytes", "Bytes that workers sent each other", registry=registry)
        self.copied_bytes = client.Counter(
            "autopar_copied_bytes", "Bytes copied from workers to the driver", registry=registry
        )
        self.queue_depth = client.Gauge(
            "autopar_queue_depth",
            "Most arrays of the last step that waited to be sent on one worker",
            registry=registry,
        )
        self.recoveries = client.Counter(
            "autopar_recoveries", "How often lost workers were replaced", registry=registry
        )
        self.processes = client.Gauge("autopar_processes", "Processes of workers heard of lately", registry=registry)

    @property
    def registry(self) -> Any:
        """The registry of the numbers. ClusterError without prometheus-client."""
        if isinstance(self._client, _Uncounted):
            raise ClusterError(
                "metrics of a Ray cluster need prometheus-client, which cannot be imported",
                cause="it is not installed",
                remedy="pip install 'autopar[metrics]'",
            )
        return self._registry

    @property
    def text(self) -> str:
        """All numbers in Prometheus' text format.

        Raises:
            ClusterError: the package prometheus-client is not installed.
        """
        return str(self._client.generate_latest(self.registry).decode())


class _Uncounted:
    """Takes the place of prometheus_client, and of its numbers, where it is not installed."""

    def __getattr__(self, name: str) -> Any:
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self


def _client() -> Any:
    """prometheus_client, which takes longer to import than all of the driver."""
    try:
        return import_module("prometheus_client")
    except ModuleNotFoundError:
        return _Uncounted()
