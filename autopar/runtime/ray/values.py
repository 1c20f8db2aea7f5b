"""`RemoteArray`: a handle to an array that lies on workers."""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from autopar.frontend.signature import ArrayHandle
from autopar.runtime.shards import Leaf
from autopar.runtime.transport.tiles import HostKeys, from_host


class Writing(ABC):
    """Arrays on workers that are kept for a checkpoint."""

    @abstractmethod
    def write(self, folder: Path, label: str) -> dict[str, list[Leaf]]:
        """Writes them, each process what it has; while steps run, from another thread.

        Args:
            folder: where.
            label: what names of files begin with.

        Returns by name what processes wrote.

        Raises:
            OSError: a process cannot write.
            WorkerLostError: one was lost.
        """


class ArrayOwner(ABC):
    """Owner of arrays that handles stand for."""

    @abstractmethod
    def fetch(self, ids: Iterable[int]) -> dict[int, Any]:
        """Copies of arrays on the host, by number. WorkerLostError where they are lost."""

    @abstractmethod
    def hold(self, names: Mapping[int, str]) -> Writing:
        """Keeps arrays for a checkpoint.

        Args:
            names: by number what each is called there; all of them are on workers.
        """

    @abstractmethod
    def has(self, id: int) -> bool:
        """Whether the array of a handle's number is still on workers; False once it was given up or lost."""

    @abstractmethod
    def read(self, folder: Path, leaves: Mapping[int, Leaf]) -> dict[int, RemoteArray]:
        """Reads arrays of a checkpoint, each process what its devices are to have.

        Args:
            folder: of the checkpoint.
            leaves: by number of an array that lies where the new one is to lie.

        Returns handles by those numbers.

        Raises:
            DamageError: a file is not what was written.
        """


class RemoteArray(ArrayHandle):
    """An array on the workers of a pipeline; turns into numpy or `jax.Array` when somebody wants its numbers.

    Args:
        id: its number.
        shape: its shape.
        dtype: its dtype.
        placement: where it lies, for people, as ``worker 1: ('x', None)``.
        owner: where it is.
        dropped: called with the number when nobody has this handle any more.
    """

    def __init__(
        self,
        id: int,
        shape: tuple[int, ...],
        dtype: Any,
        placement: str,
        owner: ArrayOwner,
        dropped: Callable[[int], None],
    ) -> None:
        self.id = id
        self.shape = shape
        self.dtype = dtype
        self.placement = placement
        self.owner = owner
        self._host: Any = None
        weakref.finalize(self, dropped, id).atexit = False

    @property
    def ndim(self) -> int:
        """Number of dims."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """Number of elements."""
        return int(np.prod(self.shape, dtype=np.int64))

    def tell(self, host: Any) -> None:
        """Takes note of the numbers, so that they need not be fetched."""
        self._host = host

    @property
    def is_on_driver(self) -> bool:
        """Whether the numbers are on the host already."""
        return self._host is not None

    @property
    def host(self) -> Any:
        """The numbers on the host: numpy, or `HostKeys`. Fetched once."""
        if self._host is None:
            self._host = self.owner.fetch([self.id])[self.id]
        return self._host

    def to_jax(self) -> Any:
        """The array on this process's default device."""
        array = from_host(self.host)
        return jnp.asarray(array) if isinstance(array, np.ndarray) else array

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        array = from_host(self.host)
        if copy is False:
            raise ValueError("the numbers of an array on workers cannot be had without a copy")
        return np.array(array, dtype=dtype)

    def __jax_array__(self) -> Any:
        return self.to_jax()

    def __float__(self) -> float:
        return float(np.asarray(self))

    def __int__(self) -> int:
        return int(np.asarray(self))

    def __bool__(self) -> bool:
        return bool(np.asarray(self))

    def __format__(self, spec: str) -> str:
        return format(np.asarray(self)[()], spec) if spec else repr(self)

    def item(self) -> Any:
        """The number of an array that has one."""
        return np.asarray(self).item()

    def __repr__(self) -> str:
        return f"RemoteArray(shape={self.shape}, dtype={self.dtype}, {self.placement})"


class RemoteStack(RemoteArray):
    """Arrays on several stages that are one array along their first dim: stacked layers.

    Args:
        shards: in order.
    """

    def __init__(self, shards: Sequence[RemoteArray]) -> None:
        self.shards = tuple(shards)
        first = self.shards[0]
        self.shape = (sum(p.shape[0] for p in self.shards), *first.shape[1:])
        self.dtype = first.dtype
        places = dict.fromkeys(p.placement for p in self.shards)
        self.placement = f"{len(self.shards)} pieces of dim 0 on " + "; ".join(places)
        self.owner = first.owner
        self._host = None
        self._regrouped: dict[Any, Sequence[Any]] = {}

    def regrouped(self, key: Any, make: Callable[[], Sequence[Any]]) -> Sequence[Any]:
        """The same array in other pieces; made once for each key."""
        if key not in self._regrouped:
            self._regrouped[key] = make()
        return self._regrouped[key]

    @property
    def host(self) -> Any:
        """The numbers on the host."""
        if self._host is None:
            parts = [p.host for p in self.shards]
            if isinstance(parts[0], HostKeys):
                return HostKeys(parts[0].generator, np.concatenate([p.data for p in parts]))
            self._host = np.concatenate(parts)
        return self._host
