"""Episodes as an Arrow table, bit for bit: the format of the journal and of rollouts that are kept."""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from trainer.episodes import Episode, Sample, TokenScores

if TYPE_CHECKING:
    import pyarrow as pa


@functools.cache
def schema(has_scores: bool = False, has_players: bool = False) -> pa.Schema:
    """Return the columns: one row for each episode.

    Args:
        has_scores: what the trainer computed for the tokens is kept with them.
        has_players: samples have players, or were sampled by another policy. Else their reward is that of the episode.

    `key` names its group in the journal; null elsewhere. `messages`, `rewards` and `metrics` are JSON, which has any
    content; null stands for what an episode does not have. A text that is no Unicode is JSON after a mark.
    """
    import pyarrow as pa  # slow to import, and starts a thread

    sample = pa.struct(
        [
            ("token_ids", pa.list_(pa.int32())),
            ("mask", pa.list_(pa.float32())),
            ("logprobs", pa.list_(pa.float32())),
            ("weight_versions", pa.list_(pa.int64())),
            ("version_spans", pa.list_(pa.list_(pa.int64()))),
            *([("reward", pa.float64()), ("player", pa.string()), ("sampled_by", pa.string())] if has_players else []),
        ]
    )
    names = ("key", "group", "uid", "source", "messages", "answer", "status", "failure")
    texts = [(name, pa.string()) for name in names]
    of_reward = [("reward", pa.float64()), ("baseline", pa.float64()), ("rewards", pa.string())]
    others = [("metrics", pa.string()), ("turns", pa.int64()), ("samples", pa.list_(sample))]
    scores = pa.struct([(name, pa.list_(pa.float32())) for name in _SCORES])
    others += [("scores", pa.list_(scores))] if has_scores else []
    return pa.schema([("step", pa.int64()), *texts, *of_reward, *others])


_SCORES = ("logprobs", "entropy", "advantages")
_TEXTS = ("group", "uid", "answer", "status", "failure")
_PLAIN = (*_TEXTS, "source", "turns", "reward", "baseline")
_JSON = ("messages", "rewards", "metrics")
_ESCAPE = "\0json "
_encode_any = json.JSONEncoder(default=str).encode  # as text: times and decimals of Parquet files


def key_of_episode(group: str, number: int) -> str:
    """Return the key of an episode that is recorded by itself, from the key of its group."""
    return f"{group}:{number}"


def key_of_group(key: str) -> str:
    """Return the key of a group, from its own or from that of one of its episodes."""
    return key.partition(":")[0]


def encode_groups(step: int, groups: Mapping[str, Sequence[Episode]], about: Mapping[str, str]) -> bytes:
    """Return groups of episodes, by key, as `encode` does."""
    keys = [key for key, episodes in groups.items() for _ in episodes]
    return encode(step, [episode for group in groups.values() for episode in group], keys, about)


def encode(
    step: int,
    episodes: Sequence[Episode],
    keys: Sequence[str | None] | None = None,
    about: Mapping[str, str] | None = None,
    scores: Sequence[TokenScores] | None = None,
) -> bytes:
    """Return episodes as an Arrow IPC file. The same episodes give the same bytes.

    Args:
        keys: of their groups; None: they have none.
        about: metadata of the file.
        scores: one for each sample of the episodes; None: they are not kept.

    Raises:
        ValueError: an episode has a value that the format cannot hold.
    """
    import pyarrow as pa

    has_players = any(sample.player or sample.sampled_by for episode in episodes for sample in episode.samples)
    kept = schema(scores is not None, has_players)
    texts: dict[int, str] = {}  # of messages: the episodes of a group share those of its prompt
    try:
        for message in (message for episode in episodes for message in episode.messages):
            if id(message) not in texts:
                texts[id(message)] = _encode_any(message)
        columns: dict[str, Any] = {name: [getattr(episode, name) for episode in episodes] for name in _PLAIN}
        columns |= {name: [_escaped(text) for text in columns[name]] for name in _TEXTS}
        columns |= {
            name: [json.dumps(dict(getattr(episode, name))) for episode in episodes] for name in ("rewards", "metrics")
        }
        columns["messages"] = [f"[{', '.join([texts[id(one)] for one in episode.messages])}]" for episode in episodes]
        columns |= {"step": [step] * len(episodes), "key": keys or [None] * len(episodes)}
        names = [field.name for field in kept.field("samples").type.value_type]
        columns["samples"] = [
            [{name: getattr(sample, name) for name in names} for sample in episode.samples] for episode in episodes
        ]
        if scores is not None:
            assert len(scores) == sum(len(episode.samples) for episode in episodes), "one for each sample"
            remaining = iter(scores)
            columns["scores"] = [[vars(next(remaining)) for _ in episode.samples] for episode in episodes]
        table = pa.table([columns[name] for name in kept.names], kept.with_metadata(dict(about or {})))
    except (TypeError, UnicodeError, pa.ArrowException) as error:
        raise ValueError(str(error)) from error
    sink = pa.BufferOutputStream()
    options = pa.ipc.IpcWriteOptions(compression="lz4")  # zstd takes several times the CPU time
    with pa.ipc.new_file(sink, table.schema, options=options) as writer:
        writer.write_table(table)
    return sink.getvalue().to_pybytes()


