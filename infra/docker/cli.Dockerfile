# The command line, and what prepares a deployment: secrets, the model, `pdq init`. No engine, no torch.
ARG PYTHON_IMAGE=python:3.11.14-slim-bookworm

# Replaced by a build context of that name, where there are wheels to install from (docs/containers.md).
FROM scratch AS wheels

FROM ${PYTHON_IMAGE} AS packages
WORKDIR /src
RUN --mount=type=bind,source=infra/docker/build,target=infra/docker/build \
    --mount=type=bind,source=infra/locks,target=infra/locks \
    --mount=type=bind,from=wheels,target=/wheels \
    --mount=type=cache,target=/root/.cache \
    sh infra/docker/build/install.sh packages router

FROM packages AS app
COPY pyproject.toml README.md LICENSE ./
COPY shared shared
COPY services services
RUN --mount=type=bind,source=infra/docker/build,target=infra/docker/build \
    --mount=type=bind,source=infra/locks,target=infra/locks \
    --mount=type=cache,target=/root/.cache \
    sh infra/docker/build/install.sh pdq

FROM ${PYTHON_IMAGE}
RUN --mount=type=bind,source=infra/docker/build,target=/mnt sh /mnt/system.sh none
COPY --from=packages /opt/pdq /opt/pdq
COPY --from=app /opt/app /opt/pdq
RUN install -d -o pdq -g pdq -m 0700 /secrets/nats /secrets/site /secrets/kv /secrets/grafana
COPY infra/docker/make-secrets.sh infra/docker/make_site.py infra/docker/fetch_model.py infra/models.toml /opt/pdq/share/
ENV PATH=/opt/pdq/bin:$PATH \
    HOME=/tmp \
    HF_HOME=/var/lib/pdq/hub \
    PDQ_HOME=/var/lib/pdq \
    PDQ_MODELS=/var/lib/pdq/models.toml
USER 10001:10001
# A command that ends; nothing to probe.
HEALTHCHECK NONE
ENTRYPOINT ["pdq"]
ARG VERSION=0.1.0
LABEL org.opencontainers.image.title="pdq" \
      org.opencontainers.image.description="The pdq command line" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.licenses="Apache-2.0"
