"""Settings of a service: where it listens, how it batches, what it refuses."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from massmerge.errors import InputError


@dataclass(frozen=True)
class ServiceSettings:
    """The options of `mass serve`, with the same defaults."""

    bundle: Path
    name: str | None = None
    """What the model is called in answers; the bundle's folder by default."""
    host: str = "127.0.0.1"
    port: int = 8000
    device: str = "auto"
    dtype: str = "auto"
    cache: str = "0"
    router: str | None = None
    threads: int | None = None
    """Threads of torch; as many as torch takes by default."""
    batch_size: int = 32
    batch_wait: float = 3.0
    """Milliseconds that the first input of a batch waits for others."""
    queue: int = 512
    """Inputs that may wait; a request beyond that is refused at once."""
    sessions: int = 10_000
    """Sessions that are remembered; beyond that the least recently used are forgotten."""
    session_expiry: float = 600.0
    """Seconds without a request after which a session is forgotten."""
    reservoir: Path | None = None
    """Where activations of some inputs are kept for `mass adapt`; nowhere by default."""
    reservoir_size: int = 2000
    """How many inputs are kept there."""
    timeout: float = 30.0
    """Seconds from a request's first byte to its answer."""
    max_requests: int = 256
    """Requests under way at once, but for probes and metrics."""
    max_body: int = 20_000_000
    max_held: int = 200_000_000
    """Bytes of all bodies under way."""
    max_items: int = 128
    max_text: int = 100_000
    """Characters of one text."""
    max_new_tokens: int = 512
    """Tokens that are written for one request, and how many where it does not say."""
    max_pixels: int = 25_000_000
    """Pixels of one image."""
    max_request_pixels: int = 100_000_000
    """Pixels of the images of one request."""
    max_held_pixels: int = 400_000_000
    """Pixels of all images that are being decoded."""
    max_connections: int = 1000
    """Connections at once, as far as there are file handles."""
    grace: float = 10.0
    """Seconds in which what is under way is finished when the service stops."""
    route_only: bool = False
    """Load only what names tasks."""
    upstream: str | None = None
    """Address of a server of OpenAI's protocol, to which requests go on with their task as the model."""
    upstream_key: bytes | None = None
    """What the upstream asks for; without it the client's own goes on, if this service has none."""
    fallback_model: str | None = None
    """The upstream's model for prompts that no task fits."""
    mapped: bool = False
    """Leave the bundle's tensors in their files."""
    api_key: bytes | None = None
    cors_origins: tuple[str, ...] = ()
    examples: Path | None = None
    column: str | None = None
    """Of a table of examples."""
    log_format: Literal["text", "json"] = "text"

    @property
    def model_name(self) -> str:
        """What the model is called in answers."""
        return self.name or self.bundle.resolve().name

    @property
    def is_private(self) -> bool:
        """Whether only this machine can reach the service."""
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"


def read_api_key(path: Path) -> bytes:
    """The key in a file that requests must carry, without the space around it.

    Raises:
        InputError: the file cannot be read, or holds no key that a header can carry, or a short one.
    """
    key = read_key(path)
    if len(key) < 16:
        raise InputError(f"{path}: a key is one word of 16 or more ASCII characters. `openssl rand -hex 32` makes one.")
    return key


def read_key(path: Path) -> bytes:
    """The key in a file that somebody else's service asks for; errors as above, and it may be short."""
    try:
        key = path.read_bytes().strip()
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror}).") from None
    if not key or not all(33 <= byte <= 126 for byte in key):
        raise InputError(f"{path}: a key is one word of 16 or more ASCII characters. `openssl rand -hex 32` makes one.")
    return key
