# onward in a container. docker build -t onward .
#   docker run --rm -v "$PWD:/work" onward train run.yaml
#   docker run --rm --gpus all --shm-size=8g -v "$PWD:/work" onward train run.yaml
FROM python:3.12-slim

# Empty: the build of torch with CUDA, several GB. PyTorch's site names the index of its CPU builds, an eighth as large:
# pass it as --build-arg TORCH_INDEX=URL.
ARG TORCH_INDEX=
ENV PIP_NO_CACHE_DIR=1 PYTHONUNBUFFERED=1

# glibc's allocator fragments under tensors (docs/explanation/memory.md).
RUN apt-get update && apt-get install --yes --no-install-recommends libtcmalloc-minimal4 && rm -rf /var/lib/apt/lists/*
ENV LD_PRELOAD=libtcmalloc_minimal.so.4

WORKDIR /opt/onward
COPY constraints.txt pyproject.toml README.md LICENSE ./
COPY src ./src
RUN pip install --constraint constraints.txt ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} torch \
 && pip install --constraint constraints.txt ".[pack,export]"

# Not root: what a run writes into /work then belongs to the user given by `docker run --user`.
RUN useradd --create-home onward && mkdir /work && chown onward /work
USER onward
WORKDIR /work
ENTRYPOINT ["onward"]
CMD ["doctor"]
