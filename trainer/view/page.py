"""The page: one HTML file that holds its program, its style and its data, and that loads nothing."""

from __future__ import annotations

import base64
import hashlib
import json
import zlib
from collections.abc import Mapping
from importlib.resources import files
from typing import Any

_SCRIPTS = ("page.js", "places.js", "curves.js", "episodes.js", "conversation.js", "main.js")
_STYLE, _TEMPLATE = "view.css", "view.html"
_LEVEL = 6


def pack(value: Any) -> str:
    """Return bytes, or a value as JSON, as text for an element of the page: compressed, in base64."""
    data = value if isinstance(value, bytes) else json.dumps(value, separators=(",", ":"), allow_nan=False).encode()
    return base64.b64encode(zlib.compress(data, _LEVEL)).decode()


def render(data: Mapping[str, Any], chunks: Mapping[str, str]) -> str:
    """Return the page.

    Texts of models come to it as data alone: escaped in JSON, or in base64. Its policy allows no other script than its
    own, and no request.

    Args:
        data: what the page reads at once.
        chunks: by id, what it unpacks when somebody looks at it (see `pack`).
    """
    script, style = "\n".join(map(_resource, _SCRIPTS)), _resource(_STYLE)
    hashes = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in (script, style)]
    sources = "script-src 'sha256-{}'; style-src 'sha256-{}'".format(*hashes)  # of the only inline elements that run
    parts = {
        "POLICY": f"default-src 'none'; {sources}; base-uri 'none'; form-action 'none'",
        "STYLE": style,
        "DATA": as_data(data),
        "CHUNKS": "\n".join(f'<script type="text/plain" id="{name}">{text}</script>' for name, text in chunks.items()),
        "SCRIPT": script,
    }
    template = _resource(_TEMPLATE)
    head, *rest = template.split("{{")
    return head + "".join(parts[name] + text for name, text in (piece.split("}}", 1) for piece in rest))


def as_data(value: Any) -> str:
    """Return a value as JSON in ASCII without a character that means something to a reader of HTML."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _resource(name: str) -> str:
    return files("trainer.view").joinpath(name).read_text(encoding="utf-8")
