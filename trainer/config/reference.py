"""`docs/config.md`, generated from the schema: each key with its type, bounds, default, resume rule and meaning."""

from __future__ import annotations

import ast
import dataclasses
import inspect
from collections.abc import Iterator, Sequence

from trainer.config.fields import RESUME, constraint_of, resume_rules, walk_sections
from trainer.config.schema import counterpart_of, foreign_keys, with_sections, without_source
from trainer.errors import UserError, did_you_mean
from trainer.process.log_setup import ToolParser, run_tool, show

_HEADER = [
    "# Configuration reference",
    "",
    "Generated from `trainer/config/` by `make docs`. The default is that of the schema; a group "
    "(`conf/<group>/<name>.yaml`) may set another.",
    "",
    "The column `resume` says what a resume may do with a key whose value differs from that in the checkpoint. "
    "Permission is `trainer.allow_config_change=[KEY]`. A fork (`trainer.resume_mode=from_path`) changes all keys, but "
    "not those of state that it restores.",
    "",
    *(f"- `{name}`: {meaning}" for name, meaning in RESUME.items()),
    "",
]
_FOREIGN = [
    "## Keys of verl, SkyRL and TRL",
    "",
    "What they are called here. A command with such a key is refused, and the message has the key of this table.",
    "Some take other values, which the row of that key names. [rewards.md](rewards.md) has the same for the "
    "arguments of reward functions.",
    "",
    "| key | here |",
    "|---|---|",
]


def main(argv: list[str] | None = None) -> int:
    """Print the reference of all keys, or of some, as `trainer config` does; returns the exit status."""
    parser = ToolParser(prog="trainer config", description="Print the reference of the config keys.")
    parser.add_argument("words", nargs="*", metavar="KEY", help="a key, or a part of one; default: all, as Markdown")
    return run_tool(parser, lambda args: show(_entries_of(args.words)) if args.words else print(page()), argv)


def page() -> str:
    """Return the text of `docs/config.md`."""
    lines, last = list(_HEADER), ""
    for name, (key, *rest) in _rows():
        if name != last:
            head = [f"## {name}", "", "| key | type | default | resume | meaning |", "|---|---|---|---|---|"]
            lines += [*([""] if last else []), *head]
        lines.append("| " + " | ".join([f"`{key}`", *rest]) + " |")
        last = name
    lines += ["", *_FOREIGN, *(f"| {key} | {here} |" for key, here in foreign_keys().items()), ""]
    return "\n".join(lines)


def _rows() -> Iterator[tuple[str, tuple[str, str, str, str, str]]]:
    """Yield each section with key, type, default, resume rule and meaning of one of its keys."""
    config = with_sections()
    rules = resume_rules(config)
    for name, section in walk_sections(config):
        if without_source(name) != name:
            continue
        docs = field_docs(type(section))
        for f in dataclasses.fields(section):
            key, value = f"{name}.{f.name}", getattr(section, f.name)
            if not dataclasses.is_dataclass(value):
                constraint, rule = constraint_of(f), rules[key]
                kind = ", ".join(filter(None, (str(f.type).replace("|", "or"), constraint.bounds())))
                shown = "{}" if constraint.section else as_written(value)
                resume = ": ".join(filter(None, (rule.change, rule.reason)))
                yield name, (key, kind, f"`{shown}`", resume, docs[f.name])
            elif without_source(key) != key:
                yield name, (key, "section", "the run's", "that of the key", docs[f.name])


def _entries_of(words: Sequence[str]) -> str:
    """Return the entries of the keys that hold one of the words."""
    rows, found = [row for _, row in _rows()], {}
    for word in words:
        wanted = word.lstrip("+~").partition("=")[0]
        exact = [row for row in rows if row[0] == wanted]
        some = exact or [row for row in rows if wanted.lower() in row[0].lower()]
        if not some:
            meant = counterpart_of(wanted) or did_you_mean(wanted, [row[0] for row in rows])
            raise UserError(f"{word}: no key has that in its name" + (f"; {meant}" if meant else ""))
        found |= {row[0]: row for row in some}
    return "\n".join(
        f"{key}: {kind}, default {default.strip('`')}, resume {rule}\n  {meaning}"
        for key, kind, default, rule, meaning in found.values()
    )


def field_docs(cls: type) -> dict[str, str]:
    """Return the docstring under each field of a dataclass, inherited fields included."""
    parents = [base for base in cls.__bases__ if dataclasses.is_dataclass(base)]
    docs = {name: text for base in parents for name, text in field_docs(base).items()}
    body = ast.parse(inspect.getsource(cls)).body[0].body  # type: ignore[attr-defined]
    for statement, following in zip(body, body[1:], strict=False):
        is_text = isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant)
        if isinstance(statement, ast.AnnAssign) and is_text:
            docs[statement.target.id] = " ".join(following.value.value.split())  # type: ignore[union-attr]
    return docs


def as_written(value: object) -> object:
    """Return the value of a key as YAML writes it."""
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else value
