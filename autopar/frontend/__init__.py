"""Frontend: from a callable and its arguments to a `Graph`, by tracing, opening nested jaxprs, and roles."""

from autopar.frontend.build import Bound, BoundGraph
from autopar.frontend.signature import CallSignature, SignatureOptions, flatten_call
from autopar.frontend.trace import Traced, trace

__all__ = ["Bound", "BoundGraph", "CallSignature", "SignatureOptions", "Traced", "flatten_call", "trace"]
