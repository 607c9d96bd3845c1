"""`shardwise report`: the page about a run."""

from pathlib import Path
from typing import Annotated

import typer

from shardwise.cli.process.exit import Exit


def report(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The directory of a run, such as runs/quickstart.")],
    against: Annotated[
        Path | None, typer.Option("--against", metavar="OTHER", help="Another run, to show beside it.")
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            help="The file to write. [in RUN: report.html, or report-against-OTHER.html]",
            show_default=False,
        ),
    ] = None,
    debug: Annotated[bool, typer.Option("--debug", help="Also show tracebacks of mistakes.")] = False,
) -> int:
    """Write one page about a run: curves, memory, units, where the time went, what stands out. It opens in any browser,
    without a network."""
    from shardwise.train.report.page import write_report
    from shardwise.train.report.run_log import RunLog

    beside = "" if against is None else f"-against-{against.resolve().name}"
    page = output or run / f"report{beside}.html"
    write_report(page, RunLog.read(run), None if against is None else RunLog.read(against))
    print(f"page: {page}")
    return Exit.DONE
