"""`penjing serve | stop | chat | generate | server | bench`; what changes a server is in `cli_running.py`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from penjing.core.cli_options import Json, model_folder, stage_app, write_json
from penjing.core.errors import ConfigError
from penjing.serve.cli_running import adapters_app, keys_app, models_app
from penjing.serve.options import ADAPTER, AdapterOf, Device, EngineSet, Images, KvDtype, Speculate, engine_config

app = stage_app()
server_app = typer.Typer(help="The embedded Triton server: install it once, see what is there.", no_args_is_help=True)
bench_app = typer.Typer(help="Tokens per second, latency and memory: a table and JSON.", no_args_is_help=True)
app.add_typer(models_app, name="models")
app.add_typer(adapters_app, name="adapters")
app.add_typer(keys_app, name="keys")
app.add_typer(server_app, name="server")
app.add_typer(bench_app, name="bench")

Model = Annotated[Path, model_folder("A checkpoint or artifact folder.")]
Runs = Annotated[int, typer.Option(min=1, help="Runs after a warm-up; medians are shown.")]


@app.command()
def generate(
    model: Model,
    prompt: Annotated[str, typer.Argument(help="The text to continue; `-` reads standard input.", show_default=False)],
    max_tokens: Annotated[int, typer.Option(help="New tokens at most.")] = 128,
    temperature: Annotated[float, typer.Option(help="0 takes the most likely token each time.")] = 0.0,
    top_p: Annotated[float, typer.Option(help="Sample from the smallest set with this probability.")] = 1.0,
    top_k: Annotated[int, typer.Option(help="Sample from the k most likely tokens; 0 for all.")] = 0,
    seed: Annotated[int | None, typer.Option(help="Makes sampling repeatable.")] = None,
    stop: Annotated[
        list[str] | None, typer.Option(metavar="TEXT", help="Stop before this text; may be repeated.")
    ] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Wrap the prompt in the model's chat template.")] = False,
    images: Images = None,
    adapter: AdapterOf = None,
    kv_dtype: KvDtype = "auto",
    device: Device = "cpu",
    speculate: Speculate = "forced",
    overrides: EngineSet = None,
    samples: Annotated[int, typer.Option(min=0, help="Write so many texts to --out, each sampled by itself.")] = 0,
    out: Annotated[Path | None, typer.Option(help="Folder of the --samples: a source of training text.")] = None,
) -> None:
    """Generate text in this process, streaming it as it comes; or many texts to distil from.

    Examples:

    - `penjing generate build/smollm2-int8 "Once upon a time" --max-tokens 64`
    - `penjing generate build/vlm-tiny "What is left of the bag?" --image scene.png`
    - `penjing generate build/smollm2 "What is 17 + 25?" --chat --adapter build/smollm2-lora/adapter`
    """
    from penjing.core.progress import plural, progress_bar
    from penjing.serve.generate import generate_to_terminal
    from penjing.serve.samples import sample_texts

    sampling: dict[str, Any] = {"max_tokens": max_tokens, "temperature": temperature, "top_p": top_p, "top_k": top_k}
    sampling |= {"stop": stop or [], **({} if seed is None else {"seed": seed})}
    text = sys.stdin.read().removeprefix("\ufeff") if prompt == "-" else prompt
    if (samples > 0) != (out is not None):
        raise ConfigError("--samples and --out belong together: how many texts, and the folder for them")
    config = engine_config(kv_dtype, device, speculate, overrides, adapter)
    if adapter is not None:
        sampling["lora_name"] = ADAPTER
    if out is not None:
        if images:
            raise ConfigError("--image is for one answer: leave --samples and --out away")
        with progress_bar() as progress:
            written = sample_texts(model, text, sampling, samples, out, progress, chat=chat, engine_config=config)
            there = f"; {samples - written:,} were there already" if written < samples else ""
            progress.note(f"wrote {plural(written, 'text')} to {out}{there}")
        return
    generate_to_terminal(model, text, sampling, chat=chat, engine_config=config, images=images or [])


@app.command()
def serve(
    models: Annotated[
        list[str],
        typer.Argument(
            metavar="MODEL | NAME[:VERSION]=MODEL …",
            help="A checkpoint or artifact folder; several with a name each.",
            show_default=False,
        ),
    ],
    host: Annotated[str, typer.Option(help="Address of --openai, else of gRPC; loopback by default.")] = "127.0.0.1",
    grpc_port: Annotated[int, typer.Option(min=1, max=65535, help="gRPC.")] = 8001,
    http_port: Annotated[
        int | None,
        typer.Option(min=1, max=65535, help="Triton server's own HTTP, closed by default, and on loopback alone."),
    ] = None,
    metrics_port: Annotated[int, typer.Option(min=1, max=65535, help="Prometheus metrics, on loopback alone.")] = 8002,
    openai: Annotated[
        int | None,
        typer.Option(min=1, max=65535, help="Port of OpenAI's interface; the server behind it stays on loopback."),
    ] = None,
    keys: Annotated[Path | None, typer.Option(help="File of the keys that --openai asks for; `penjing keys`.")] = None,
    tls: Annotated[
        tuple[Path, Path] | None, typer.Option(metavar="CERT KEY", help="PEM files: --openai speaks HTTPS.")
    ] = None,
    limits: Annotated[
        list[str] | None, typer.Option("--front", metavar="KEY=VALUE", help="A limit of --openai: max_body_bytes=…")
    ] = None,
    detach: Annotated[bool, typer.Option("--detach", help="Return when ready; `penjing stop` ends it.")] = False,
    kv_dtype: KvDtype = "auto",
    device: Device = "cpu",
    overrides: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="A setting: max_num_sequences=64 of a decoder's engine, max_batch_size=128 of a classifier. Of "
            "several models NAME.KEY=VALUE.",
        ),
    ] = None,
    shares: Annotated[
        list[str] | None,
        typer.Option(
            "--share",
            metavar="NAME:VERSION=SHARE",
            help="Of the requests for NAME to --openai, 0 to 1; the first version without a share gets the rest.",
        ),
    ] = None,
    adapters: Annotated[
        list[str] | None,
        typer.Option(
            "--adapter",
            metavar="[MODEL:]NAME=FOLDER",
            help="A LoRA adapter in PEFT's format, which requests choose as MODEL:NAME; may be repeated.",
        ),
    ] = None,
    kv_cache_bytes: Annotated[
        int | None,
        typer.Option(
            min=1, help="Of several models: the key-value caches of all decoders together.", show_default=False
        ),
    ] = None,
) -> None:
    """Serve a decoder, or the artifact of any other network, from a real Triton server; Ctrl-C lets running answers
    finish.

    Examples:

    - `penjing serve build/smollm2-int8 --detach`
    - `penjing serve build/smollm2-int8 --openai 8080 # for clients of OpenAI at http://localhost:8080/v1`
    - `penjing serve build/resnet-fashion-int8 --set max_queue_delay=0.002 # a classifier, of images`
    - `penjing serve build/net-int8 # any other network, by its own inputs and outputs`
    - `penjing serve llm=build/smollm2-int8 embed=build/minilm-int8 --openai 8080 # several models, one front`
    - `penjing serve llm=build/smollm2 --openai 8080 --adapter llm:alice=build/alice/adapter # also the model llm:alice`
    - `penjing serve llm:1=build/a llm:2=build/b --share llm:2=0.1 --openai 8080 # two versions of a model`

    Clients: `penjing chat`, `penjing.Client` in Python, or any client of Triton server: of a classifier
    `Client().classify(images)`, of any other network `Client().infer({"x": array})`.
    """
    from penjing.core.family import check_folder
    from penjing.serve.fleet.names import UNSHARED, adapter_settings, are_named, read_names

    named = read_names(models, shares or []) if are_named(models) else []
    for folder in [model.folder for model in named] or [Path(models[0])]:
        check_folder(folder)
    from penjing.serve.fleet.plan import make_plan
    from penjing.serve.fleet.start import serve_fleet
    from penjing.serve.gate.config import front_config
    from penjing.serve.supervisor.supervisor import ServeConfig
    from penjing.serve.supervisor.supervisor import serve as run

    front = front_config(openai, host, keys, tls, limits or [])
    if front is not None and front.keys is None and not front.is_local:
        print(f"anybody who reaches {front.url} may ask: --keys FILE lets only those in who have one", file=sys.stderr)
    config = ServeConfig(
        host=host if front is None else "127.0.0.1",
        grpc_port=grpc_port,
        http_port=http_port,
        metrics_port=metrics_port,
        front=front,
    )
    flags = {"kv_dtype": (kv_dtype, "auto"), "device": (device, "cpu")}  # of decoders; their defaults say nothing
    chosen = [f"{name}={value}" for name, (value, default) in flags.items() if value != default]
    settings = [*(overrides or []), *adapter_settings(adapters or [], named=bool(named))]
    if named:
        if shares and front is None:
            raise ConfigError(f"--share {UNSHARED}")
        return serve_fleet(make_plan(named, config, settings, chosen, kv_cache_bytes), detach=detach)
    if shares or kv_cache_bytes:
        raise ConfigError("--share and --kv-cache-bytes are of several models, each with a name: llm:1=build/a")
    run(Path(models[0]), config, detach=detach, engine_overrides=[*chosen, *settings])


@app.command()
def stop(
    grpc_port: Annotated[int, typer.Option(min=1, max=65535, help="The gRPC port of the server to stop.")] = 8001,
    timeout: Annotated[float, typer.Option(help="Seconds to let running answers finish.")] = 30.0,
) -> None:
    """Drain and stop a server that `penjing serve --detach` started, with all of its models.

    Examples:

    - `penjing stop`
    - `penjing stop --grpc-port 9001 --timeout 5`
    """
    from penjing.serve.supervisor.stop import stop as run

    run(grpc_port, timeout=timeout)


@app.command()
def chat(
    server: Annotated[str, typer.Option(help="host:port of a server's gRPC endpoint.")] = "localhost:8001",
    system: Annotated[str | None, typer.Option(help="A system message.")] = None,
    max_tokens: Annotated[int, typer.Option(help="Tokens of one answer at most.")] = 512,
    temperature: Annotated[float, typer.Option(help="0 takes the most likely token each time.")] = 0.7,
    model: Annotated[str | None, typer.Option(help="The model's name on the server, where it was given one.")] = None,
    images: Images = None,
) -> None:
    """Chat with a served model in the terminal; Ctrl-C cancels the answer, Ctrl-D leaves.

    Examples:

    - `penjing chat --server localhost:8001`
    - `penjing chat --image photo.jpg # with a model that sees`
    """
    from penjing.serve.client.chat import chat as run
    from penjing.serve.sight.wire import read_image

    files = [read_image(path) for path in images or ()]
    run(server, system=system, max_tokens=max_tokens, temperature=temperature, model=model, images=files)


@server_app.command("install")
def server_install() -> None:
    """Fetch and unpack the embedded Triton server (55 MB, once, checksum verified).

    Example: `penjing server install`
    """
    from penjing.serve.supervisor.install import install_to_terminal

    install_to_terminal()


@server_app.command("status")
def server_status() -> None:
    """Show which Triton server would run and what is running.

    Example: `penjing server status`
    """
    from penjing.serve.fleet.status import status_to_terminal

    status_to_terminal()


@bench_app.command("engine")
def bench_engine(
    model: Model,
    runs: Runs = 5,
    kv_dtype: KvDtype = "auto",
    device: Device = "cpu",
    speculate: Speculate = "forced",
    overrides: EngineSet = None,
    json_file: Json = None,
) -> None:
    """Measure the engine in this process: prefill, one stream, 16 streams.

    Example: `penjing bench engine build/smollm2-int8 --json bench.json`
    """
    from penjing.core.progress import progress_bar
    from penjing.serve.bench.engine import bench_engine as run

    with progress_bar() as progress:
        config = engine_config(kv_dtype, device, speculate, overrides)
        result = run(model, runs=runs, progress=progress, engine_config=config)
    _show(result, json_file)


@bench_app.command("server")
def bench_server(
    model: Annotated[Path | None, model_folder("A checkpoint or artifact folder.")] = None,
    server: Annotated[str, typer.Option(help="host:port of the gRPC endpoint.")] = "localhost:8001",
    name: Annotated[
        str | None,
        typer.Option(
            help="The model's name on the server, where it was given one; of a server here it is known, and over HTTP "
            "it is the first that the front lists."
        ),
    ] = None,
    runs: Runs = 5,
    openai: Annotated[
        str | None, typer.Option(help="[https://]host:port of the front: an open loop of requests.")
    ] = None,
    scenario: Annotated[
        Literal["chat", "long-prompt", "shared-prefix", "burst"], typer.Option(help="What is asked over HTTP.")
    ] = "chat",
    rate: Annotated[float, typer.Option(help="Requests a second over HTTP, on average.")] = 1.0,
    seconds: Annotated[float, typer.Option(help="For so long requests are sent over HTTP.")] = 60.0,
    goals: Annotated[
        tuple[float, float],
        typer.Option(metavar="FIRST EACH", help="Seconds to the first token and a token, for a request to be good."),
    ] = (1.0, 0.1),
    report: Annotated[Path | None, typer.Option(help="Write a page about the load here.")] = None,
    json_file: Json = None,
) -> None:
    """Measure a running server from outside, and in turns MODEL, which it serves, in this process.

    With `--openai` no MODEL is needed: requests arrive at times that do not depend on the answers.

    Examples:

    - `penjing bench server build/smollm2-int8 --server localhost:8001 # tokens a second, latencies`
    - `penjing bench server build/resnet-fashion-int8 # images a second beside ONNX Runtime`
    - `penjing bench server build/minilm-int8 # texts a second beside ONNX Runtime`
    - `penjing bench server --openai localhost:8080 --scenario chat --rate 2 --report out.html`
    """
    from penjing.core.progress import progress_bar

    if (model is None) == (openai is None):
        raise ConfigError("give MODEL, to compare a server with the engine, or --openai localhost:8080, for a load")
    if openai is not None:
        from penjing.serve.bench.load_page import write_load_page
        from penjing.serve.bench.open_loop import bench_open_loop

        with progress_bar() as progress:
            result, outcomes = bench_open_loop(openai, scenario, rate, seconds, goals, progress, name)
        if report is not None:
            write_load_page(result, outcomes, report)
        return _show(result, json_file)
    assert model is not None
    from penjing.serve.families.base import family_at

    if family_at(model).workload is not None:
        from penjing.serve.bench.batched import bench_batched as run
    else:
        from penjing.serve.bench.server import bench_server as run
    from penjing.serve.supervisor.state import check_serves, served_name

    check_serves(server, model)
    with progress_bar() as progress:
        result = run(model, server, runs=runs, progress=progress, name=name or served_name(server))
    _show(result, json_file)


@bench_app.command("lookups")
def bench_lookups(
    model: Model,
    context: Annotated[int, typer.Option(min=256, help="Tokens of the text that is asked about.")] = 4096,
    kv_dtype: KvDtype = "auto",
    overrides: EngineSet = None,
    json_file: Json = None,
) -> None:
    """Find the layers of a decoder that look up what stood once, for attention=window+blocks.

    A number is hidden in a text and asked for, with each layer reading everything in turn.

    Example: `penjing bench lookups build/smollm2-int8 --set attention_budget=1024`
    """
    from penjing.core.progress import progress_bar
    from penjing.serve.bench.lookups import bench_lookups as run
    from penjing.serve.bench.lookups import serve_command

    with progress_bar() as progress:
        config = engine_config(kv_dtype, "cpu", "off", overrides)
        result = run(model, context, progress=progress, engine_config=config)
    _show(result, json_file)
    print(serve_command(model, kv_dtype, overrides or [], result["attention_full_layers"]))


@bench_app.command("ab")
def bench_ab(
    first: Annotated[str, typer.Argument(help="A model that runs here, such as llm:1, or host:port of its gRPC.")],
    second: Annotated[str, typer.Argument(help="What is compared with it.")],
    prompts: Annotated[
        Path | None, typer.Option(help="A text file with a prompt a line; Python's help by default.")
    ] = None,
    count: Annotated[int, typer.Option(min=8, help="Prompts at most.")] = 64,
    max_tokens: Annotated[int, typer.Option(min=1, help="New tokens of each answer.")] = 32,
    json_file: Json = None,
) -> None:
    """Compare two served decoders on the same prompts, in turns: agreement, bits per byte and speed, with intervals.

    Example: `penjing bench ab llm:1 llm:2`
    """
    from penjing.core.progress import progress_bar
    from penjing.serve.bench.ab import bench_ab as run
    from penjing.serve.bench.ab import read_prompts

    lines = None if prompts is None else read_prompts(prompts)
    with progress_bar() as progress:
        result = run(first, second, prompts=lines, num_prompts=count, num_new_tokens=max_tokens, progress=progress)
    _show(result, json_file)


def _show(result: dict[str, Any], json_file: Path | None) -> None:
    from penjing.core.progress import print_table

    print_table(result)
    write_json(result, json_file)
