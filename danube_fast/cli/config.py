"""`danube-fast config`: which settings are in force and where they come from."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from danube_fast.checks import shown_value
from danube_fast.cli.options import ConfigOption, OutputForm, OutputOption, example, group
from danube_fast.cli.output import exact_text, note, print_result, print_table

__all__ = ["app"]

app = group("config", "Show and check settings.", "danube-fast config show")


@app.command(epilog=example("DANUBE_WORKERS=4 danube-fast config show --config broker.toml"))
def show(
    config: ConfigOption = None,
    changed: Annotated[
        bool, typer.Option("--changed", help="Only settings that are not at their default.")
    ] = False,
    output: OutputOption = OutputForm.TEXT,
) -> None:
    """Show every setting, its value, and where that comes from."""
    from danube_fast.config import load_settings

    loaded = load_settings(None, os.environ, config)
    rows = [
        {
            "setting": name,
            "value": shown_value(name, getattr(loaded.settings, name)),
            "source": source,
        }
        for name, source in loaded.sources.items()
        if source != "default" or not changed
    ]
    if output is OutputForm.TEXT:
        rows = [{**row, "value": exact_text(row["setting"], row["value"])} for row in rows]
    for variable in loaded.ignored_variables:
        note(f"danube-fast: {variable} is no setting and is ignored")
    print_table(output, rows, "every setting is at its default")


@app.command(epilog=example("danube-fast config check --config broker.toml"))
def check(config: ConfigOption = None, output: OutputOption = OutputForm.TEXT) -> None:
    """Check a file and the environment; exit code 2 and one sentence if something is wrong."""
    from danube_fast.config import load_settings

    loaded = load_settings(None, os.environ, config)
    count = sum(source != "default" for source in loaded.sources.values())
    result = {"ok": True, "changed": count, "ignored_variables": loaded.ignored_variables}
    text = f"fine: {count} settings differ from their defaults or are set to them"
    if loaded.ignored_variables:
        text += f"; ignored: {', '.join(loaded.ignored_variables)}"
    print_result(output, result, text)
