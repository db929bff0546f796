"""Serves the numbers of a run for Prometheus, while it trains and after.

It reads the run's events and needs nothing of the job: start it on any machine that sees the
directory. `examples/grafana/dashboard.json` shows what it serves.
"""

import argparse
import importlib.util
import threading
import time
from pathlib import Path
from typing import Any

from megatron_resilient.errors import ConfigError

HELP = "serve a run's numbers for Prometheus: loss, speed, members, recoveries, saves"
_LARGEST_PORT = 65535


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments."""
    parser.add_argument("run_dir", metavar="RUN_DIR", type=Path, help="directory of the run")
    parser.add_argument(
        "--port", type=int, default=9400, help="to listen on; 0: any free; default: %(default)s"
    )
    parser.add_argument(
        "--host", default="0.0.0.0", help="address to listen on; default: %(default)s"
    )


def run(args: argparse.Namespace) -> int:
    """Serves until it is interrupted.

    Raises:
        ConfigError: The package is missing, there is no such directory, or the port is not free.
    """
    if importlib.util.find_spec("prometheus_client") is None:
        raise ConfigError(
            "metrics need prometheus-client; install with: "
            "pip install 'megatron-resilient[prometheus]'"
        )
    if not args.run_dir.is_dir():
        raise ConfigError(f"{args.run_dir}: no such directory; give the directory of a run")
    if not 0 <= args.port <= _LARGEST_PORT:
        raise ConfigError(f"--port {args.port}: must be from 0 to {_LARGEST_PORT}")

    from prometheus_client import CollectorRegistry, start_http_server

    registry = CollectorRegistry()
    registry.register(RunCollector(args.run_dir))
    try:
        server, _ = start_http_server(args.port, args.host, registry)
    except OSError as error:
        raise ConfigError(
            f"--host {args.host} --port {args.port}: cannot listen there: {error.strerror}"
        ) from error
    print(f"metrics of {args.run_dir} at http://{args.host}:{server.server_port}/", flush=True)
    try:
        while True:
            time.sleep(3600)
    except KeyboardInterrupt:
        return 0
    finally:
        server.shutdown()


class RunCollector:
    """Gives Prometheus what the events of a run say by now.

    Args:
        run_dir: its directory.
    """

    def __init__(self, run_dir: Path) -> None:
        from megatron_resilient.telemetry.metrics import RunMetrics
        from megatron_resilient.telemetry.tail import EventTail

        self._tail = EventTail(run_dir)
        self._metrics = RunMetrics()
        self._lock = threading.Lock()

    def describe(self) -> list[Any]:
        """Says nothing before it is asked: names follow from what the run has written."""
        return []

    def collect(self) -> list[Any]:
        """Returns all metrics; called for each scrape, in a thread of its own."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        from megatron_resilient.telemetry.metrics import PREFIX

        found = []
        with self._lock:
            for event in self._tail.new_events():
                self._metrics.take(event)
            for metric in self._metrics:
                family = CounterMetricFamily if metric.is_counter else GaugeMetricFamily
                labels = [metric.label] if metric.label else []
                told = family(PREFIX + metric.name, metric.meaning, labels=labels)
                for value, amount in metric.values.items():
                    told.add_metric([value] if metric.label else [], amount)
                found.append(told)
        return found
