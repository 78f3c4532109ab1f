"""`penjing models | adapters | keys`: what changes a server while it runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

models_app = typer.Typer(
    help="Load, promote and take away models of a server that runs, without a failed request.", no_args_is_help=True
)
adapters_app = typer.Typer(help="Adapters of a decoder that is served come and go.", no_args_is_help=True)
keys_app = typer.Typer(help="Keys of an OpenAI front's clients: names, limits, hashes.", no_args_is_help=True)

Port = Annotated[int, typer.Option("--grpc-port", min=1, max=65535, help="The first gRPC port of the server.")]
Name = Annotated[str, typer.Argument(metavar="NAME:VERSION", help="A version that is served.", show_default=False)]


@models_app.command("load")
def models_load(
    model: Annotated[
        str, typer.Argument(metavar="NAME[:VERSION]=FOLDER", help="An artifact or checkpoint.", show_default=False)
    ],
    share: Annotated[float, typer.Option(help="Of the requests for NAME, once it answers.")] = 0.0,
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="A setting, as of `penjing serve`.")
    ] = None,
    kv_cache_bytes: Annotated[int | None, typer.Option(min=1, help="Of a decoder.", show_default=False)] = None,
    grpc_port: Port = 8001,
) -> None:
    """Load a model, or another version of one, beside those that are served; returns when it answers.

    Example: `penjing models load llm:2=build/b --share 0.1`
    """
    from penjing.serve.fleet.commands import load_to_terminal

    load_to_terminal(grpc_port, model, share, overrides or [], kv_cache_bytes)


@models_app.command("unload")
def models_unload(
    name: Annotated[str, typer.Argument(metavar="NAME[:VERSION]", help="What is taken away.", show_default=False)],
    grpc_port: Port = 8001,
) -> None:
    """Take a model away: it gets no more requests, and ends when its answers have.

    Example: `penjing models unload llm:1`
    """
    from penjing.serve.fleet.commands import unload_to_terminal

    unload_to_terminal(grpc_port, name)


@models_app.command("share")
def models_share(
    shares: Annotated[
        list[str],
        typer.Argument(
            metavar="NAME:VERSION=SHARE …", help="0 to 1; other versions share the rest as before.", show_default=False
        ),
    ],
    grpc_port: Port = 8001,
) -> None:
    """Move requests between versions, from the next one on.

    Example: `penjing models share llm:2=0.5`
    """
    from penjing.serve.fleet.commands import share_to_terminal

    share_to_terminal(grpc_port, shares)


@models_app.command("promote")
def models_promote(name: Name, grpc_port: Port = 8001) -> None:
    """Give a version all requests for its name.

    Example: `penjing models promote llm:2`
    """
    from penjing.serve.fleet.commands import share_to_terminal

    share_to_terminal(grpc_port, [f"{name}=1"])


@models_app.command("rollback")
def models_rollback(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Of a model with versions.", show_default=False)],
    grpc_port: Port = 8001,
) -> None:
    """Give the versions of a model the shares that they had before `share` or `promote` last changed them.

    Example: `penjing models rollback llm`
    """
    from penjing.serve.fleet.commands import rollback_to_terminal

    rollback_to_terminal(grpc_port, name)


@models_app.command("list")
def models_list(grpc_port: Port = 8001) -> None:
    """Show the models of a server that runs, their states and shares.

    Example: `penjing models list`
    """
    from penjing.serve.fleet.commands import show_models

    show_models(grpc_port)


Adapter = Annotated[str, typer.Argument(metavar="[MODEL:]NAME", help="What requests call it.", show_default=False)]


@adapters_app.command("add")
def adapters_add(
    adapter: Annotated[
        str, typer.Argument(metavar="[MODEL:]NAME=FOLDER", help="In PEFT's format.", show_default=False)
    ],
    grpc_port: Port = 8001,
) -> None:
    """Serve a LoRA adapter from now on, or its folder again when that has changed; returns when requests find it.

    Example: `penjing adapters add llm:alice=build/alice`
    """
    from penjing.serve.fleet.adapters import add_adapter

    add_adapter(grpc_port, adapter)


@adapters_app.command("remove")
def adapters_remove(adapter: Adapter, grpc_port: Port = 8001) -> None:
    """Refuse requests for an adapter from now on; answers that it has begun go on.

    Example: `penjing adapters remove llm:alice`
    """
    from penjing.serve.fleet.adapters import remove_adapter

    remove_adapter(grpc_port, adapter)


@adapters_app.command("list")
def adapters_list(grpc_port: Port = 8001) -> None:
    """Show the adapters of a server that runs.

    Example: `penjing adapters list`
    """
    from penjing.serve.fleet.adapters import show_adapters

    show_adapters(grpc_port)


KeyFile = Annotated[Path, typer.Option("--file", help="The file of the keys; `penjing serve --keys` reads it.")]


@keys_app.command("add")
def keys_add(
    name: Annotated[str, typer.Argument(help="Of whoever gets the key.", show_default=False)],
    file: KeyFile = Path("keys.toml"),
    tokens_per_minute: Annotated[int | None, typer.Option(help="Of prompts and answers together.")] = None,
    requests_per_minute: Annotated[int | None, typer.Option(help="Requests that begin.")] = None,
    max_concurrent: Annotated[int | None, typer.Option(help="Requests under way at once.")] = None,
    priority: Annotated[int, typer.Option(help="Lower ones come first in the queue; -100 to 100.")] = 0,
    metrics: Annotated[bool, typer.Option("--metrics", help="It may read /metrics.")] = False,
) -> None:
    """Make a key and print its secret, once; servers that run know it at once.

    Example: `penjing keys add alice --tokens-per-minute 20000`
    """
    from penjing.serve.access.commands import add_to_terminal

    limits: dict[str, Any] = {
        "tokens_per_minute": tokens_per_minute,
        "requests_per_minute": requests_per_minute,
        "max_concurrent": max_concurrent,
        "priority": priority,
        "metrics": metrics,
    }
    add_to_terminal(file, name, limits)


@keys_app.command("list")
def keys_list(file: KeyFile = Path("keys.toml")) -> None:
    """Show names, dates and limits.

    Example: `penjing keys list`
    """
    from penjing.serve.access.commands import list_to_terminal

    list_to_terminal(file)


@keys_app.command("revoke")
def keys_revoke(
    name: Annotated[str, typer.Argument(help="Whose key.", show_default=False)], file: KeyFile = Path("keys.toml")
) -> None:
    """Refuse a key from now on; servers that run know it at once.

    Example: `penjing keys revoke alice`
    """
    from penjing.serve.access.commands import revoke_to_terminal

    revoke_to_terminal(file, name)
