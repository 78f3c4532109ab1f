# penjing on a CPU: the command line and the embedded Triton server, as an unprivileged user.
#   make image            builds it with docker or buildah
#   docker run -v ./build/smollm2-int8:/model:ro -p 8080:8080 penjing:cpu
# Debian 12: Python 3.11 with a shared libpython, glibc 2.36; Triton server's Python backend needs both (glibc >= 2.35).
ARG BASE=debian:12-slim

# Versions of Debian packages float with the release's security updates; Python's are pinned by constraints.txt.
# hadolint global ignore=DL3008
FROM ${BASE} AS dependencies
RUN apt-get update \
    && apt-get install -y --no-install-recommends ca-certificates g++ libpython3.11 python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /src
# Apart from penjing, so that a change of its code keeps this layer. Secrets (optional): pip's configuration and the
# certificates that it names. Wheels in docker/wheels are preferred: torch's CPU build is a tenth of the default one.
COPY pyproject.toml constraints.txt ./
COPY docker/dependencies.py docker/
RUN --mount=type=bind,source=docker/wheels,target=/wheels \
    --mount=type=cache,target=/root/.cache/pip \
    --mount=type=secret,id=pip_config,target=/etc/pip.conf \
    --mount=type=secret,id=certificates,target=/etc/ssl/certs/ca-certificates.crt \
    python3 -m venv /opt/penjing \
    && python3 docker/dependencies.py pyproject.toml front > /tmp/dependencies.txt \
    && /opt/penjing/bin/pip install --find-links /wheels -c constraints.txt torch \
    && /opt/penjing/bin/pip install --find-links /wheels -c constraints.txt -r /tmp/dependencies.txt \
    && rm -rf /opt/penjing/lib/python3.11/site-packages/torch/include /opt/penjing/lib/python3.11/site-packages/torch/share

# penjing itself into /opt/app, which the image lays over the dependencies. The server is fetched into a cache that outlives
# the build: a change of penjing's code does not fetch it again.
FROM dependencies AS build
COPY . .
RUN --mount=type=cache,target=/root/.cache/pip \
    --mount=type=cache,target=/var/cache/penjing \
    --mount=type=secret,id=pip_config,target=/etc/pip.conf \
    --mount=type=secret,id=certificates,target=/etc/ssl/certs/ca-certificates.crt \
    /opt/penjing/bin/pip install --no-deps --prefix /opt/app . \
    && cp docker/healthcheck.py /opt/app/ \
    && export PYTHONPATH=/opt/app/lib/python3.11/site-packages PENJING_CACHE=/var/cache/penjing \
    && /opt/app/bin/penjing server install \
    && mkdir -p /opt/cache \
    && cp -a /var/cache/penjing/server /opt/cache/

FROM ${BASE}
RUN apt-get update \
    && apt-get install -y --no-install-recommends ca-certificates libgomp1 libpython3.11 python3 tini \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --uid 10001 --user-group --create-home --shell /usr/sbin/nologin penjing \
    && install -d -o penjing -g penjing /opt/penjing/cache/run /opt/penjing/cache/models
# what changes least comes first: an upgrade of penjing fetches the last layer alone
COPY --from=dependencies /opt/penjing /opt/penjing
COPY --from=build /opt/cache /opt/penjing/cache
COPY --from=build /opt/app /opt/penjing
ENV PATH=/opt/penjing/bin:$PATH PENJING_CACHE=/opt/penjing/cache PYTHONUNBUFFERED=1
USER 10001:10001
WORKDIR /home/penjing
# OpenAI's interface; Triton server's own ports stay on loopback
EXPOSE 8080
# Asks the engine behind the endpoint: Triton server's own answer stays "ready" when the model's process is dead.
HEALTHCHECK --interval=30s --timeout=15s --start-period=60s --retries=2 CMD ["python3", "/opt/penjing/healthcheck.py"]
# tini passes SIGTERM on and reaps; `penjing serve` finishes running answers before it ends. Give it time: docker stop -t 60.
STOPSIGNAL SIGTERM
ENTRYPOINT ["/usr/bin/tini", "--", "penjing"]
CMD ["serve", "/model", "--openai", "8080", "--host", "0.0.0.0"]
