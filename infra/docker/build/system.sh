#!/bin/sh
# Runs in the last stage of every image: the user, the directories that volumes are mounted over (a new volume takes
# their owner), bytecode of the standard library, and the few system libraries an engine needs.
#
#   system.sh cpu|gpu|none
set -eu

groupadd --gid 10001 pdq
useradd --uid 10001 --gid pdq --no-create-home --home-dir /tmp --shell /usr/sbin/nologin pdq
install -d -o pdq -g pdq /var/lib/pdq
# Some files there are not meant to compile.
python3 -m compileall -q -j 0 "$(python3 -c 'import sysconfig; print(sysconfig.get_path("stdlib"))')" >/dev/null 2>&1 || true

case "$1" in
    cpu) libraries="libnuma1" ;;             # vLLM's CPU kernels are linked to it
    gpu) libraries="libnuma1 gcc libc6-dev" ;; # Triton compiles its launchers while it runs
    none) exit 0 ;;
esac
apt-get update -qq
# shellcheck disable=SC2086  # a list
DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $libraries
rm -rf /var/lib/apt/lists/*
