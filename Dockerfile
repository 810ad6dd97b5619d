# Two images of one file: docker build --target cpu -t trainer:cpu .   and   --target cuda -t trainer:cuda
# All packages come from uv.lock, checked against its hashes. See docs/deploy.md.
ARG PYTHON_IMAGE=python:3.11-slim-bookworm

FROM ${PYTHON_IMAGE} AS base
SHELL ["/bin/bash", "-o", "pipefail", "-c"]
# A compiler for kernels that torch, Triton and vLLM build while they run; wget for the probes of KubeRay. Debian's
# releases keep no old versions of packages, so a pin would soon fail.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ libnuma1 tini wget \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home --uid 1000 --user-group --shell /bin/bash trainer
ENV PATH=/opt/trainer/.venv/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    OMP_NUM_THREADS=1 \
    RAY_USAGE_STATS_ENABLED=0 \
    VLLM_NO_USAGE_STATS=1

FROM base AS build
# The index of packages, if it is not that of pip.
ARG PIP_INDEX_URL
WORKDIR /opt/trainer
COPY pyproject.toml uv.lock ./
COPY tools/install.py tools/

FROM build AS build-cpu
# An index with torch's CPU build, whose hashes are in tools/install.py. Without one, the image gets the CUDA build,
# which works and is larger.
ARG CPU_INDEX=https://download.pytorch.org/whl/cpu
RUN PIP_EXTRA_INDEX_URL=${CPU_INDEX} python tools/install.py cpu --image
COPY . .
RUN .venv/bin/uv pip install --offline --no-deps --no-build-isolation .

FROM build AS build-cuda
RUN python tools/install.py gpu --image
COPY . .
RUN .venv/bin/uv pip install --offline --no-deps --no-build-isolation .

FROM base AS cpu
COPY --from=build-cpu /opt/trainer/.venv /opt/trainer/.venv
COPY --from=build-cpu /opt/trainer/examples /opt/trainer/examples
RUN install -d -o 1000 -g 1000 /work
USER 1000:1000
WORKDIR /work
ENTRYPOINT ["tini", "--", "trainer"]
CMD ["--help"]

FROM base AS cuda
ENV NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility
COPY --from=build-cuda /opt/trainer/.venv /opt/trainer/.venv
COPY --from=build-cuda /opt/trainer/examples /opt/trainer/examples
RUN install -d -o 1000 -g 1000 /work
USER 1000:1000
WORKDIR /work
ENTRYPOINT ["tini", "--", "trainer"]
CMD ["--help"]
