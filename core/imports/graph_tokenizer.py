"""A graph that takes tokens comes in with its tokenizer, so that texts can be given to it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from torch.fx import Node

from penjing.core.errors import InputError
from penjing.core.graph.network import Network, operator_name, tensors_of
from penjing.core.text.text_tokenizer import TOKENIZER
from penjing.core.text.tokenizer import read_backend


def tokenizer_file(path: Path) -> Path:
    """The tokenizer.json that `path` is, or that lies in it.

    Raises:
        InputError: there is none.
    """
    path = path.expanduser()
    found = path / TOKENIZER if path.is_dir() else path
    if not found.is_file():
        raise InputError(f"--tokenizer {path}: there is no {TOKENIZER}; name one, or a folder that has one")
    return found


def with_tokenizer(network: Network, path: Path) -> Network:
    """`network` with the tokenizer of `path`, a file or a folder.

    Raises:
        InputError: missing or damaged; it has tokens that the network has no embedding for.
    """
    file = tokenizer_file(path)
    backend = read_backend(file)
    largest = max(backend.get_vocab(with_added_tokens=True).values(), default=-1)
    rows = _rows_of_embeddings(network)
    if rows and largest >= max(rows):
        raise InputError(
            f"{file} has a token {largest}, the network's embedding only {max(rows)} rows; they do not belong together"
        )
    return replace(network, tokenizer=file.read_text(encoding="utf-8"))


def _rows_of_embeddings(network: Network) -> list[int]:
    """Of the tables that an input is looked up in as it is."""
    tensors, found = tensors_of(network.module), []
    for node in network.module.graph.nodes:
        if operator_name(node) == "embedding":
            table, looked_up = node.args[:2]
            if isinstance(table, Node) and isinstance(looked_up, Node) and looked_up.op == "placeholder":
                found.append(tensors[str(table.target)].shape[0])
    return found
