"""Where the HTTP front listens, what it lets in, and what stands behind it."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field, TypeAdapter

from penjing.core.config import Config, apply_override, parse_config
from penjing.core.errors import ConfigError
from penjing.serve.client.protocol import host_port

VARIABLE = "PENJING_FRONT"
"""Environment variable of the front's process: a `FrontJob` as JSON."""


class FrontLimits(Config):
    """What `penjing serve --front KEY=VALUE` changes."""

    max_body_bytes: int = Field(default=1 << 20, ge=1024, le=1 << 30, description="Of a request's body.")
    max_image_body_bytes: int = Field(
        default=32 << 20, ge=1024, le=1 << 30, description="Of a request's body instead, before a model that sees."
    )
    max_held_bytes: int = Field(
        default=256 << 20, ge=1024, le=1 << 40, description="Of all bodies of more than max_body_bytes together."
    )
    max_header_bytes: int = Field(default=32768, ge=1024, le=1 << 20, description="Of a request's line and headers.")
    max_connections: int = Field(default=2048, ge=1, le=1 << 20, description="Open at once; one more is refused.")
    max_prompts: int = Field(default=128, ge=1, le=4096, description="Prompts or texts of one request.")
    header_timeout: float = Field(default=10.0, gt=0, le=3600, description="Seconds for a request's headers to come.")
    body_timeout: float = Field(default=30.0, gt=0, le=3600, description="Seconds for a request's body to come.")
    write_timeout: float = Field(
        default=30.0, gt=0, le=3600, description="Seconds in which a client may read nothing of its answer."
    )
    idle_timeout: float = Field(default=30.0, gt=0, le=3600, description="Seconds that an unused connection is kept.")
    answer_timeout: float = Field(default=3600.0, gt=0, le=86400, description="Seconds for a whole answer.")
    allowed_hosts: tuple[str, ...] = Field(
        default=(), description="Names under which a server on loopback is reached, beside localhost."
    )
    allowed_origins: tuple[str, ...] = Field(
        default=(), description="Web pages that may call, such as https://example.org; the front's own page may."
    )


class FrontConfig(Config):
    """The front of one server."""

    host: str = Field(default="127.0.0.1", description="Address to listen on.")
    port: int = Field(ge=1, le=65535, description="Port of HTTP, or of HTTPS with a certificate.")
    keys: Path | None = Field(default=None, description="File of the keys that clients must show; None: no key.")
    certificate: Path | None = Field(default=None, description="PEM file of a certificate chain: HTTPS.")
    private_key: Path | None = Field(default=None, description="PEM file of the certificate's key.")
    limits: FrontLimits = Field(default_factory=FrontLimits, description="What it lets in.")

    @property
    def url(self) -> str:
        """Where clients find it."""
        return f"{'http' if self.certificate is None else 'https'}://{host_port(self.host, self.port)}"

    @property
    def is_local(self) -> bool:
        """Whether only this machine reaches it."""
        return self.host in ("localhost", "::1") or self.host.startswith("127.")


def front_config(
    port: int | None, host: str, keys: Path | None, tls: tuple[Path, Path] | None, overrides: list[str]
) -> FrontConfig | None:
    """What the flags of `penjing serve` ask for; None without a port.

    Raises:
        ConfigError: flags of a front that is not there, an unknown or wrong limit.
    """
    if port is None:
        if keys or tls or overrides:
            raise ConfigError("--keys, --tls and --front belong to the HTTP front: give its port with --openai 8080")
        return None
    values: dict[str, object] = {}
    for override in overrides:
        apply_override(values, override)
    certificate, private_key = (None, None) if tls is None else (path.absolute() for path in tls)
    return FrontConfig(
        host=host,
        port=port,
        keys=None if keys is None else keys.absolute(),
        certificate=certificate,
        private_key=private_key,
        limits=parse_config(FrontLimits, values, "--front"),
    )


class FrontModel(Config):
    """A model behind the front, or one version of it."""

    id: str = Field(description="What clients call it; of a version NAME:VERSION.")
    aliases: tuple[str, ...] = Field(default=(), description="What clients may call it beside.")
    group: str | None = Field(default=None, description="The name under which versions share requests.")
    version: int | None = Field(default=None, description="Of the group.")
    share: float = Field(default=1.0, ge=0, le=1, description="Of the group's requests.")
    kind: str = Field(description="What the model's own kind is called, such as llm or encoder.")
    name: str = Field(description="Its name on Triton server.")
    folder: Path = Field(description="Its artifact or checkpoint.")
    grpc: str = Field(description="Host and port of gRPC of the Triton server that has it.")
    metrics: str = Field(description="Host and port of that server's metrics.")
    adapters: tuple[str, ...] = Field(default=(), description="Names of the adapters that it was started with.")
    adapter: str | None = Field(default=None, description="The one of them that this stands for.")
    sees: bool = Field(default=False, description="Whether requests to it may have images.")
    max_rows: int | None = Field(default=None, ge=1, description="Rows that a request to a batched model may have.")

    @property
    def key(self) -> str:
        """By which connections and health are kept: an adapter has those of its model, and a model that is loaded
        later under an old name has its own."""
        return self.grpc

    def adapted(self) -> tuple[FrontModel, ...]:
        """The model with each of its adapters, MODEL:ADAPTER."""
        return tuple(
            self.model_copy(
                update={
                    "id": f"{self.id}:{name}",
                    "aliases": tuple(f"{alias}:{name}" for alias in self.aliases),
                    "group": None if self.group is None else f"{self.group}:{name}",
                    "adapter": name,
                }
            )
            for name in self.adapters
        )


MODELS = TypeAdapter(tuple[FrontModel, ...])
"""What the front's process is told, on its standard input, when they change."""


class FrontJob(Config):
    """All that the front's process is told."""

    front: FrontConfig = Field(description="Where it listens.")
    models: tuple[FrontModel, ...] = Field(description="What it serves.")
    log: Path = Field(description="File of its log.")
    draining: bool = Field(default=False, description="It starts again while its server drains: it refuses requests.")
    beat_fd: int = Field(default=-1, description="Descriptor that shows life to the supervisor; -1: none.")
