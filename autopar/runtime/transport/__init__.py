"""How arrays get from one worker to another: in one process, or over sockets."""

from autopar.runtime.transport.base import Link, PeerLostError, SilentPeerError
from autopar.runtime.transport.queues import Queues
from autopar.runtime.transport.sockets import SocketLink

__all__ = ["Link", "PeerLostError", "Queues", "SilentPeerError", "SocketLink"]
