"""Writes the table of pairs of techniques in ``docs/memory.md``: ``python -m tests.lower.pairs``, a minute or two.

Each pair is applied to three models, and what composes has the values of the step. A test holds the table up to date.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import jax

from autopar.lower.techniques import FIRST, TECHNIQUES
from tests.lower.test_techniques import FIELDS, MODELS, PAIRS, outcome

PAGE = Path(__file__).resolve().parents[2] / "docs" / "memory.md"
BEGIN, END = "<!-- pairs of techniques -->\n", "<!-- end of pairs -->\n"
NAMES = {
    "padded": "padding",
    "remat": "recomputation",
    "backward_update": "updates in the backward loop",
    "segment_layers": "segments",
    "layered_update": "layers updated one at a time",
    "microbatches": "microbatches",
    "block_scores": "attention in blocks",
}


def table(outcomes: Mapping[tuple[str, tuple[str, ...]], str]) -> str:
    """Rows of pairs, columns of models.

    Args:
        outcomes: of a model and a pair; "composes", or the technique that is refused.
    """
    lines = [f"| with | and | {' | '.join(MODELS)} |", f"|---|---|{'---|' * len(MODELS)}"]
    for pair in PAIRS:
        cells = [outcomes[name, pair] for name in MODELS]
        said = [c if c == "composes" else f"no {NAMES[c]}" for c in cells]
        lines.append(f"| {NAMES[pair[0]]} | {NAMES[pair[1]]} | {' | '.join(said)} |")
    wants = {t.field: t.wants for t in (*FIRST, *TECHNIQUES)}
    reasons = [f"- no {NAMES[f]}: there is no {wants[f]}." for f in FIELDS]
    return "\n".join([*lines, "", *reasons, ""])


def written(text: str) -> str:
    """The page with another table."""
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    return f"{before}{BEGIN}\n{text}\n{END}{rest.partition(END)[2]}"


def main() -> None:
    """Applies all pairs."""
    jax.config.update("jax_enable_x64", True)
    outcomes = {}
    for name in MODELS:
        for pair in PAIRS:
            outcomes[name, pair] = outcome(name, pair)
            print(name, *pair, outcomes[name, pair], flush=True)
    PAGE.write_text(written(table(outcomes)), encoding="utf-8")


if __name__ == "__main__":
    main()
