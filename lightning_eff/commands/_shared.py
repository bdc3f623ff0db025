"""What several verbs print."""

from __future__ import annotations

import json
import sys
from typing import Any


def print_json(value: Any) -> None:
    """Write a value as JSON to the standard output."""
    sys.stdout.write(json.dumps(value, indent=1) + "\n")
