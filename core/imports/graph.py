"""`penjing import` of any network: an ONNX file, a function of the user's, a name of timm, torchvision or transformers,
or the image tower of two → the checkpoint folder of a graph."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import torch

from penjing.core.checkpoint.graph import parameters_of, save_graph
from penjing.core.config import parse_config
from penjing.core.errors import ConfigError, InputError
from penjing.core.files import check_replaceable, publish_folder, sha256_file
from penjing.core.graph.compare import CLOSE, MOST, in_float32
from penjing.core.graph.config import DTYPE_NAMES, Meaning, Pixels
from penjing.core.graph.network import Network
from penjing.core.graph.passes import simplify
from penjing.core.graph.trace import remarks, trace
from penjing.core.imports.graph_tokenizer import tokenizer_file, with_tokenizer
from penjing.core.imports.torch_parity import compared_with_module
from penjing.core.imports.torch_weights import load_weights
from penjing.core.imports.torch_zoo import Found, from_function, from_package
from penjing.core.imports.tower import TOWER, image_tower
from penjing.core.manifest import MANIFEST_NAME, verify, was_made_by
from penjing.core.onnx_reader.example import check_size
from penjing.core.onnx_reader.file import external_files
from penjing.core.onnx_reader.read import from_onnx
from penjing.core.packages import ZOOS
from penjing.core.progress import Progress, Silent, plural


@dataclass(frozen=True)
class GraphOptions:
    """What a user says about a network besides where it is.

    Attributes:
        weights: a `.safetensors` or `.pth` file for a network that comes as code.
        shapes, dtypes: of the example, by input.
        dynamic: input → axis → name of what may differ from call to call.
        fixed: inputs of an ONNX file that get one value forever.
        labels: a file with a class name a line, or a JSON list.
        tokenizer: a tokenizer.json or its folder, by which texts become the inputs.
        meaning: of the first output; classes where there are labels.
        image: (rows, columns), mean, std, layout, order, scale, fit, resize and filter of `Pixels`, as far as they are
            given.
        tolerance: by how much answers may differ, as a share of the output's scale, where 1e-5 is not reached.
        dtype: of all floating numbers of the network.
    """

    weights: Path | None = None
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    dtypes: Mapping[str, str] = field(default_factory=dict)
    dynamic: Mapping[str, Mapping[int, str]] | None = None
    fixed: Mapping[str, float] = field(default_factory=dict)
    labels: Path | None = None
    meaning: Meaning | None = None
    image: Mapping[str, Any] = field(default_factory=dict)
    tolerance: float | None = None
    tokenizer: Path | None = None
    dtype: Literal["float32"] | None = None


Kind = Literal["onnx", "function", "package", "tower"]


def kind_of(source: str) -> Kind | None:
    """How a graph comes in by `source`; None if it is something else (see `import_model`)."""
    if source.endswith(".onnx"):
        return "onnx"
    file, colon, name = source.rpartition(":")
    if colon and file.endswith(".py") and name.isidentifier():
        return "function"
    if colon and name == TOWER and Path(file).expanduser().is_dir():
        return "tower"
    package, slash, name = source.partition("/")
    return "package" if slash and name and package in ZOOS and not Path(source).exists() else None


def import_graph(
    source: str,
    out: Path,
    options: GraphOptions | None = None,
    *,
    force: bool = False,
    progress: Progress | None = None,
) -> Path:
    """Make the checkpoint folder `out`; it appears only when its answers were compared with the original's.

    Args:
        source: an `.onnx` file; `file.py:function`, which returns a module, or (module, example inputs), and is run;
            `timm/NAME`, `torchvision/NAME`, `transformers/NAME` of an installed package; or `folder:image`.
        out: folder to make. If it already holds this very import, it is kept and that is said.
        force: replace a folder that penjing made before.

    Raises:
        ConfigError: an option that does not fit the source.
        InputError: the source is missing, damaged, or holds what penjing cannot compute; weights that do not fit; an
            answer that is not the original's.
        SetupError: disk full, no permission.
    """
    options, progress = options or GraphOptions(), progress or Silent()
    kind = kind_of(source)
    if kind is None:
        raise InputError(f"{source!r} is no .onnx file, no file.py:function and no name of {', '.join(ZOOS)}")
    _check_options(kind, options)
    created_by: dict[str, Any] = {
        "command": "penjing import",
        "penjing": version("penjing"),
        "source": source if kind == "package" else Path(source).name,
        "source_format": kind,
        "options": _described(options),
        **_hashes(source, kind, options),
    }
    if not force and kind == "onnx" and was_made_by(out, created_by):
        progress.note(f"{out} already holds {source}: kept (--force makes it again)")
        return out
    check_replaceable(out, force, MANIFEST_NAME)  # before minutes of work
    progress.start(f"importing {source}", 1)
    network, parity = _from_file(source, options) if kind == "onnx" else _from_code(source, kind, options)
    network, gains = simplify(_labelled(network if options.dtype is None else in_float32(network), options))
    if options.tokenizer is not None:
        network = with_tokenizer(network, options.tokenizer)
    progress.advance()
    with publish_folder(out, replace=force) as partial:
        save_graph(
            partial,
            network,
            created_by | {"license": "unknown", "parity": parity, "passes": [gain.described() for gain in gains]},
        )
    tensors = ", ".join(map(str, (*network.config.inputs, *network.config.outputs)))
    size = parameters_of(network.module)
    weights = f"{size / 1e6:.3g} million parameters" if size >= 1e5 else plural(size, "parameter")
    nodes = sum(node.op == "call_function" for node in network.module.graph.nodes)
    progress.note(
        f"{out}: {plural(nodes, 'operator')}, {weights} ({tensors}); its answers are "
        f"{parity['distance']:.1e} of their scale from those of {parity['oracle']}{_accepted(parity)}"
    )
    for said in remarks(network, options.dynamic or {}):
        progress.note(said)
    return out


def _accepted(parity: Mapping[str, Any]) -> str:
    if "tolerance" not in parity:
        return ""
    return f", which is more than {CLOSE:.0e} and was accepted by --tolerance {parity['tolerance']:g}"


def _check_options(kind: Kind, options: GraphOptions) -> None:
    if kind == "onnx" and options.weights is not None:
        raise ConfigError(f"--weights {options.weights}: an ONNX file brings its own weights; leave it out")
    if kind == "onnx" and options.dtypes:
        raise ConfigError("an ONNX file says the types of its inputs; write --input NAME:SHAPE without a type")
    if kind != "onnx" and options.fixed:
        raise ConfigError("--fix is for inputs of ONNX files; write the value into the function")


def _from_file(source: str, options: GraphOptions) -> tuple[Network, dict[str, Any]]:
    found = from_onnx(
        Path(source).expanduser(),
        shapes=options.shapes,
        dynamic=options.dynamic,
        fixed=options.fixed,
        tolerance=options.tolerance,
    )
    return found.network, found.parity


def _from_code(source: str, kind: Kind, options: GraphOptions) -> tuple[Network, dict[str, Any]]:
    read = {"function": from_function, "package": from_package, "tower": image_tower}[kind]
    found = read(source)
    if options.weights is not None:
        load_weights(found.module, options.weights)
    found = _with_example(found, options, source)
    found = found if options.dtype is None else found.in_float32()
    network = trace(found.module, tuple(found.example), dict(found.keyword), options.dynamic or found.dynamic)
    config = network.config
    if found.pixels is not None:
        config = config.model_copy(update={"pixels": found.pixels})
    if found.labels or found.meaning != "tensors":
        config = config.model_copy(update={"labels": tuple(found.labels), "meaning": found.meaning})
    network = replace(network, config=config)
    if found.tokenizer is not None:
        network = with_tokenizer(network, found.tokenizer)
    return network, compared_with_module(network, found, source, options.tolerance)


def _with_example(found: Found, options: GraphOptions, source: str) -> Found:
    if not options.shapes:
        if not found.example and not found.keyword:
            raise InputError(
                f"{source} gives no example inputs; return (module, example) from the function, or say a shape: "
                "--input x:1x3x224x224"
            )
        return found
    generator = torch.Generator().manual_seed(0)
    keyword = {}
    for name, shape in options.shapes.items():
        check_size(name, shape)
        dtype = getattr(torch, options.dtypes.get(name, "float32"))
        if dtype.is_floating_point:
            keyword[name] = torch.randn(shape, generator=generator).to(dtype)
        else:
            keyword[name] = torch.randint(2 if dtype is torch.bool else 10, shape, generator=generator).to(dtype)
    return replace(found, example=(), keyword=keyword, dynamic=None)


def _labelled(network: Network, options: GraphOptions) -> Network:
    """The network with labels, a meaning and pixels as the user says."""
    config = network.config
    changes: dict[str, Any] = {}
    if options.labels is not None:
        changes |= {"labels": _labels(options.labels), "meaning": "classes"}
    if options.meaning is not None:
        changes["meaning"] = options.meaning
    if options.image:
        changes["pixels"] = _pixels(network, options.image)
    config = type(config).model_validate({**config.model_dump(), **changes})
    classes = config.outputs[0].shape[-1] if config.outputs[0].shape else 0
    if config.labels and isinstance(classes, int) and len(config.labels) != classes:
        raise InputError(
            f"{plural(len(config.labels), 'label')} came, and the output {config.outputs[0].name} has "
            f"{plural(classes, 'class', 'classes')}; give a name for each class, in order"
        )
    return replace(network, config=config)


def _labels(path: Path) -> tuple[str, ...]:
    try:
        text = path.read_text(encoding="utf-8-sig")  # editors of Windows begin a file with a byte order mark
        found = json.loads(text) if path.suffix == ".json" else text.splitlines()
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"cannot read the labels in {path}: {error}; write one a line, or a JSON list") from None
    if isinstance(found, dict) and all(key.isdigit() for key in found):
        found = [found[key] for key in sorted(found, key=int)]
    if not isinstance(found, list) or not found or not all(isinstance(name, str) for name in found):
        raise InputError(f"{path} holds no list of class names; write one a line, or a JSON list")
    return tuple(found)


def _pixels(network: Network, said: Mapping[str, Any]) -> Pixels:
    """What is known of images of `network`, changed as the user says; it fits what the first input fixes."""
    first, known = network.config.inputs[0], network.config.pixels
    values = ({} if known is None else known.model_dump()) | dict(said)
    shape = first.shape[-3:]
    if len(first.shape) not in (3, 4):
        raise ConfigError(f"--size, --mean and the like are for images, which the input {first} does not take")
    sizes, channels = (shape[:2], shape[2]) if values.get("layout") == "NHWC" else (shape[1:], shape[0])
    if "height" not in values:
        if not all(isinstance(size, int) for size in sizes):
            raise ConfigError(f"--size is missing: the input {first} fixes no size of images")
        values["height"], values["width"] = sizes
    values.setdefault("order", "L" if channels == 1 else "RGB")
    count = 1 if values["order"] == "L" else 3
    values = {"mean": (0.0,) * count, "std": (1.0,) * count} | values
    found = parse_config(Pixels, values, "how images enter")
    if (mean := max(found.mean)) > (most := 255 / found.scale):
        raise ConfigError(
            f"--mean {mean:g}: pixels are divided by {found.scale:g}, so write 0 to {most:g}, or say --scale"
        )
    wanted = (found.height, found.width, count)
    if any(isinstance(size, int) and size != each for size, each in zip((*sizes, channels), wanted, strict=True)):
        raise ConfigError(
            f"images of {found.height}x{found.width} and {plural(count, 'channel')} ({found.order}, {found.layout}) "
            f"are not what the input {first} takes; correct --size, --order or --layout"
        )
    return found


def _described(options: GraphOptions) -> dict[str, Any]:
    values = {key: value for key, value in asdict(options).items() if value}
    values |= {key: Path(values[key]).name for key in ("weights", "labels", "tokenizer") if key in values}
    return json.loads(json.dumps(values))


def _hashes(source: str, kind: Kind, options: GraphOptions) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if kind == "tower":
        found["source_sha256"] = verify(Path(source.rpartition(":")[0]).expanduser()).sha256
    elif kind != "package":
        found["source_sha256"] = sha256_file(Path(source if kind == "onnx" else source.rpartition(":")[0]).expanduser())
    file = Path(source).expanduser()
    if kind == "onnx" and (beside := external_files(file)):
        found["external_sha256"] = {name: sha256_file(file.parent / name) for name in beside}
    if options.weights is not None:
        found["weights_sha256"] = sha256_file(options.weights)
    if options.labels is not None:
        found["labels_sha256"] = sha256_file(options.labels)
    if options.tokenizer is not None:
        found["tokenizer_sha256"] = sha256_file(tokenizer_file(options.tokenizer))
    return found


def graph_options(
    *,
    weights: Path | None = None,
    inputs: Sequence[str] = (),
    dynamic: Sequence[str] = (),
    fixed: Sequence[str] = (),
    labels: Path | None = None,
    meaning: str | None = None,
    size: str | None = None,
    mean: str | None = None,
    std: str | None = None,
    layout: str | None = None,
    order: str | None = None,
    scale: float | None = None,
    fit: str | None = None,
    resize: str | None = None,
    filter: str | None = None,
    tolerance: float | None = None,
    tokenizer: Path | None = None,
    dtype: Literal["float32"] | None = None,
) -> GraphOptions:
    """The options of the command line, read.

    Raises:
        ConfigError: one that is not written as its help says.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    dtypes: dict[str, str] = {}
    for said in inputs:
        name, shape, kind = _input(said)
        shapes[name] = shape
        if kind:
            dtypes[name] = kind
    axes: dict[str, dict[int, str]] | None = None
    for said in dynamic:
        name, axis = _dynamic(said)
        axes = {**(axes or {}), name: {**(axes or {}).get(name, {}), **axis}}
    values: dict[str, float] = {}
    for said in fixed:
        name, _, number = said.rpartition("=")
        values[name] = _number(number, f"--fix {said}", "NAME=NUMBER, as sr=16000")
    image: dict[str, Any] = {}
    if size is not None:
        image["height"], image["width"] = _sides("size", size)
    if resize is not None:
        image["resize"] = _sides("resize", resize)
    image |= {
        key: tuple(_numbers(value, f"--{key} {value}", "a number for each channel, as 0.485,0.456,0.406"))
        for key, value in (("mean", mean), ("std", std))
        if value is not None
    }
    said = {"layout": layout, "order": order, "scale": scale, "fit": fit, "filter": filter}
    image |= {key: value for key, value in said.items() if value is not None}
    if meaning not in (None, "tensors", "classes", "embedding"):
        raise ConfigError(f"--meaning {meaning}: it is tensors, classes or embedding")
    if tolerance is not None and not CLOSE < tolerance <= MOST:
        raise ConfigError(f"--tolerance {tolerance}: write a share of the outputs' scale, above {CLOSE:.0e}, at most 1")
    return GraphOptions(weights, shapes, dtypes, axes, values, labels, meaning, image, tolerance, tokenizer, dtype)  # type: ignore[arg-type]


