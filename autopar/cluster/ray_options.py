"""`RayOptions`: how workers on Ray are started and used; `autopar.Cluster.ray` says what each field means."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, get_args

from autopar.errors import ClusterError

Devices: TypeAlias = Literal["auto", "cpu", "gpu", "tpu"]
Transport: TypeAlias = Literal["auto", "sockets", "direct", "world"]


@dataclass(frozen=True)
class RayOptions:
    """Options of `autopar.Cluster.ray`, by the same names and with the same defaults; what it says of each holds here.

    Raises:
        ClusterError: an option has a value that means nothing.
    """

    workers: int | None = None
    devices_per_worker: int | Sequence[int] | None = None
    hosts_per_stage: int = 1
    devices: Devices = "auto"
    like: str | Mapping[str, str] | None = None
    object_store_bytes: int = 80 * 2**20
    deadline_s: float = 300.0
    recover: bool = False
    copy_every: int = 10
    cache: str | None = None
    transport: Transport = "auto"
    start_s: float = 300.0
    load_s: float = 900.0
    attempts: int = 10
    repeats: int = 3
    runtime_env: Mapping[str, Any] | None = None
    resources: Mapping[str, float] | None = None
    labels: Mapping[str, str] | None = None
    backoff_s: float = 0.5

    def __post_init__(self) -> None:
        if self.transport not in get_args(Transport):
            raise ClusterError(
                f"transport={self.transport!r} is not known", remedy=f"one of: {', '.join(get_args(Transport))}"
            )
        for name in ("deadline_s", "start_s", "load_s", "backoff_s"):
            value, may_be_0 = getattr(self, name), name == "backoff_s"
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if not is_number or not 0 <= value < math.inf or not (value or may_be_0):
                least = "0 or more" if may_be_0 else "more than 0"
                raise ClusterError(f"{name}={value!r} is no time", remedy=f"give seconds, {least}")
        names = ("workers", "hosts_per_stage", "attempts", "repeats", "copy_every", "object_store_bytes")
        counts = [(name, getattr(self, name)) for name in names]
        for name, count in (*counts, *(("devices_per_worker", n) for n in self.sizes)):
            if count is not None and (isinstance(count, bool) or not isinstance(count, int) or count < 1):
                raise ClusterError(f"{name}={count!r} is no count", remedy="give 1 or more")

    @property
    def sizes(self) -> Sequence[int | None]:
        """Devices of each worker, or of all."""
        return self.devices_per_worker if isinstance(self.devices_per_worker, Sequence) else [self.devices_per_worker]
