"""The wire: one JSON object a line, at most `MAX_LINE_BYTES` long, and who may speak.

Nothing that comes from the network is unpickled or evaluated: a line becomes one of the dataclasses
of `messages`, with all its fields checked, or a `ProtocolError`.
"""

import base64
import hashlib
import hmac
import json
import math
import os
import re
import secrets
import types
import typing
import zlib
from collections import deque
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from megatron_resilient.elastic.messages import (
    AGENT,
    CLIENT,
    WORKER,
    FromServer,
    Hello,
    Seated,
    ToServer,
)
from megatron_resilient.elastic.world import HeldWorld, Seat
from megatron_resilient.errors import ConfigError, ProtocolError

# A stranger cannot make the server hold more than this. Seats of a world, packed, take some 22
# bytes each.
MAX_LINE_BYTES = 4 << 20
# Unpacked: what the coordinator says, and what one says that may be a stranger.
_MAX_SEATS_BYTES = {Seated: 256 << 20, HeldWorld: MAX_LINE_BYTES}
MAX_LOCAL_WORLD = 1024

TOKEN_VARIABLE = "MEGATRON_RESILIENT_TOKEN"
TOKEN_FILE_VARIABLE = "MEGATRON_RESILIENT_TOKEN_FILE"

_TO_SERVER = {kind.TYPE: kind for kind in typing.get_args(ToServer)}
_FROM_SERVER = {kind.TYPE: kind for kind in typing.get_args(FromServer)}
_NODE = re.compile(r"[A-Za-z0-9._:@-]{1,200}")
_ID = re.compile(r"[A-Za-z0-9_-]{8,128}")


def encode(message: ToServer | FromServer) -> bytes:
    """Returns a message as one line. Numbers that are not finite become null.

    Raises:
        ProtocolError: A value that JSON cannot say, or a line that is too long.
    """
    return b"".join(encode_parts(message))


def encode_parts(message: ToServer | FromServer) -> list[bytes]:
    """Returns a message as one line, in parts; worlds of one generation share the largest.

    Raises:
        ProtocolError: As `encode`.
    """
    left_out = {"seats"} if isinstance(message, Seated) else set()
    plain = {"type": message.TYPE} | {
        field.name: _plain(getattr(message, field.name))
        for field in fields(message)
        if field.name not in left_out
    }
    line = json.dumps(plain, allow_nan=False, separators=(",", ":")).encode() + b"\n"
    parts = [line]
    if isinstance(message, Seated):
        parts = [line[:-2] + b',"seats":"', _packs.pack(message.seats), b'"}\n']
    size = sum(map(len, parts))
    if size > MAX_LINE_BYTES:
        raise ProtocolError(
            f"a message {message.TYPE!r} of {size} bytes; at most {MAX_LINE_BYTES} are sent"
        )
    return parts


def parse_to_server(line: bytes) -> ToServer:
    """Returns what a client said.

    Raises:
        ProtocolError: It is none of the messages to the server.
    """
    message: ToServer = _parse(line, _TO_SERVER)
    if isinstance(message, Hello):
        _check_hello(message)
    return message


def parse_from_server(line: bytes) -> FromServer:
    """Returns what the server said.

    Raises:
        ProtocolError: It is none of the messages from the server.
    """
    message: FromServer = _parse(line, _FROM_SERVER)
    return message


class _Packs:
    """Seats as text, compressed: all members of a world are told, and tell, the same ones.

    Without this a coordinator of 8,000 ranks would write, and send, some 3 MB for each of them, and
    read the seats of each one that comes back to it. The newest ones are made and read once.
    """

    def __init__(self) -> None:
        self._known: deque[tuple[tuple[Seat, ...], bytes]] = deque(maxlen=4)

    def pack(self, seats: tuple[Seat, ...]) -> bytes:
        """Returns base64 of their JSON, compressed; of seats that were unpacked, that text."""
        for known, packed in self._known:
            if known is seats:
                return packed
        plain = [_plain(vars(seat)) for seat in seats]
        text = json.dumps(plain, allow_nan=False, separators=(",", ":")).encode()
        packed = base64.b64encode(zlib.compress(text, 1))
        self._known.append((seats, packed))
        return packed

    def unpack(self, packed: str, most_bytes: int, where: str) -> tuple[Seat, ...]:
        """Returns what was packed.

        Raises:
            ProtocolError: It is no text of ours, or more than so many bytes.
        """
        given = packed.encode(errors="replace")
        for known, text in self._known:
            if text == given:
                return known
        try:
            reader = zlib.decompressobj()
            text = reader.decompress(base64.b64decode(given, validate=True), most_bytes)
            if not reader.eof:
                raise ValueError("cut short, or too long")
            plain = json.loads(text)
        except (ValueError, zlib.error, RecursionError) as error:
            raise ProtocolError(f"{where}: seats that cannot be read: {error}") from error
        seats: tuple[Seat, ...] = _build(tuple[Seat, ...], plain, where)
        self._known.append((seats, given))
        return seats


_packs = _Packs()


def new_nonce() -> str:
    """Returns text that was never used before."""
    return secrets.token_hex(16)


def sign(hello: Hello, challenge: str, token: bytes) -> Hello:
    """Returns the hello with its `mac`: HMAC-SHA256 of the challenge and of all other fields."""
    bare = encode(replace(hello, mac=""))
    return replace(hello, mac=_mac(token, b"hello", challenge.encode(), bare))


def is_signed(hello: Hello, challenge: str, token: bytes) -> bool:
    """Tells whether the hello was signed for this challenge by one who knows the token."""
    return hmac.compare_digest(
        sign(hello, challenge, token).mac.encode(), hello.mac.encode(errors="replace")
    )