def _sides(option: str, said: str) -> tuple[int, int]:
    wanted = "ROWSxCOLUMNS, as 224x224"
    sides = _numbers(said.replace("x", ","), f"--{option} {said}", wanted)
    if len(sides) > 2 or not all(side.is_integer() and side >= 1 for side in sides):
        raise ConfigError(f"--{option} {said}: write {wanted}")
    return int(sides[0]), int(sides[-1])


def _input(said: str) -> tuple[str, tuple[int, ...], str]:
    name, _, rest = said.partition(":")
    while ":" in rest and not rest.split(":")[0].replace("x", "").isdigit():  # names of ONNX may hold colons
        more, _, rest = rest.partition(":")
        name = f"{name}:{more}"
    shape, _, dtype = rest.partition(":")
    sizes = shape.split("x") if shape else []
    if ":" not in said or not name or not all(size.isdigit() and 0 < int(size) < 1 << 31 for size in sizes):
        raise ConfigError(f"--input {said}: write NAME:SIZES or NAME:SIZES:TYPE, as tokens:2x16:int64")
    if dtype and dtype not in DTYPE_NAMES:
        raise ConfigError(f"--input {said}: {dtype!r} is no type of inputs; use one of {', '.join(DTYPE_NAMES)}")
    return name, tuple(map(int, sizes)), dtype


def _dynamic(said: str) -> tuple[str, dict[int, str]]:
    name, _, rest = said.rpartition(":")
    found = {}
    for part in rest.split(","):
        axis, _, called = part.partition("=")
        if not name or not axis.isdigit() or not called.isidentifier():
            raise ConfigError(f"--dynamic {said}: write NAME:AXIS=WORD, as x:0=batch,2=length")
        found[int(axis)] = called
    return name, found


def _number(text: str, option: str, form: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ConfigError(f"{option}: write {form}") from None


def _numbers(text: str, option: str, form: str) -> list[float]:
    return [_number(part, option, form) for part in text.split(",")]
