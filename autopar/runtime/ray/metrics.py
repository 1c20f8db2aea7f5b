"""What a cluster counts and measures, for Prometheus."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

#: Bounds of the seconds that steps take.
_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0)


class Metrics:
    """Numbers of one cluster, in a registry of their own.

    A driver serves them with ``prometheus_client.start_http_server(9000, registry=cluster.workers.metrics.registry)``.
    """

    def __init__(self) -> None:
        own = self.registry = CollectorRegistry()
        self.step_s = Histogram(
            "autopar_step_seconds", "Seconds of a step, with its call", registry=own, buckets=_SECONDS
        )
        self.sent_bytes = Counter("autopar_sent_bytes", "Bytes that workers sent each other", registry=own)
        self.copied_bytes = Counter("autopar_copied_bytes", "Bytes that the driver copied from workers", registry=own)
        self.queue_depth = Gauge(
            "autopar_queue_depth", "Most arrays of the last step that waited to be sent on one worker", registry=own
        )
        self.recoveries = Counter("autopar_recoveries", "How often lost workers were replaced", registry=own)
        self.processes = Gauge("autopar_processes", "Processes of workers that were heard of lately", registry=own)

    @property
    def text(self) -> str:
        """All numbers in Prometheus' format."""
        return generate_latest(self.registry).decode()