def keys_in(data: bytes) -> tuple[list[str], dict[str, str]]:
    """Return the keys of the groups of a file, and its metadata. Nothing else is decoded.

    Raises:
        ValueError: the file is damaged, or is another one.
    """
    import pyarrow as pa

    try:
        of_file = pa.ipc.open_file(pa.BufferReader(data)).schema
        if "key" not in of_file.names:
            raise ValueError("it has other columns")
        options = pa.ipc.IpcReadOptions(included_fields=[of_file.names.index("key")])
        keys = pa.ipc.open_file(pa.BufferReader(data), options=options).read_all().column("key")
        keys.validate(full=True)
        return list(dict.fromkeys(keys.to_pylist())), _metadata(of_file)
    except (pa.ArrowException, OSError) as error:
        raise ValueError(str(error)) from error


def decode_groups(data: bytes, keys: Collection[str] | None = None) -> tuple[dict[str, list[Episode]], dict[str, str]]:
    """Return the groups of a file, by key, and the metadata of the file.

    Args:
        keys: of the groups that are returned; None: all.

    Raises:
        ValueError: the file is damaged, or is another one.
    """
    import pyarrow as pa

    table = _table_in(data)
    has_scores = "scores" in table.schema.names
    if not any(table.schema.equals(schema(has_scores, has_players)) for has_players in (False, True)):
        raise ValueError("it has other columns")
    if keys is not None:
        chosen = frozenset(keys)
        table = table.filter(pa.array([key in chosen for key in table.column("key").to_pylist()], pa.bool_()))
    rows = table.select([*_PLAIN, *_JSON, "key"]).to_pylist()
    samples = _samples_of(table.column("samples").combine_chunks())
    groups: dict[str, list[Episode]] = {}
    for row, own in zip(rows, samples, strict=True):
        key = row.pop("key")
        row |= {name: json.loads(row[name]) for name in _JSON} | {name: unescaped(row[name]) for name in _TEXTS}
        groups.setdefault(key, []).append(Episode(samples=own, **row))
    return groups, _metadata(table.schema)


def _table_in(data: bytes) -> pa.Table:
    """Return the table of a file, checked."""
    import pyarrow as pa

    try:
        table = pa.ipc.open_file(pa.BufferReader(data)).read_all()
        table.validate(full=True)
    except (pa.ArrowException, OSError) as error:
        raise ValueError(str(error)) from error
    return table


def _metadata(of_file: pa.Schema) -> dict[str, str]:
    return {name.decode(): value.decode() for name, value in (of_file.metadata or {}).items()}


def decode_scores(data: bytes) -> list[list[TokenScores]] | None:
    """Return the scores in a file that `decode_groups` can read, by episode in the order of the file; None: none.

    Raises:
        ValueError: the file is damaged.
    """
    table = _table_in(data)
    if "scores" not in table.schema.names:
        return None
    column = table.column("scores").combine_chunks()
    arrays = (_arrays(column.values.field(name)) for name in _SCORES)
    return _by_episode(column, [TokenScores(*of_token) for of_token in zip(*arrays, strict=True)])


def _escaped(text: str) -> str:
    """Return a text that Arrow can hold. Python's texts can have halves of characters, as JSON data can."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return _ESCAPE + json.dumps(text)
    return _ESCAPE + json.dumps(text) if text.startswith(_ESCAPE) else text


def unescaped(text: str) -> str:
    """Return the text of a column that `schema` has as text."""
    return json.loads(text.removeprefix(_ESCAPE)) if text.startswith(_ESCAPE) else text


def _samples_of(column: pa.ListArray) -> list[list[Sample]]:
    structs = column.values
    tokens, masks, logprobs, versions = (_arrays(structs.field(i)) for i in range(4))
    spans = structs.field(4).to_pylist()
    others = [structs.field(i).to_pylist() for i in range(5, structs.type.num_fields)]
    samples = [
        Sample(
            tokens[i],
            masks[i],
            logprobs[i],
            None if versions[i] is None else tuple(versions[i].tolist()),
            tuple(map(tuple, spans[i])),
            *(column[i] for column in others),
        )
        for i in range(len(structs))
    ]
    return _by_episode(column, samples)


def _by_episode(column: pa.ListArray, values: list[Any]) -> list[list[Any]]:
    """Return values, one for each element of the lists of a column, as lists."""
    return [values[start:end] for start, end in itertools.pairwise(column.offsets.to_pylist())]


def _arrays(column: pa.ListArray) -> list[Any]:
    values, missing = column.values.to_numpy(zero_copy_only=False), column.is_null().to_pylist()
    bounds = itertools.pairwise(column.offsets.to_pylist())
    return [None if is_null else values[i:j].copy() for is_null, (i, j) in zip(missing, bounds, strict=True)]
