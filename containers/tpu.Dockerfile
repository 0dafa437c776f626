# Swift for TPU virtual machines. libtpu comes with JAX's packages.
#
#     docker build -f containers/tpu.Dockerfile -t swift-tpu .
#     docker run --rm --privileged --network host --shm-size 16g -v "$PWD/runs:/runs" swift-tpu doctor --host --run-dir /runs
FROM python:3.12-slim

WORKDIR /swift
COPY pyproject.toml setup.py README.md LICENSE MANIFEST.in swift_moe.py ./
COPY swift swift
COPY experiments experiments
RUN pip install --no-cache-dir '.[tpu]'

ENTRYPOINT ["python", "-m", "swift"]
CMD ["--help"]
