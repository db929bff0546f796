"""Questions of a user's command to the coordinator."""

import secrets
from typing import Any

from megatron_resilient.elastic.connection import Connection
from megatron_resilient.elastic.messages import CLIENT, Answer, Hello, Leave, StatusQuery
from megatron_resilient.elastic.protocol import split_address
from megatron_resilient.errors import CoordinatorLostError, RefusedError

COORDINATOR_VARIABLE = "MEGATRON_RESILIENT_COORDINATOR"
_ANSWER_SECONDS = 10.0


def ask(address: str, token: bytes, question: StatusQuery | Leave) -> dict[str, Any]:
    """Returns the coordinator's answer.

    Args:
        address: `HOST:PORT`.
        token: The shared token.
        question: What to ask.

    Raises:
        ConfigError: The address is none.
        CoordinatorLostError: It cannot be reached, or does not answer.
        RefusedError: It does not want to: another token, or an order that makes no sense.
    """
    host, port = split_address(address)
    hello = Hello(CLIENT, "", secrets.token_hex(8))
    try:
        with Connection.connect(host, port, token, hello) as connection:
            connection.send(question)
            answer = connection.receive(_ANSWER_SECONDS)
    except OSError as error:
        raise CoordinatorLostError(
            f"no coordinator at {address} ({error}); is it running, and is this its address?"
        ) from error
    if not isinstance(answer, Answer):
        raise CoordinatorLostError(f"the coordinator at {address} does not answer")
    if answer.error:
        raise RefusedError(answer.error)
    return answer.body
