"""Pieces of the report's page."""

from __future__ import annotations

import re
from collections.abc import Sequence
from html import escape

_NAMESPACE = ' xmlns="http://www.w3.org/2000/svg"'


def note(text: str) -> str:
    """A paragraph in a lower voice."""
    return f'<p class="note">{escape(text)}</p>'


def cards(shown: Sequence[tuple[str, str]]) -> str:
    """Numbers with what they are."""
    inner = "".join(
        f"<div><b>{escape(value)}</b><span>{escape(label)}</span></div>" for value, label in shown
    )
    return f'<div class="cards">{inner}</div>'


def table(
    heads: Sequence[str],
    rows: Sequence[Sequence[str]],
    text_columns: Sequence[int] = (),
    first_is: str = "",
) -> str:
    """A table; cells are HTML, heads are text. ``first_is`` is the class of the first row."""
    kind = [' class="text"' if index in text_columns else "" for index in range(len(heads))]
    head = "".join(f"<th{kind[index]}>{escape(text)}</th>" for index, text in enumerate(heads))
    body = []
    for number, row in enumerate(rows):
        cells = "".join(f"<td{kind[index]}>{cell}</td>" for index, cell in enumerate(row))
        body.append(
            f'<tr class="{first_is}">{cells}</tr>' if first_is and number == 0 else f"<tr>{cells}</tr>"
        )
    inner = f"<thead><tr>{head}</tr></thead><tbody>{''.join(body)}</tbody>"
    return f'<div class="scroll"><table>{inner}</table></div>'


def figure_html(wide: str, narrow: str) -> str:
    """Two pictures of the same, of which the page shows the one that fits."""
    return (
        f'<figure><div class="wide">{_inline(wide)}</div><div class="narrow">{_inline(narrow)}</div></figure>'
    )


def _inline(svg: str) -> str:
    """Without what only a file of its own needs: namespace, size and indentation."""
    svg = svg.replace(_NAMESPACE, "", 1)
    svg = re.sub(r'(<svg[^>]*?) width="\d+" height="\d+"', r"\1", svg, count=1)
    return re.sub(r">\s+<", "><", svg).strip()
