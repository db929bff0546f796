"""Elastic pretraining jobs, and undisturbed ones to compare them with."""

import itertools
import json

import pytest

from tests.support.elastic_pretrain import Job, Preloaded


@pytest.fixture(scope="session")
def preloaded():
    with Preloaded() as process:
        yield process


@pytest.fixture
def start(preloaded, tmp_path):
    """Starts a job: `start(nodes, options, nnodes=..., **changes of the model)`."""
    jobs = []
    names = map(str, itertools.count())

    def run(nodes, options=(), **changes):
        folder = changes.pop("folder", tmp_path / next(names))
        jobs.append(Job(preloaded, folder, nodes, options, **changes))
        return jobs[-1]

    yield run
    for job in jobs:
        job.close()


@pytest.fixture(scope="session")
def reference(preloaded, tmp_path_factory):
    """Runs a job without faults, each once: `reference(nodes, options, **changes)`."""
    done = {}

    def run(nodes, options=(), **changes):
        key = json.dumps([nodes, dict(options), changes], sort_keys=True)
        if key not in done:
            job = Job(
                preloaded, tmp_path_factory.mktemp("reference") / "job", nodes, options, **changes
            )
            try:
                job.ok()
            finally:
                job.close()
            done[key] = job
        return done[key]

    return run
