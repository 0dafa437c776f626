# Swift for NVIDIA GPUs. CUDA's libraries come with JAX's packages; the machine needs NVIDIA's driver, 580 or newer, and its
# container toolkit.
#
#     docker build -f containers/gpu.Dockerfile -t swift-gpu .
#     docker run --rm --gpus all --shm-size 16g -v "$PWD/runs:/runs" swift-gpu doctor --host --run-dir /runs
FROM python:3.12-slim

# NCCL reaches InfiniBand through these libraries; without them it takes TCP.
RUN apt-get update && apt-get install -y --no-install-recommends libibverbs1 ibverbs-providers \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /swift
COPY pyproject.toml setup.py README.md LICENSE MANIFEST.in swift_moe.py ./
COPY swift swift
COPY experiments experiments
RUN pip install --no-cache-dir '.[cuda13]'

ENTRYPOINT ["python", "-m", "swift"]
CMD ["--help"]
