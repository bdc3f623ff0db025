"""Show the report of a run again and rebuild its page, or compare several runs side by side."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from lightning_eff.commands._run_reports import RunReport, find_runs, read_run
from lightning_eff.core.errors import EXIT_OK, ConfigError, UsageError, check_path
from lightning_eff.core.text import print_json, printable


def main(options: argparse.Namespace) -> int:
    """Run the verb."""
    if not options.words:
        text = "report: which run? a run's folder, or a recipe's name for its newest run\n"
        text += "  try: lightning-eff report lm"
        raise UsageError(text)
    check_path("--output-root", options.output_root)
    root = Path(options.output_root)
    folders = list(dict.fromkeys(each for word in options.words for each in find_runs(word, root)))
    runs = [read_run(folder, root) for folder in folders]
    try:
        if len(runs) == 1:
            _show_one(runs[0], as_json=options.json)
        else:
            _show_several(runs, as_json=options.json)
    except ConfigError:
        raise
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        reason = f"{type(error).__name__}: {error}"
        allowed = f"reports of this version; one of them has other values ({reason})"
        raise ConfigError(key="RUN", value=" ".join(options.words), allowed=allowed) from error
    return EXIT_OK


def _show_one(run: RunReport, *, as_json: bool) -> None:
    """Print a run's report, and write its page.

    Raises:
        UsageError: It has none, or the page cannot be written.
    """
    from lightning_eff.report.display import report_text
    from lightning_eff.report.files import write_page

    if not run.report:
        raise UsageError(f"report: {run.folder} has no report: {run.status}, {run.reason}")
    try:
        page = write_page(run.folder, run.report)
    except OSError as error:
        raise UsageError(
            f"report: the page in {run.folder} was not written: {error.strerror or error}"
        ) from error
    if as_json:
        print_json({"run": str(run.folder), "page": str(page), "report": dict(run.report)})
    else:
        sys.stdout.write(printable(f"{report_text(run.report)}\n report: {page}\n"))


def _show_several(runs: list[RunReport], *, as_json: bool) -> None:
    """Print the runs side by side."""
    from lightning_eff.commands._run_table import compare_runs, comparison_lines

    compared = compare_runs(runs)
    if as_json:
        print_json(compared)
    else:
        sys.stdout.writelines(printable(f"{line}\n") for line in comparison_lines(compared))