def welcome_mac(hello: Hello, token: bytes) -> str:
    """Returns the server's proof to the sender of a signed hello that it knows the token too."""
    return _mac(token, b"welcome", hello.nonce.encode(errors="replace"), hello.mac.encode())


def read_token(
    environment: Mapping[str, str] = os.environ, path: str | os.PathLike[str] | None = None
) -> bytes:
    """Returns the shared token; empty if there is none.

    Args:
        environment: Where MEGATRON_RESILIENT_TOKEN and MEGATRON_RESILIENT_TOKEN_FILE are looked up.
        path: A file that holds the token; goes before the environment.

    Raises:
        ConfigError: The file cannot be read or is empty.
    """
    if path is None:
        if token := environment.get(TOKEN_VARIABLE, "").strip():
            return token.encode()
        path = environment.get(TOKEN_FILE_VARIABLE) or None
        if path is None:
            return b""
    try:
        held = Path(path).read_bytes().strip()
    except OSError as error:
        raise ConfigError(f"token file {path}: {error.strerror}; write the token there") from error
    if not held:
        raise ConfigError(f"token file {path} is empty; write the token there")
    return held


def split_address(text: str) -> tuple[str, int]:
    """Returns host and port of `HOST:PORT` or `[IPv6]:PORT`.

    Raises:
        ConfigError: It is neither.
    """
    host, colon, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not (colon and host and port.isascii() and port.isdecimal() and 0 < int(port) < 65536):
        raise ConfigError(f"coordinator {text!r} is not HOST:PORT, such as node0:29400")
    return host, int(port)


def _mac(token: bytes, *parts: bytes) -> str:
    # Each part with its length, so that no two lists of parts are the same bytes.
    signed = b"".join(len(part).to_bytes(8, "big") + part for part in parts)
    return hmac.new(token, signed, hashlib.sha256).hexdigest()


def _check_hello(hello: Hello) -> None:
    if hello.role not in (WORKER, AGENT, CLIENT):
        raise ProtocolError(f"hello: no role is called {hello.role!r:.40}")
    if not _ID.fullmatch(hello.id):
        raise ProtocolError(f"hello: the id {hello.id!r:.40} is not 8 to 128 of A-Z a-z 0-9 _ -")
    if hello.role != CLIENT and not _NODE.fullmatch(hello.node):
        raise ProtocolError(
            f"hello: the node id {hello.node!r:.40} is not 1 to 200 of A-Z a-z 0-9 . _ : @ -"
        )
    if not 0 <= hello.local_rank < hello.local_world <= MAX_LOCAL_WORLD:
        raise ProtocolError(f"hello: no worker {hello.local_rank} of {hello.local_world} on a node")


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, str | int):
        return value
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(item) for item in value]
    if isinstance(value, HeldWorld):
        return vars(value) | {"seats": _packs.pack(value.seats).decode()}
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: _plain(getattr(value, field.name)) for field in fields(value)}
    raise ProtocolError(f"a {type(value).__name__} cannot be sent; use plain Python values")


def _parse(line: bytes, kinds: Mapping[str, type]) -> Any:
    if len(line) > MAX_LINE_BYTES:
        raise ProtocolError(f"a line of more than {MAX_LINE_BYTES} bytes")
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"a line that is not JSON: {line[:40]!r}") from error
    if not isinstance(record, dict):
        raise ProtocolError(f"a line that is no JSON object: {line[:40]!r}")
    name = record.pop("type", None)
    kind = kinds.get(name) if isinstance(name, str) else None
    if kind is None:
        raise ProtocolError(f"no message is called {name!r:.40}")
    return _build(kind, record, name)


@cache
def _hints(kind: type) -> dict[str, Any]:
    return typing.get_type_hints(kind)


def _build(kind: Any, value: Any, where: str) -> Any:
    """Returns a value of JSON as `kind`, an annotation of one of the messages."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if kind is Any:
        return value
    if is_dataclass(kind):
        return _build_dataclass(kind, value, where)
    if origin is types.UnionType:  # only `X | None` occurs
        return None if value is None else _build(arguments[0], value, where)
    if origin is tuple and isinstance(value, list):
        return tuple(_build(arguments[0], item, where) for item in value)
    if origin is dict and isinstance(value, dict):
        return {key: _build(arguments[1], item, f"{where}.{key}") for key, item in value.items()}
    if kind is float and type(value) in (int, float) and abs(value) < 2.0**1023:
        return float(value)
    if kind is int and type(value) is int and abs(value) < 2**63:
        return value
    if kind in (str, bool) and type(value) is kind:
        return value
    name = kind.__name__ if isinstance(kind, type) and origin is None else str(kind)
    raise ProtocolError(f"{where}: {value!r:.40} is no {name}")


def _build_dataclass(kind: Any, value: Any, where: str) -> Any:
    if not isinstance(value, dict):
        raise ProtocolError(f"{where}: {value!r:.40} is no object")
    hints, given = _hints(kind), {}
    for field in fields(kind):
        packed = value.get("seats") if field.name == "seats" else None
        if isinstance(packed, str) and kind in _MAX_SEATS_BYTES:
            given["seats"] = _packs.unpack(packed, _MAX_SEATS_BYTES[kind], where)
        elif field.name in value:
            given[field.name] = _build(
                hints[field.name], value[field.name], f"{where}.{field.name}"
            )
        elif field.default is MISSING and field.default_factory is MISSING:
            raise ProtocolError(f"{where}: the field {field.name!r} is missing")
    # Fields that we do not know are a later version's, and pass.
    return kind(**given)
