"""What of an HTML page cannot be narrower than a screen, by its elements and its style sheet.

`too_wide` is where a caller starts. It knows the selectors and lengths that autopar's own pages use, and refuses
others; it lays nothing out, so that it finds causes and not widths.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from html.parser import HTMLParser

VOID = {"meta", "link", "img", "br", "wbr", "hr", "input"}
_PX = {"px": 1.0, "rem": 16.0, "em": 16.0}
_LENGTH = re.compile(r"([\d.]+)(px|rem|em)")
_INHERITED = ("overflow-wrap", "white-space")


@dataclass
class Element:
    """An element of a page, with the declarations that apply to it."""

    tag: str
    attributes: dict[str, str]
    parent: Element | None
    has_text: bool = False
    children: list[Element] = field(default_factory=list)
    style: dict[str, str] = field(default_factory=dict)

    @property
    def around(self) -> Iterator[Element]:
        at = self.parent
        while at is not None:
            yield at
            at = at.parent

    @property
    def name(self) -> str:
        return ".".join((self.tag, *self.attributes.get("class", "").split()))

    def computed(self, name: str) -> str:
        """The value of a property, its parents' where it is inherited."""
        for at in (self, *self.around) if name in _INHERITED else (self,):
            if name in at.style:
                return at.style[name]
        return ""

    @property
    def scrolls(self) -> bool:
        """Whether it is in a box that is scrolled sideways."""
        return any(e.style.get("overflow-x", e.style.get("overflow", "")) in ("auto", "scroll") for e in self.around)


class _Tree(HTMLParser):
    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[Element] = []
        self.open: list[Element] = []
        self.css = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        parent = self.open[-1] if self.open else None
        element = Element(tag, {name: value or "" for name, value in attrs}, parent)
        self.elements.append(element)
        if parent is not None:
            parent.children.append(element)
        if tag not in VOID:
            self.open.append(element)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop().tag == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1].tag == "style":
            self.css += data
        elif self.open and data.strip():
            self.open[-1].has_text = True


def too_wide(page: str, width: int) -> list[str]:
    """A line for each element that may make a page wider than ``width`` pixels, with the cause."""
    tree = _Tree()
    tree.feed(page)
    for selectors, declarations in _rules(tree.css, width):
        for element in tree.elements:
            if any(_matches(element, selector) for selector in selectors):
                element.style.update(declarations)
    for element in tree.elements:
        element.style.update(_declarations(element.attributes.get("style", "")))
    found = [f"{e.name}: {cause}" for e in tree.elements if not e.scrolls for cause in _causes(e, width)]
    return list(dict.fromkeys(found))


def _causes(e: Element, width: int) -> Iterator[str]:
    for name in ("min-width", "width"):
        if (match := _LENGTH.fullmatch(e.style.get(name, ""))) and float(match[1]) * _PX[match[2]] > width:
            yield f"{name} {match[0]}"
    fixed = None if _in_svg(e) else re.fullmatch(r"([\d.]+)(px)?", e.attributes.get("width", ""))
    if fixed is not None and float(fixed[1]) > width:
        yield f"width {fixed[0]}"
    if e.tag == "table" and not all(d.computed("overflow-wrap") == "anywhere" for d in _cells(e)):
        yield "a table in no box that scrolls, whose words are not broken"
    if e.tag == "svg":
        shares = all(
            value.endswith("%") or (not value.strip("0123456789.") and name in ("y", "height", "y1", "y2", "x", "x1"))
            for child in e.children
            for name, value in child.attributes.items()
            if name in ("x", "x1", "x2", "y", "y1", "y2", "width", "height")
        )
        if "viewbox" not in e.attributes and not shares:
            yield "a picture of a fixed size without viewBox"
        elif e.style.get("width") != "100%" and e.style.get("max-width") != "100%":
            yield "a picture that does not shrink"
    if e.has_text and e.tag not in ("title", "script", "option") and not _in_svg(e):
        if e.computed("white-space") in ("nowrap", "pre"):
            yield "lines that do not break"
        elif e.computed("overflow-wrap") not in ("break-word", "anywhere"):
            yield "long words that do not break"
        elif e.computed("overflow-wrap") != "anywhere" and any(map(_is_flexible, (e, *e.around))):
            yield "long words in a box that is as wide as its longest"


def _cells(table: Element) -> Iterator[Element]:
    for child in table.children:
        if child.tag == "td":
            yield child
        yield from _cells(child)


def _is_flexible(e: Element) -> bool:
    """Whether a box is not narrower than its longest word, unless words break anywhere: in a row or a grid."""
    return (
        e.parent is not None and e.parent.style.get("display") in ("flex", "grid") and e.style.get("min-width") != "0"
    )


def _in_svg(e: Element) -> bool:
    return any(a.tag == "svg" for a in e.around)


def _rules(css: str, width: int) -> Iterator[tuple[list[str], dict[str, str]]]:
    """Selectors and declarations of the rules that hold on a screen of ``width`` pixels, in order."""
    at = 0
    while (start := css.find("{", at)) >= 0:
        head, depth, end = css[at:start].strip(), 1, start + 1
        while depth:
            depth += {"{": 1, "}": -1}.get(css[end], 0)
            end += 1
        body = css[start + 1 : end - 1]
        if head.startswith("@media"):
            limit = re.search(r"max-width: (\d+)px", head)
            if limit is not None and width <= int(limit[1]):
                yield from _rules(body, width)
        else:
            yield [s.strip() for s in head.split(",")], _declarations(body)
        at = end


def _declarations(text: str) -> dict[str, str]:
    pairs = (part.partition(":") for part in text.split(";") if ":" in part)
    return {name.strip(): value.strip() for name, _, value in pairs}


def _matches(element: Element, selector: str) -> bool:
    if "::" in selector or ":root" in selector:
        return False
    *outer, last = re.sub(r"\s*>\s*", " > ", selector).split()
    if not _is(element, last):
        return False
    inside: list[Element] = [element]
    while outer:
        step = outer.pop()
        if step == ">":
            parts = [a for e in inside for a in [e.parent] if a is not None]
            step = outer.pop()
        else:
            parts = [a for e in inside for a in e.around]
        inside = [a for a in parts if step == "*" or _is(a, step)]
        if not inside:
            return False
    return True


def _is(element: Element, compound: str) -> bool:
    """Whether an element has the tag and the classes of a part of a selector; states as ``:hover`` do not hold."""
    if ":" in compound.replace(":not(", "") or "[" in compound.partition(":not")[0]:
        return False
    tag, *classes = compound.partition(":not")[0].split(".")
    return tag in ("", "*", element.tag) and set(classes) <= set(element.attributes.get("class", "").split())
