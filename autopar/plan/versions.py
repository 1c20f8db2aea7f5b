"""Plans of older formats, brought to the newest: one step a version."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

#: The format that is written.
FORMAT_VERSION = 5

_STAGE_FIELDS_OF_1 = (
    ("held_bytes", "activation_bytes"),
    ("kept_bytes", "weight_stash_bytes"),
    ("sums_bytes", "accumulation_bytes"),
    ("waits_on_host", "activations_offloaded"),
)
_FORM_OF_3 = (
    "remat",
    "layer_ends",
    "segment_layers",
    "block_scores",
    "layered_update",
    "backward_update",
    "padded",
    "activations_offloaded",
    "slices_ahead",
)
_THRESHOLDS_OF_3 = ("combine_bytes", "gather_bytes")
_HOST_OF_4 = (("host_bytes", "bytes"), ("host_time", "move_time"))
_VALUES_OF_1 = (("held@", "activations@"), ("kept@", "stash@"))


def upgraded(document: dict[str, Any], version: int) -> dict[str, Any]:
    """The document of a plan in the newest format.

    Args:
        document: what JSON holds, of format ``version``.
        version: an older one, see `READABLE`.
    """
    for step in range(version, FORMAT_VERSION):
        kept = {"details": document["details"]} if step > 2 and "details" in document else {}
        document = {"autopar_plan": step + 1, "plan": _STEPS[step](document.get("plan")), **kept}
    return document


def _from_1(plan: Any) -> Any:
    """Format 2 has the field's words for what stages hold, and for a memory limit that binds."""
    if not isinstance(plan, dict):
        return plan
    changed = _renamed(plan, (("tight", "memory_bound"),))
    if isinstance(plan.get("stages"), list):
        changed["stages"] = [_renamed(s, _STAGE_FIELDS_OF_1) if isinstance(s, dict) else s for s in plan["stages"]]
    if isinstance(plan.get("parts"), list):
        changed["parts"] = [_from_1(part) for part in plan["parts"]]
    if isinstance(plan.get("pipeline"), dict):
        changed["pipeline"] = _with_values(plan["pipeline"])
    return changed


def _renamed(fields: dict[str, Any], names: tuple[tuple[str, str], ...]) -> dict[str, Any]:
    new = dict(names)
    return {new.get(name, name): value for name, value in fields.items()}


def _with_values(part: Any) -> Any:
    """``part`` with the names of values of format 2, wherever they are."""
    if isinstance(part, dict):
        return {name: value if name == "table" else _with_values(value) for name, value in part.items()}
    if isinstance(part, list):
        return [_with_values(item) for item in part]
    for old, new in _VALUES_OF_1:
        if isinstance(part, str) and part.startswith(old):
            return new + part.removeprefix(old)
    return part


def _from_2(plan: Any) -> Any:
    """Format 3 has the cluster as JSON; its text is read too, wherever it is."""
    return plan


def _from_3(plan: Any) -> Any:
    """Format 4 has a digest, and what a stage was turned into in a record of its own, with its microbatches.

    A plan without a digest is verified before it runs.
    """
    if not isinstance(plan, dict):
        return plan
    changed, count = dict(plan), plan.get("num_microbatches")
    if isinstance(plan.get("stages"), list):
        changed["stages"] = [_with_form(s, count) if isinstance(s, dict) else s for s in plan["stages"]]
    if isinstance(plan.get("parts"), list):
        changed["parts"] = [_from_3(part) for part in plan["parts"]]
    return changed


def _with_form(stage: dict[str, Any], count: Any) -> dict[str, Any]:
    form = {name: stage[name] for name in _FORM_OF_3 if name in stage}
    rest = {name: value for name, value in stage.items() if name not in (*_FORM_OF_3, *_THRESHOLDS_OF_3)}
    if "remat" in form:  # a stage of one layer has no end of another
        form.setdefault("layer_ends", [])
    form |= {} if count == 1 else {"microbatches": count}
    bytes = [stage.get(name) for name in _THRESHOLDS_OF_3]
    rest |= {"form": form} if form else {}
    return rest if None in bytes else rest | {"thresholds": dict(zip(("sums", "gathers"), bytes, strict=True))}


def _from_4(plan: Any) -> Any:
    """Format 5 has the use of host memory of a stage in a record of its own."""
    if not isinstance(plan, dict):
        return plan
    changed = dict(plan)
    if isinstance(plan.get("stages"), list):
        changed["stages"] = [_with_host(s) if isinstance(s, dict) else s for s in plan["stages"]]
    if isinstance(plan.get("parts"), list):
        changed["parts"] = [_from_4(part) for part in plan["parts"]]
    return changed


def _with_host(stage: dict[str, Any]) -> dict[str, Any]:
    host = {new: stage[name] for name, new in _HOST_OF_4 if name in stage}
    rest = {name: value for name, value in stage.items() if name not in dict(_HOST_OF_4)}
    return rest | ({"host": host} if host else {})


_STEPS: Mapping[int, Callable[[Any], Any]] = MappingProxyType({1: _from_1, 2: _from_2, 3: _from_3, 4: _from_4})
#: Older formats that can be read.
READABLE = tuple(_STEPS)
