"""Check this machine: versions, GPU, compiler, disk; print one command per problem that fixes it."""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict

from lightning_eff.commands._shared import print_json
from lightning_eff.core.errors import EXIT_ENVIRONMENT, EXIT_OK
from lightning_eff.core.text import text_table


def main(options: argparse.Namespace) -> int:
    """Run the verb."""
    from lightning_eff.report.installation import inspect_machine

    findings = inspect_machine()
    if options.json:
        print_json({"rows": [asdict(finding) for finding in findings]})
    else:
        rows = [[finding.what, finding.found, finding.status, finding.fix] for finding in findings]
        sys.stdout.write(text_table(["what", "found", "status", "fix"], rows) + "\n")
    return EXIT_ENVIRONMENT if any(finding.status == "problem" for finding in findings) else EXIT_OK
