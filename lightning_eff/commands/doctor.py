"""Look at this machine: versions, GPU, compiler, room; each problem with one command that mends it."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict

from lightning_eff.core.errors import EXIT_ENVIRONMENT, EXIT_OK, UsageError
from lightning_eff.core.text import text_table

USAGE = """lightning-eff doctor [--json]

Exit code 3 when something does not work, 0 otherwise; a note is something that could be better."""


def main(arguments: Sequence[str]) -> int:
    """Run the verb."""
    unknown = [word for word in arguments if word not in ("--json", "--debug")]
    if unknown:
        text = f"doctor: unknown argument {unknown[0]!r}\n{USAGE}"
        raise UsageError(text)
    from lightning_eff.report.installation import inspect_machine

    findings = inspect_machine()
    if "--json" in arguments:
        sys.stdout.write(json.dumps({"rows": [asdict(finding) for finding in findings]}, indent=1) + "\n")
    else:
        rows = [[each.what, each.found, each.status, each.fix] for each in findings]
        sys.stdout.write(text_table(["what", "found", "status", "fix"], rows) + "\n")
    return EXIT_ENVIRONMENT if any(each.status == "problem" for each in findings) else EXIT_OK
