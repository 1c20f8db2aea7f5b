"""A sender that says that it offers an array and never gives it, as a process that was stopped in between.

Prints the error of the receiver and the number of the sender that it names. Run by `test_direct`.
"""

from __future__ import annotations

import os
import sys
from types import SimpleNamespace

import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from autopar.runtime.transport import SilentPeerError, SocketLink
from autopar.runtime.transport.direct import Transfers
from tests.runtime_ray.test_tiles import mesh


def main() -> None:
    ends = Transfers("127.0.0.1"), Transfers("127.0.0.1")
    links = [SocketLink(n, b"0123456789abcdef") for n in range(2)]
    for link, transfers in zip(links, ends, strict=True):
        link.transfers = transfers
        link.connect({n: k.address for n, k in enumerate(links)}, ())
        link.begin(10)
    server = ends[0]._server
    ends[0]._server = SimpleNamespace(address=server.address, await_pull=lambda number, arrays: None)
    links[0].send(1, 3, jnp.arange(8.0))
    links[1].begin(0.3)
    array = links[1].receive(0, 3, NamedSharding(mesh(4, (2, 2)), PartitionSpec()))
    try:
        links[1].finish([array * 2])
    except SilentPeerError as error:
        print(type(error).__name__, error.peer)


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)  # what was never given is never waited for
