"""Keys whose values are texts take words as they were typed: `007`, `12e4567` and `on` are no numbers there."""

from __future__ import annotations

import dataclasses
import functools
import re
from typing import Any

from trainer.config.schema import MAPPINGS, OPEN_SECTIONS, plain, section_named

_PIECES = re.compile(
    r"""'(?:\\.|[^'\\])*+'|"(?:\\.|[^"\\])*+"|\$\{(?:[^{}]|\{[^{}]*+\})*+\}|\\.|[\[\]{}(),:]|[^\[\]{}(),:'"\\$]+|.""",
    re.DOTALL,
)
_TYPED = re.compile(r"[-+]?[\d._]+(e[-+]?[\d_]+)?|[-+]?(inf|nan)|true|false|null", re.IGNORECASE)
"""Words of which Hydra may make a number, a truth value or null."""
_CHOOSE = ("choice", "shuffle", "sort", "tag", "str")
"""Functions of Hydra that may get texts."""
_STRING = "tag:yaml.org,2002:str"
_NULL = "tag:yaml.org,2002:null"


@functools.cache
def kind_of_text(key: str) -> str:
    """Return the type of a key whose value is a text or a list of texts; empty: its values are others."""
    section, _, last = plain(key).rpartition(".")
    cls = section_named(section)
    types = [str(field.type) for field in dataclasses.fields(cls) if field.name == last] if cls is not None else []
    # `reward.name` is a text or a list of texts, which no type says.
    return types[0] if types and types[0] in ("str", "str | None", "list[str]", "Any") else ""


def quoted(word: str) -> str:
    """Return an override in which words for keys of texts that look like other values are in quotes.

    null stays null where the key may have none.
    """
    name, equals, value = word.partition("=")
    return f"{name}={_Quoting(name.lstrip('+~')).of(value)}" if equals else word


def unquoted(word: str) -> str:
    """Return an override as it was before `quoted`."""
    name, _, value = word.partition("=")
    bare = f"{name}={value[1:-1]}"
    return bare if value[:1] == "'" and quoted(bare) == word else word


class _Quoting:
    """Walks through a value in Hydra's grammar, element by element."""

    def __init__(self, key: str):
        self._key = key
        self._outer: list[tuple[str, str]] = []
        """The open brackets, each with the key around it."""
        self._element: list[str] = []
        self._done: list[str] = []

    def of(self, value: str) -> str:
        for piece in _PIECES.findall(value):
            bracket = self._outer[-1][0] if self._outer else ""
            if piece in ("[", "{", "("):
                function = "".join(self._element).strip()
                self._outer.append((piece, self._key))
                if piece == "(" and function not in _CHOOSE:
                    self._key = ""
                self._take(piece, is_text=False)
            elif piece in ("]", "}", ")"):
                self._take(piece, is_text=True)
                self._key = self._outer.pop()[1] if self._outer else ""
            elif piece == ",":
                self._take(piece, is_text=True)
                self._key = self._outer[-1][1] if bracket == "{" else self._key
            elif piece == ":" and bracket == "{" and self._key == self._outer[-1][1]:
                self._key = f"{self._key}.{''.join(self._element).strip()}"
                self._take(piece, is_text=False)
            else:
                self._element.append(piece)
        self._take("", is_text=True)
        return "".join(self._done)

    def _take(self, piece: str, is_text: bool) -> None:
        """End the element before a piece; it is a value if `is_text`."""
        element, self._element = "".join(self._element), []
        bare = element.strip()
        if is_text and _TYPED.fullmatch(bare) and self._is_changed(bare):
            element = element.replace(bare, f"'{bare}'")
        self._done += [element, piece]

    def _is_changed(self, bare: str) -> bool:
        from hydra.core.override_parser.overrides_parser import OverridesParser

        kind = kind_of_text(self._key)
        may_be_null = kind in ("str | None", "Any") and not any(bracket == "[" for bracket, _ in self._outer)
        if not kind or may_be_null and bare.lower() == "null":
            return False
        return not isinstance(OverridesParser.create().parse_override(f"key={bare}").value(), str)


def construct_yaml(text: str, package: str = "") -> Any:
    """Return the values of a YAML file as OmegaConf reads them, but texts as they were typed; None: it is empty.

    Args:
        package: dotted name of the section that the file is for; empty: it has whole sections.

    Raises:
        yaml.YAMLError: the text is no YAML.
    """
    from omegaconf._utils import get_yaml_loader

    loader = get_yaml_loader()(text)
    try:
        root = loader.get_single_node()
        if root is None:
            return None
        _mark_texts(root, package)
        return loader.construct_document(root)
    finally:
        loader.dispose()


def _mark_texts(node: Any, key: str, in_list: bool = False) -> None:
    """Make strings of the plain scalars in a node of YAML that are texts or names by the schema."""
    if node.id == "mapping":
        has_names = not key or section_named(key) is not None or key in MAPPINGS or plain(key) in OPEN_SECTIONS
        for name, value in node.value:
            if has_names and name.id == "scalar" and not name.tag.endswith(":merge"):
                name.tag = _STRING
            if name.id == "scalar":
                _mark_texts(value, f"{key}.{name.value}".lstrip("."))
    elif node.id == "sequence":
        for item in node.value:
            _mark_texts(item, key, in_list=True)
    elif node.style is None and (kind := kind_of_text(key)):
        is_null = node.tag == _NULL and (not node.value.isalpha() or kind != "str" and not in_list)
        node.tag = node.tag if is_null else _STRING
