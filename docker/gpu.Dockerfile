# penjing on an NVIDIA GPU: NGC's Triton server with its onnxruntime, tensorrt and python backends.
# Checked by a linter and by the tests of its parts; it has not been built or run where this file was written.
#   docker build -f docker/gpu.Dockerfile -t penjing:gpu .
#   docker run --gpus 1 -v ./build/smollm2-int8:/model:ro -p 8080:8080 penjing:gpu
ARG BASE=nvcr.io/nvidia/tritonserver:25.08-py3

# Versions of the base's system packages float with its security updates; Python's are pinned by constraints.txt.
# hadolint global ignore=DL3008
FROM ${BASE}
RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ python3-dev python3-venv tini \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /src
# Dependencies alone, so that a change of penjing's code keeps this layer. The Python backend of the base runs the base's
# Python 3.12; penjing's environment is made of the same one. torch's default build for Linux is the one with CUDA.
COPY pyproject.toml constraints.txt ./
COPY docker/dependencies.py docker/
RUN --mount=type=cache,target=/root/.cache/pip \
    --mount=type=secret,id=pip_config,target=/etc/pip.conf \
    python3 -m venv /opt/penjing \
    && python3 docker/dependencies.py pyproject.toml gpu front > /tmp/dependencies.txt \
    && /opt/penjing/bin/pip install -c constraints.txt -r /tmp/dependencies.txt
COPY . .
ENV PATH=/opt/penjing/bin:$PATH PENJING_CACHE=/opt/penjing/cache PYTHONUNBUFFERED=1
RUN --mount=type=cache,target=/root/.cache/pip \
    --mount=type=secret,id=pip_config,target=/etc/pip.conf \
    pip install --no-deps . \
    && cp docker/healthcheck.py /opt/penjing/ \
    && penjing server install \
    && useradd --uid 10001 --user-group --create-home --shell /usr/sbin/nologin penjing \
    && install -d -o penjing -g penjing /opt/penjing/cache /opt/penjing/cache/run /opt/penjing/cache/models
USER 10001:10001
WORKDIR /home/penjing
# OpenAI's interface; Triton server's own ports stay on loopback
EXPOSE 8080
# Asks the engine behind the endpoint: Triton server's own answer stays "ready" when the model's process is dead.
HEALTHCHECK --interval=30s --timeout=15s --start-period=120s --retries=2 CMD ["python3", "/opt/penjing/healthcheck.py"]
STOPSIGNAL SIGTERM
# in place of the base's entrypoint, which prints a banner and starts a shell
ENTRYPOINT ["/usr/bin/tini", "--", "penjing"]
CMD ["serve", "/model", "--openai", "8080", "--host", "0.0.0.0"]
