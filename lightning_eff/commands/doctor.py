"""Check this machine: versions, GPU, compiler, disk; print one command per problem that fixes it."""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict

from lightning_eff.core.errors import EXIT_ENVIRONMENT, EXIT_OK
from lightning_eff.core.text import print_json, text_table


def main(options: argparse.Namespace) -> int:
    """Run the verb."""
    if options.cluster:
        from lightning_eff.launch.cluster_check import inspect_cluster
        from lightning_eff.launch.job import Launch

        findings, is_first = inspect_cluster(options.output_root), not Launch.of().rank
    else:
        from lightning_eff.launch import machine_check

        findings, is_first = machine_check.inspect_machine(), True
    if not is_first:
        pass  # rank 0 prints what all have found
    elif options.json:
        print_json({"rows": [asdict(finding) for finding in findings]})
    else:
        rows = [[finding.what, finding.found, finding.status, finding.fix] for finding in findings]
        sys.stdout.write(text_table(["what", "found", "status", "fix"], rows) + "\n")
    return EXIT_ENVIRONMENT if any(finding.status == "problem" for finding in findings) else EXIT_OK
