"""Flags, environment and TOML for a pydantic-settings model: TOML file < environment < flags.

One flag a field (`max_loras` → `--max-loras`), its help from the field's description: a setting is written once.
"""

from __future__ import annotations

import argparse
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings, InitSettingsSource, PydanticBaseSettingsSource
from pydantic_settings import SettingsError as UnreadableError

Settings = TypeVar("Settings", bound=BaseSettings)


class SettingsError(ValueError):
    """Settings that do not hold together; one line a problem, with the field."""


def add_flags(parser: argparse.ArgumentParser, model: type[BaseSettings]) -> None:
    """Give the parser one flag a field of the model, and `--config`."""
    parser.add_argument("--config", type=Path, default=None, metavar="FILE", help="TOML file with these settings")
    for name, info in model.model_fields.items():
        flag = f"--{name.replace('_', '-')}"
        text = f"{info.description} [{variable(model, name)}; default: {default_text(info)}]".replace("%", "%%")
        if info.annotation is bool:
            parser.add_argument(
                flag, nargs="?", const="true", default=argparse.SUPPRESS, metavar="true|false", help=text
            )
        elif is_table(info):
            parser.add_argument(
                flag, action="append", default=argparse.SUPPRESS, metavar="KEY=VALUE", type=key_value, help=text
            )
        else:
            parser.add_argument(flag, default=argparse.SUPPRESS, metavar="VALUE", help=text)


def load(model: type[Settings], arguments: argparse.Namespace) -> Settings:
    """Merge the three sources; raises SettingsError naming the fields."""
    given = {name: value for name, value in vars(arguments).items() if name in model.model_fields}
    for name, value in given.items():
        if isinstance(value, list):
            given[name] = dict(value)
    return merged(model, read_toml(arguments.config), given)


def merged(model: type[Settings], file: Mapping[str, Any], given: Mapping[str, Any]) -> Settings:
    """Build the settings from a parsed TOML file, the environment and given values, in rising order."""

    class Layered(model):  # type: ignore[valid-type, misc]
        @classmethod
        def settings_customise_sources(
            cls,
            settings_cls: type[BaseSettings],
            init_settings: PydanticBaseSettingsSource,
            env_settings: PydanticBaseSettingsSource,
            dotenv_settings: PydanticBaseSettingsSource,
            file_secret_settings: PydanticBaseSettingsSource,
        ) -> tuple[PydanticBaseSettingsSource, ...]:
            return init_settings, env_settings, InitSettingsSource(settings_cls, dict(file))

    try:
        layered: Settings = Layered(**given)
    except ValidationError as error:
        raise SettingsError("\n".join(problem(dict(entry)) for entry in error.errors())) from error
    except UnreadableError as error:  # a variable of a table that is not JSON
        raise SettingsError(f'{error}: must be a JSON object, such as {{"max_lora_rank": 16}}') from error
    return layered


def problem(entry: Mapping[str, Any]) -> str:
    """One line of a validation error: field, what is wrong, value."""
    field = ".".join(map(str, entry["loc"])) or "settings"
    if entry["type"] == "missing":
        flag = field.replace("_", "-")
        return f"{field}: missing; give --{flag}, the environment variable or the line in the TOML file"
    return f"{field}: {entry['msg']} (got {entry['input']!r})"


def read_toml(path: Path | None) -> dict[str, Any]:
    if path is None:
        return {}
    try:
        return tomllib.loads(path.read_text())
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise SettingsError(f"--config {path}: {error}") from error


def parsed(model: type[Settings], parser: argparse.ArgumentParser, argv: Sequence[str]) -> Settings:
    """Parse flags and build the settings; wrong ones end the process with the parser's usage and status 2."""
    arguments = parser.parse_args(argv)
    try:
        return load(model, arguments)
    except SettingsError as error:
        parser.error(str(error))


def key_value(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise argparse.ArgumentTypeError(f"must be KEY=VALUE, got {text!r}")
    return key, value


def variable(model: type[BaseSettings], name: str) -> str:
    """Environment variable of a field."""
    return f"{model.model_config.get('env_prefix', '')}{name}".upper()


def default_text(info: FieldInfo) -> str:
    if info.is_required():
        return "required"
    default = info.get_default(call_default_factory=True, validated_data={})
    return "unset" if default is None else "none" if default == {} else str(default)


def is_table(info: FieldInfo) -> bool:
    return str(info.annotation).startswith("dict[")


def toml_text(values: Mapping[str, Any]) -> str:
    """TOML of flat values and one level of tables; unset (None) values are commented out."""
    flat = [toml_line(name, value) for name, value in values.items() if not isinstance(value, Mapping)]
    tables = [
        "\n".join([f"\n[{name}]", *(toml_line(key, inner) for key, inner in value.items())])
        for name, value in values.items()
        if isinstance(value, Mapping)
    ]
    return "\n".join([*flat, *tables]) + "\n"


def toml_line(name: str, value: Any) -> str:
    return f"# {name} = (unset)" if value is None else f"{name} = {toml_value(value)}"


def toml_value(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(toml_value, value))}]"
    escaped = str(value).replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'
