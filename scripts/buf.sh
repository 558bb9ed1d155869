#!/usr/bin/env bash
# Run buf, installed from npm into .cache/buf on the first call. Arguments go to buf: scripts/buf.sh lint
set -euo pipefail
cd "$(dirname "$0")/.."
version=1.75.0
tool=.cache/buf/$version/node_modules/.bin/buf
if [ ! -x "$tool" ]; then
    command -v npm >/dev/null || { echo "buf.sh: npm is needed to install buf; install Node.js" >&2; exit 1; }
    npm install --silent --no-fund --no-audit --prefix ".cache/buf/$version" "@bufbuild/buf@$version"
fi
exec "$tool" "$@"
