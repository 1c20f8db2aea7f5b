"""Plans under another name."""

from __future__ import annotations

from dataclasses import replace

import msgspec

from autopar.plan import Plan


def renamed(plan: Plan, strategy: str, *notes: str) -> Plan:
    """``plan`` as the answer of ``strategy``, with further notes."""
    search = msgspec.structs.replace(plan.content.search, strategy=strategy)
    content = msgspec.structs.replace(plan.content, search=search, notes=(*plan.content.notes, *notes))
    return replace(plan, content=content)
