"""Write `lightning_eff/__init__.pyi`: the public names with the modules that define them."""

from __future__ import annotations

from pathlib import Path

import lightning_eff

STUB = Path(lightning_eff.__file__).with_suffix(".pyi")


def stub() -> str:
    """Return the stub's text: one explicit re-export per name, in ruff's order of imports."""
    by_module: dict[str, list[str]] = {}
    for name, module in lightning_eff.public_names().items():
        by_module.setdefault(module, []).append(name)
    lines = ["# Written by `make stubs`: the types of the lazy names in __init__.py.", ""]
    for module, names in sorted(by_module.items()):
        lines += [f"from {module} import {name} as {name}" for name in sorted(names)]
    return "\n".join([*lines, "", "__version__: str", ""])


if __name__ == "__main__":
    STUB.write_text(stub(), encoding="utf-8")
