# The image of a run's pods, made from the wheel:
#
#   python -m pip wheel --no-deps --wheel-dir dist .
#   docker build --tag REGISTRY/phalanx:0.1 .
#   docker push REGISTRY/phalanx:0.1
#
# torch comes from requirements/base.txt, with the CUDA libraries that its wheel brings; the nodes need NVIDIA's driver and container toolkit only.
# For machines without GPUs, smaller: --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cpu
FROM python:3.11-slim-bookworm

ARG TORCH_INDEX=https://pypi.org/simple

ENV PIP_NO_CACHE_DIR=1 \
    PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1

# triton compiles its launcher, and Phalanx its own kernels for CPUs, with the C compiler of the image.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*

COPY requirements/base.txt /tmp/base.txt
RUN pip install --index-url "${TORCH_INDEX}" --extra-index-url https://pypi.org/simple --requirement /tmp/base.txt

COPY dist/phalanx_train-*.whl /tmp/
RUN pip install --no-deps /tmp/phalanx_train-*.whl \
    && rm /tmp/phalanx_train-*.whl /tmp/base.txt \
    && groupadd --gid 1000 phalanx \
    && useradd --uid 1000 --gid phalanx --create-home phalanx

USER 1000:1000
WORKDIR /home/phalanx

# phalanx submit --on kubernetes calls python -m phalanx pod, whatever the entry point is.
ENTRYPOINT ["python", "-m", "phalanx"]
CMD ["--help"]
