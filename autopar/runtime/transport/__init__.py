"""Transport of arrays from one worker to another: in one process, or over sockets."""

from autopar.runtime.transport.base import PeerLostError, SilentPeerError, WorkerLink
from autopar.runtime.transport.queues import WorkerQueues
from autopar.runtime.transport.sockets import SocketLink

__all__ = ["PeerLostError", "SilentPeerError", "SocketLink", "WorkerLink", "WorkerQueues"]
