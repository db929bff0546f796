"""The wire: what is said is heard, and whatever else comes is a named error."""

import contextlib
import json
import socket
import threading
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_resilient.elastic import messages
from megatron_resilient.elastic.connection import Connection
from megatron_resilient.elastic.protocol import (
    MAX_LINE_BYTES,
    encode,
    is_signed,
    parse_from_server,
    parse_to_server,
    read_token,
    sign,
    split_address,
    welcome_mac,
)
from megatron_resilient.elastic.world import HeldWorld, Seat
from megatron_resilient.errors import ConfigError, ProtocolError, RefusedError

SEATS = (Seat("n0", 0, {"step": 3, "coordinate": [0, 1]}), Seat("n1", 0, {}))
HELD = HeldWorld(generation=2, formed=1.5, seats=SEATS, step=7, training=True)
HELLO = messages.Hello("worker", "n0", "abcdefgh", world=HELD, nonce="n")
TO_SERVER = [
    HELLO,
    messages.Hello("client", "", "abcdefgh"),
    messages.Ready({"step": 1}, {"min_nodes": 1}, 3),
    messages.Evidence(1, "gloo: connection closed by peer \u00e9\n"),
    messages.Beat(1, 5, 0.25, {"phase": "train"}),
    messages.Paused({}),
    messages.Finish(0),
    messages.Whereabouts(True, "all_reduce"),
    messages.WorkerExit(0, -9, 1234),
    messages.Leave(),
    messages.Leave("n0"),
    messages.StatusQuery(),
]
FROM_SERVER = [
    messages.Challenge("abc"),
    messages.Welcome("abc"),
    messages.Refused("no"),
    messages.Fence(1, "a node died", 1.5),
    messages.Seated(1, SEATS, 0, "h", 1, "start", (), ("n0",), False, {"formed": 1.0}),
    messages.BoundaryOrder(1, ("n1",)),
    messages.Exit(1, "FencedError", "gone"),
    messages.WhereQuery(),
    messages.Stop(0),
    messages.Answer({"generation": 1}),
]

plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=8,
)
field_names = st.sampled_from(
    sorted({name for message in TO_SERVER + FROM_SERVER for name in vars(message)} | {"type"})
)
type_names = st.sampled_from(sorted({message.TYPE for message in TO_SERVER + FROM_SERVER}))


@pytest.mark.parametrize("message", TO_SERVER, ids=lambda message: message.TYPE)
def test_what_a_client_says_is_heard(message):
    assert parse_to_server(encode(message)) == message


@pytest.mark.parametrize("message", FROM_SERVER, ids=lambda message: message.TYPE)
def test_what_the_server_says_is_heard(message):
    assert parse_from_server(encode(message)) == message


def test_every_kind_of_message_is_tested():
    assert {type(m) for m in TO_SERVER} == set(messages.ToServer.__args__)
    assert {type(m) for m in FROM_SERVER} == set(messages.FromServer.__args__)


@settings(max_examples=300)
@given(st.binary(max_size=80))
def test_bytes_are_a_message_or_a_named_error(line):
    for parse in (parse_to_server, parse_from_server):
        with pytest.raises(ProtocolError):
            parse(line)


@settings(max_examples=400)
@given(kind=type_names, record=st.dictionaries(field_names, plain, max_size=9))
def test_objects_are_a_message_or_a_named_error(kind, record):
    line = json.dumps(record | {"type": kind}).encode()
    for parse in (parse_to_server, parse_from_server):
        with contextlib.suppress(ProtocolError):
            message = parse(line)
            assert kind == message.TYPE
            assert kind == parse(encode(message)).TYPE


@settings(max_examples=200)
@given(
    message=st.sampled_from(TO_SERVER),
    at=st.integers(0, 400),
    put=st.binary(max_size=3),
    cut=st.integers(0, 3),
)
def test_a_damaged_line_is_a_message_or_a_named_error(message, at, put, cut):
    line = encode(message)
    with contextlib.suppress(ProtocolError):
        parse_to_server(line[:at] + put + line[at + cut :])


@pytest.mark.parametrize(
    "line",
    [
        b"[" * 100_000,
        b'{"type":"finish","exit":' + b"9" * 5000 + b"}",
        b'{"type":"finish","exit":true}',
        b'{"type":"finish","exit":1.0}',
        b'{"type":"beat","busy":NaN}',
        b'{"type":"beat","busy":1e999}',
        b'{"type":["beat"]}',
        b'{"type":"hello","role":"king","node":"n","id":"abcdefgh"}',
        b'{"type":"hello","role":"agent","node":"a b","id":"abcdefgh"}',
        b'{"type":"hello","role":"agent","node":"","id":"abcdefgh"}',
        b'{"type":"hello","role":"agent","node":"n","id":"a"}',
        b'{"type":"hello","role":"worker","node":"n","id":"abcdefgh","local_rank":1}',
        b'{"type":"hello","role":"worker","node":"n","id":"abcdefgh","world":{"generation":1}}',
        b" " * (MAX_LINE_BYTES + 1),
    ],
    ids=range(14),
)
def test_what_looks_like_a_message_is_checked(line):
    with pytest.raises(ProtocolError) as caught:
        parse_to_server(line)
    assert len(str(caught.value)) < 200


