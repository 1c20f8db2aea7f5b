"""From a callable and its arguments to a `Graph`: tracing, opening of nested jaxprs, roles."""

from autopar.frontend.build import Bound, BoundGraph
from autopar.frontend.signature import CallSignature, SignatureOptions, flatten_call
from autopar.frontend.trace import Traced, trace

__all__ = ["Bound", "BoundGraph", "CallSignature", "SignatureOptions", "Traced", "flatten_call", "trace"]
