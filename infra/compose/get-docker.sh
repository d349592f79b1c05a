#!/usr/bin/env bash
# Docker Engine with `docker compose` and buildx on Debian, as root, without changing the machine's own package sources.
#
#   infra/compose/get-docker.sh            install (from Debian's packages)
#   infra/compose/get-docker.sh --dry-run  show what would be installed
#
# Debian 12 carries no `docker compose`, Debian 13 does: its packages are taken from there, with apt state of their own
# in $STATE. They need a C library that Debian 12 has too. Elsewhere, install Docker Engine 25 or later by your
# system's usual way.
set -euo pipefail

STATE=${STATE:-/var/cache/pdq-docker}
SOURCES=/etc/apt/sources.list.d/debian.sources
APT_TIMEOUT_S=600

[ "$(id -u)" = 0 ] || { echo "get-docker.sh: must be run as root" >&2; exit 1; }
[ -f "$SOURCES" ] || { echo "get-docker.sh: no $SOURCES: install Docker Engine 25 or later by your system's way" >&2; exit 1; }
# shellcheck source=/dev/null
. /etc/os-release

mkdir -p "$STATE/lists/partial" "$STATE/cache/archives/partial"
# The machine's own mirror: its sources as they are, and its first stanza again for Debian 13.
{
    cat "$SOURCES"
    echo
    awk 'BEGIN { RS = "" } NR == 1 { gsub(/Suites:[^\n]*/, "Suites: trixie"); print }' "$SOURCES"
} >"$STATE/debian.sources"
apt() {
    timeout "$APT_TIMEOUT_S" apt-get -qq \
        -o "Dir::Etc::sourcelist=$STATE/debian.sources" -o Dir::Etc::sourceparts=/dev/null \
        -o "Dir::State::lists=$STATE/lists" -o "Dir::Cache=$STATE/cache" \
        -o "APT::Default-Release=$VERSION_CODENAME" "$@"
}

apt update
DEBIAN_FRONTEND=noninteractive apt install ${1:+"$1"} --yes --no-install-recommends \
    iptables runc containerd docker.io/trixie docker-cli/trixie docker-compose/trixie docker-buildx/trixie
