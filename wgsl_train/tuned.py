"""Tables of tuned choices, in one JSON file of the user's cache folder.

`wgsl-train tune` fills it, `request_device` reads it. A table belongs to an adapter, its driver,
and the versions of wgpu and of this package: see `Device.identity`.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .kernel import Values

Table = dict[str, Values]  # choices by `Kernel.key`


def cache_folder() -> Path:
    """WGSL_TRAIN_CACHE, else the folder `wgsl_train` where this system keeps caches."""
    if own := os.environ.get("WGSL_TRAIN_CACHE"):
        return Path(own)
    if sys.platform == "win32":
        base = os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local"
    elif sys.platform == "darwin":
        base = Path.home() / "Library" / "Caches"
    else:
        base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "wgsl_train"


def cache_file() -> Path:
    """Where the tables are kept."""
    return cache_folder() / "tuning.json"


def check_table(value: Any) -> Table:
    """The value, where it is a table of choices. Raises ValueError."""
    if not isinstance(value, dict):
        raise ValueError("not a table of choices")
    for key, choices in value.items():
        if not isinstance(choices, dict) or not all(
            isinstance(choice, (int, str)) for choice in choices.values()
        ):
            raise ValueError(f"the choices of {key!r} are {choices!r}")
    return value


def load(identity: str) -> Table:
    """The table of an adapter; empty where nothing is stored, or WGSL_TRAIN_NO_TUNING is 1.

    Warns, naming the file, where it is damaged; the table is empty then.
    """
    file = cache_file()
    if os.environ.get("WGSL_TRAIN_NO_TUNING") == "1" or not file.exists():
        return {}
    try:
        return check_table(_read(file).get(identity, {}))
    except (OSError, ValueError) as error:
        warnings.warn(f"{file}: not used, {error}; kernels run by default choices", stacklevel=3)
        return {}


def store(identity: str, found: Mapping[str, Values | None]) -> Path:
    """Keep choices by kernel's key for an adapter; None forgets one. Returns the file.

    What the file holds of other adapters and kernels stays; a damaged file begins anew. Raises
    OSError where it cannot be written.
    """
    file = cache_file()
    try:
        tables = _read(file)
        table = check_table(tables.get(identity, {}))
    except (OSError, ValueError):
        tables, table = {}, {}
    kept = {k: v for k, v in {**table, **found}.items() if v is not None}
    file.parent.mkdir(parents=True, exist_ok=True)
    temporary = file.with_name(f".{file.name}.tmp-{os.getpid()}")
    temporary.write_text(json.dumps({**tables, identity: kept}, indent=1), encoding="utf-8")
    os.replace(temporary, file)
    return file


def _read(file: Path) -> dict[str, Any]:
    tables = json.loads(file.read_text(encoding="utf-8"))
    if not isinstance(tables, dict):
        raise ValueError("not a JSON object")
    return tables