def test_what_cannot_be_sent_is_not():
    with pytest.raises(ProtocolError, match="bytes"):
        encode(messages.Answer({"text": "x" * MAX_LINE_BYTES}))
    with pytest.raises(ProtocolError, match="object cannot be sent"):
        encode(messages.Answer({"what": object()}))


def test_numbers_that_are_not_finite_become_null():
    beat = messages.Beat(report={"imbalance": float("nan"), "list": [float("inf"), 1.5]})
    assert parse_to_server(encode(beat)).report == {"imbalance": None, "list": [None, 1.5]}


def test_a_signature_covers_token_challenge_and_every_field():
    signed = sign(HELLO, "challenge", b"token")
    assert is_signed(signed, "challenge", b"token")
    assert not is_signed(signed, "challenge", b"other")
    assert not is_signed(signed, "another", b"token")
    assert not is_signed(replace(signed, node="n1"), "challenge", b"token")
    assert not is_signed(replace(signed, world=None), "challenge", b"token")
    assert not is_signed(replace(signed, mac=""), "challenge", b"token")
    assert not is_signed(replace(signed, mac="\ud800"), "challenge", b"token")


def test_the_token_comes_from_a_file_or_the_environment(tmp_path):
    held = tmp_path / "token"
    held.write_text("from file\n")
    assert read_token({}) == b""
    assert read_token({"MEGATRON_RESILIENT_TOKEN": " a "}) == b"a"
    assert read_token({"MEGATRON_RESILIENT_TOKEN_FILE": str(held)}) == b"from file"
    assert read_token({"MEGATRON_RESILIENT_TOKEN": "a"}, held) == b"from file"
    held.write_text("\n")
    with pytest.raises(ConfigError, match="empty"):
        read_token({}, held)
    with pytest.raises(ConfigError, match="No such file"):
        read_token({}, tmp_path / "other")


def test_addresses():
    assert split_address("node0:29400") == ("node0", 29400)
    assert split_address("[::1]:80") == ("::1", 80)
    for wrong in ("", "node0", "node0:", ":80", "node0:0", "node0:65536", "node0:\u0663"):
        with pytest.raises(ConfigError, match="HOST:PORT"):
            split_address(wrong)


def serve(replies):
    """A server that sends one reply after the other, each after a line; returns its port."""
    listener = socket.create_server(("127.0.0.1", 0))

    def answer():
        with listener, listener.accept()[0] as sock, sock.makefile("rb") as lines:
            for index, reply in enumerate(replies):
                line = lines.readline() if index else b""
                sock.sendall(reply(line) if callable(reply) else reply)
            lines.read()

    threading.Thread(target=answer, daemon=True).start()
    return listener.getsockname()[1]


CHALLENGE = encode(messages.Challenge("c"))


def test_a_server_that_does_not_know_the_token_is_not_believed():
    port = serve([CHALLENGE, encode(messages.Welcome("0" * 64))])
    with pytest.raises(RefusedError, match="does not know our token"):
        Connection.connect("127.0.0.1", port, b"token", HELLO)


def test_lines_come_in_any_pieces():
    def welcome(line):
        proof = encode(messages.Welcome(welcome_mac(parse_to_server(line), b"t")))
        return proof + encode(messages.Stop(1)) + encode(messages.Stop(2))[:10]

    port = serve([CHALLENGE, welcome, encode(messages.Stop(2))[10:]])
    with Connection.connect("127.0.0.1", port, b"t", HELLO) as connection:
        assert connection.receive(1) == messages.Stop(1)
        assert connection.receive(0) is None
        connection.send(messages.Leave())
        assert connection.receive(1) == messages.Stop(2)


def test_another_server_is_no_coordinator():
    port = serve([b"SSH-2.0-OpenSSH_9.6\r\n"])
    with pytest.raises(ProtocolError, match="not JSON"):
        Connection.connect("127.0.0.1", port, b"", HELLO)
    port = serve([b""])
    with pytest.raises(TimeoutError, match="did not answer"):
        Connection.connect("127.0.0.1", port, b"", HELLO, timeout_seconds=0.2)


def test_closing_ends_a_receive_of_another_thread():
    def welcome(line):
        return encode(messages.Welcome(welcome_mac(parse_to_server(line), b"")))

    connection = Connection.connect("127.0.0.1", serve([CHALLENGE, welcome]), b"", HELLO)
    caught = []

    def wait():
        try:
            connection.receive()
        except OSError as error:
            caught.append(error)

    waiting = threading.Thread(target=wait)
    waiting.start()
    connection.close()
    waiting.join(5)
    assert not waiting.is_alive()
    assert caught
