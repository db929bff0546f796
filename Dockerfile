# syntax=docker/dockerfile:1
# The plugin on NVIDIA's PyTorch image. Give an image by digest for a build that can be repeated:
#   docker build --build-arg FROM_IMAGE_NAME=nvcr.io/nvidia/pytorch@sha256:... .
ARG FROM_IMAGE_NAME=nvcr.io/nvidia/pytorch:26.06-py3

FROM ${FROM_IMAGE_NAME} AS wheel
WORKDIR /src
COPY setup.py pyproject.toml README.md LICENSE ./
COPY megatron_resilient megatron_resilient
COPY patches patches
# The image's own setuptools builds it: nothing is fetched, so the wheel depends on nothing else.
RUN python -m pip wheel --no-deps --no-build-isolation --wheel-dir /wheels .

FROM ${FROM_IMAGE_NAME}
SHELL ["/bin/bash", "-euo", "pipefail", "-c"]
WORKDIR /opt/megatron-resilient
COPY constraints.txt tools/merge_constraints.py ./
# torch, Transformer Engine and Apex were built for this image and are in no package index: every
# version that is installed becomes a constraint, so pip can only add. What it adds is pinned as in
# CI. The image's PIP_CONSTRAINT is set aside because it says less than that. At the end a package
# that is no longer what it was fails the build.
RUN --mount=type=bind,from=wheel,source=/wheels,target=/wheels \
    unset PIP_CONSTRAINT \
    && python -m pip list --format=freeze | sort > image.txt \
    && python merge_constraints.py image.txt constraints.txt > merged.txt \
    && python -m pip install --no-cache-dir -c merged.txt "$(echo /wheels/*.whl)[tools]" \
    && python -m pip list --format=freeze | sort | comm -23 image.txt - | (! grep .)
COPY examples examples

ARG USER_ID=10001
RUN useradd --no-log-init --create-home --uid "${USER_ID}" trainer
USER ${USER_ID}
WORKDIR /home/trainer
# A build has no GPU: doctor then says so and succeeds; it fails on what cannot work anywhere. The
# cpu group patches torch itself and is locked against another torch than the image's.
RUN megatron-resilient doctor \
    && megatron-resilient patches check --groups fixes,core
