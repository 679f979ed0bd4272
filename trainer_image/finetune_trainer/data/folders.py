"""Data that are a folder as a whole: data sets saved by `datasets`, texts in a folder for each label, and essays beside
a table of their spans.

Texts of such folders are small files, and are read into memory.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from pathlib import PurePosixPath
from typing import Any, TypeAlias

import datasets
import pyarrow as pa

from finetune_contract.layout import FailureClass
from finetune_trainer.core.failures import StageError
from finetune_trainer.data.file_formats import ARRAY_BYTES, TAGS, TEXT, TOKENS, format_of

Loader: TypeAlias = Callable[[], datasets.Dataset]
LABEL = "label"
"""Column of the folder's name."""
_UNLABELLED = "unsup"
"""Folder of texts without a label in the reviews of IMDB."""


def saved_splits(filesystem: Any, path: str) -> dict[str, Loader]:
    """Return split -> its rows, for a folder that `save_to_disk` wrote on this machine; empty for another folder. A
    `Dataset` is the split train.
    """
    names = _names(filesystem, path)
    if "file" not in filesystem.protocol or not names & {"dataset_dict.json", "state.json"}:
        return {}
    if "dataset_dict.json" not in names:
        return {"train": partial(_saved, path)}
    return {
        split: partial(_saved, f"{path}/{split}")
        for split in json.loads(filesystem.cat_file(f"{path}/dataset_dict.json"))["splits"]
    }


def _saved(path: str) -> datasets.Dataset:
    try:
        rows = datasets.load_from_disk(path)
    except (OSError, ValueError, KeyError, pa.ArrowException) as error:
        raise StageError(
            FailureClass.DATA, "CorruptFile", f"{path} cannot be read: {error}", "Save the data set again."
        ) from error
    assert isinstance(rows, datasets.Dataset)
    return rows


def label_splits(filesystem: Any, path: str, roles: Collection[str]) -> dict[str, Loader]:
    """Return split -> texts with their labels, for a folder with SPLIT/LABEL/*.txt; empty for another folder. `roles`:
    names of splits; one has such a folder, and none a file.
    """
    files = [PurePosixPath(name).name for name in _names(filesystem, path) if format_of(name)]
    folders = {PurePosixPath(folder).name: folder for folder in _folders(filesystem, path)}
    if not folders.keys() & set(roles) or any(name.startswith(tuple(roles)) for name in files):
        return {}
    splits = {split: _labels(filesystem, folder) for split, folder in folders.items()}
    return {split: partial(_labelled, filesystem, labels) for split, labels in splits.items() if len(labels) > 1}


def label_folder(filesystem: Any, path: str) -> Loader | None:
    """Return the texts with their labels, for a folder with LABEL/*.txt and no other data; None for another folder."""
    labels = {} if any(map(format_of, _names(filesystem, path))) else _labels(filesystem, path)
    return partial(_labelled, filesystem, labels) if len(labels) > 1 else None


def _labels(filesystem: Any, path: str) -> dict[str, list[str]]:
    """Return label -> files of its folder, for folders with text files."""
    folders = {PurePosixPath(folder).name: folder for folder in _folders(filesystem, path)}
    texts = {
        label: sorted(file for file in filesystem.ls(folder, detail=False) if file.endswith(".txt"))
        for label, folder in sorted(folders.items())
        if label != _UNLABELLED
    }
    return {label: files for label, files in texts.items() if files}


def _labelled(filesystem: Any, labels: Mapping[str, Iterable[str]]) -> datasets.Dataset:
    files = [(label, file) for label, files in labels.items() for file in files]
    texts = read_texts(filesystem, [file for _, file in files])
    return in_memory({TEXT: texts, LABEL: [label for label, _ in files]})


def read_texts(filesystem: Any, files: Iterable[str]) -> list[str]:
    """Return the texts of files. Raise StageError DATA `DataNotFound`, `CorruptFile` for one that is not UTF-8, and
    `ArrayTooLong` for more than fit the memory.
    """
    texts, size = [], 0
    for file in files:
        try:
            content: bytes = filesystem.cat_file(file)
        except FileNotFoundError:
            raise StageError(
                FailureClass.DATA, "DataNotFound", f"The rows name {file}, which does not exist.", "Add the file."
            ) from None
        size += len(content)
        if size > ARRAY_BYTES:
            raise StageError(
                FailureClass.DATA,
                "ArrayTooLong",
                f"{file} and the texts before it have more than {ARRAY_BYTES >> 30} GiB, and are read at once.",
                "Write them as JSON Lines: one object per line, with the text and its label.",
            )
        try:
            texts.append(content.decode("utf-8-sig"))
        except UnicodeDecodeError as error:
            raise StageError(
                FailureClass.DATA, "CorruptFile", f"{file} is not UTF-8: {error}.", "Convert the file."
            ) from None
    return texts


def in_memory(columns: Mapping[str, list[Any]]) -> datasets.Dataset:
    """Return rows in memory, whose fingerprint follows from their content alone."""
    table = pa.table(dict(columns))
    digest = hashlib.sha256()
    for batch in table.to_batches():
        digest.update(batch.serialize())
    return datasets.Dataset(table, fingerprint=digest.hexdigest())


def _names(filesystem: Any, path: str) -> set[str]:
    return {PurePosixPath(name).name for name in filesystem.ls(path, detail=False)}


def _folders(filesystem: Any, path: str) -> list[str]:
    found = [entry for entry in filesystem.ls(path, detail=True) if entry["type"] == "directory"]
    return [entry["name"] for entry in found if not PurePosixPath(entry["name"]).name.startswith(".")]


# --------------------------------------------------------------------------------------------------------------- essays


def essays(filesystem: Any, folder: str, spans: Iterable[Mapping[str, Any]]) -> datasets.Dataset:
    """Return the words of each essay (`folder`/ID.txt), split at blanks, with the BIO tags of its spans. A span has
    `id`, `discourse_type` and `predictionstring`, the indices of its words. Neighbours that share a word occur in such
    data: the first one keeps it.
    """
    of_essay: dict[str, list[Mapping[str, Any]]] = {}
    for span in spans:
        of_essay.setdefault(span["id"], []).append(span)
    texts = read_texts(filesystem, [f"{folder}/{name}.txt" for name in of_essay])
    rows: dict[str, list[Any]] = {"id": list(of_essay), TOKENS: [text.split() for text in texts], TAGS: []}
    for words, (name, given) in zip(rows[TOKENS], of_essay.items(), strict=True):
        tags = ["O"] * len(words)
        for span in given:
            places = [int(place) for place in span["predictionstring"].split() if place.isdigit()]
            if not places or max(places) >= len(words):
                raise StageError(
                    FailureClass.DATA,
                    "WrongShape",
                    f"Essay {name} has {len(words)} words, and a span at the words {span['predictionstring']!r}.",
                    "Correct its predictionstring.",
                )
            free = [place for place in places if tags[place] == "O"]
            for number, place in enumerate(free):
                tags[place] = f"{'I' if number else 'B'}-{span['discourse_type']}"
        rows[TAGS].append(tags)
    return in_memory(rows)
