"""What a node is called, where nobody says it."""

import os
import re
import socket
from collections.abc import Mapping


def default_node_id(environ: Mapping[str, str] = os.environ) -> str:
    """Returns `node<SLURM_NODEID>` inside a Slurm step, else the host's name."""
    number = environ.get("SLURM_NODEID")
    if number:
        return f"node{number}"
    return re.sub(r"[^A-Za-z0-9._:@-]", "-", socket.gethostname()) or "node"
