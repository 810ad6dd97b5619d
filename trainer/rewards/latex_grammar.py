"""The newest LaTeX grammar of latex2sympy2-extended, on the runtime of ANTLR that Hydra needs.

latex2sympy2-extended has a parser for each of several versions of ANTLR, and chooses the one of the version that is
installed. The one for 4.9.3, which Hydra pins, has an older grammar: it does not read `\\%`, for example. The parsers
differ in how their tables are written down, not in what the runtime does with these.
"""

from __future__ import annotations

import importlib
from typing import Any


def use_newest_grammar() -> None:
    """Let latex2sympy2-extended, and so math-verify, read LaTeX with its parser for ANTLR 4.13.2 in this process."""
    reader: Any = importlib.import_module("latex2sympy2_extended.latex2sympy2")
    if "antlr4_9_3" not in reader.PSParser.__module__:
        return
    import antlr4
    from antlr4.atn import ATNDeserializer as tables

    class Deserializer(tables.ATNDeserializer):
        """Reads tables of format 4: plain numbers, no UUID, one list of sets. 4.9.3 writes format 3."""

        def reset(self, data: list[int]) -> None:
            self.data, self.pos = data, 0

        def checkVersion(self) -> None:  # noqa: N802 - as ANTLR calls it
            assert self.readInt() == 4, "the tables of the grammar have an unknown format"

        def checkUUID(self) -> None:  # noqa: N802
            self.uuid = tables.BASE_SERIALIZED_UUID

    own, antlr4.ATNDeserializer = antlr4.ATNDeserializer, Deserializer
    try:
        names = ("PSParser", "PSLexer")
        made = [getattr(importlib.import_module(f"latex2sympy2_extended.gen.antlr4_13_2.{one}"), one) for one in names]
    finally:
        antlr4.ATNDeserializer = own
    for one in made:
        one.checkVersion = lambda self, version: None  # it would print that the versions differ
        setattr(reader, one.__name__, one)
