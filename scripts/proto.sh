#!/usr/bin/env bash
# Generate the Python code of proto/ beside it. Run through `make proto`, which puts the environment's tools on PATH.
set -euo pipefail
cd "$(dirname "$0")/.."
python -m grpc_tools.protoc -I proto --python_out=proto --grpc_python_out=proto --mypy_out=quiet:proto --mypy_grpc_out=quiet:proto \
    proto/qerld/v1/*.proto
