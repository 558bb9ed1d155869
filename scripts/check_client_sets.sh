#!/usr/bin/env bash
# The generated code and the SDK load on the lowest and on the newest set of their requirements, without torch and vLLM.
set -euo pipefail
cd "$(dirname "$0")/.."
lowest="grpcio==1.78.0 protobuf==6.33.5 googleapis-common-protos==1.70.0 grpcio-status==1.78.0"
newest="grpcio protobuf googleapis-common-protos grpcio-status"

check() { # name, requirements…
    local name=$1 folder=.cache/client-sets/$1
    shift
    [ -x "$folder/bin/python" ] || python3 -m venv "$folder"
    "$folder/bin/python" -m pip --disable-pip-version-check install --quiet --upgrade "$@"
    PYTHONPATH=proto:clients "$folder/bin/python" - "$name" <<'PYTHON'
import importlib
import sys
from importlib.metadata import version
from pathlib import Path

for path in sorted(Path("proto/qerld/v1").glob("*_pb2*.py")):
    importlib.import_module(f"qerld.v1.{path.stem}")
import qerld_client

assert qerld_client.Client
unwanted = {"torch", "vllm", "transformers", "numpy"} & set(sys.modules)
assert not unwanted, unwanted
print(f"client loads on the {sys.argv[1]} set: grpcio {version('grpcio')}, protobuf {version('protobuf')}")
PYTHON
}

# shellcheck disable=SC2086 — the sets are lists of words
check lowest $lowest
# shellcheck disable=SC2086
check newest $newest
