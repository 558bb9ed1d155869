"""`qerld config`: the effective settings of a role as TOML, or a description of every setting."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from typing import Any, cast

from pydantic_settings import BaseSettings

from qerld_service import flags

# By name: the two roles know each other only through the protocol, and a machine may have only one of them installed.
ROLES = {
    "serve": "qerld_service.serve:ServeSettings",
    "policy": "qerld_service.settings:PolicySettings",
    "learner": "qerld_learner.settings:LearnerSettings",
}


def main(argv: Sequence[str]) -> int:
    role, rest = split_role(argv)
    model = settings_model(role)
    parser = argparse.ArgumentParser(
        prog=f"qerld config {role}",
        description=f"Print the effective settings of `qerld {role}` as TOML: file < environment < flags.",
    )
    parser.add_argument("--describe", action="store_true", help="print a Markdown table of every setting instead")
    flags.add_flags(parser, model)
    arguments = parser.parse_args(rest)
    if arguments.describe:
        sys.stdout.write(describe(role, model))
        return 0
    try:
        settings = flags.load(model, arguments)
    except flags.SettingsError as error:
        parser.error(str(error))
    sys.stdout.write(flags.toml_text(settings.model_dump(mode="json")))
    return 0


def split_role(argv: Sequence[str]) -> tuple[str, Sequence[str]]:
    parser = argparse.ArgumentParser(
        prog="qerld config",
        description="Print the effective settings of a role as TOML: file < environment < flags.",
        epilog="`qerld config ROLE --help` lists the settings, `qerld config ROLE --describe` prints them as a table.",
    )
    parser.add_argument("role", choices=ROLES, help="whose settings")
    return parser.parse_args(argv[:1]).role, argv[1:]


def settings_model(role: str) -> type[BaseSettings]:
    module, _, name = ROLES[role].partition(":")
    return cast("type[BaseSettings]", getattr(importlib.import_module(module), name))


def describe(role: str, model: type[BaseSettings]) -> str:
    """A Markdown table: setting, environment variable, default, meaning."""
    rows = [
        f"| `{name}` | `{flags.variable(model, name)}` | {cell(flags.default_text(info))} | {cell(info.description)} |"
        for name, info in model.model_fields.items()
    ]
    head = ["| setting | environment | default | meaning |", "|---|---|---|---|"]
    return "\n".join([f"## qerld {role}", "", *head, *rows]) + "\n"


def cell(text: Any) -> str:
    return str(text).replace("|", "\\|").replace("\n", " ")
