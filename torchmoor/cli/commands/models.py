"""`torchmoor models`: the models of endpoints with many models."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import quote

import click

from torchmoor.cli.exit_status import ExitStatus
from torchmoor.cli.options import admin_options, json_option, report_warning, show
from torchmoor.cli.running_fleets import complete_endpoints, complete_instances
from torchmoor.cli.tables import format_table, in_bytes, in_time, terminal_width
from torchmoor.clients.admin import AdminClient

ACTION_TIMEOUT_S = 400.0  # an unload waits for the requests that use the model
NOT_IN_MEMORY = "is not in memory"
_PLACES = {  # by tier; a model that is only on disk or at its source is not in memory
    "device": "is in device memory",
    "host": "is in host memory",
    "loading": "is being loaded",
    "leaving": "is being removed from memory",
    "broken": "cannot be used; torchmoor models list --json shows the reason",
}
HEADS = ("MODEL", "INSTANCE", "TIER", "SIZE", "USED", "REQUESTS", "GOES")


@click.group()
def models() -> None:
    """List, pin, unpin, prewarm or unload models of endpoints with many models, or adapters.

    \b
    Examples:
      torchmoor models list
      torchmoor models prewarm minilm-007.tar.gz
      torchmoor models unload minilm-007.tar.gz --instance many-0
    """


@models.command("list")
@click.option("--endpoint", metavar="NAME", shell_complete=complete_endpoints, help="List only this endpoint's models.")
@json_option
@admin_options
def list_(admin: AdminClient, endpoint: str | None, as_json: bool) -> None:
    """List models by instance and memory tier. GOES is the place in the order of eviction.

    \b
    Examples:
      torchmoor models list
      torchmoor models list --json | jq -r '.models[].name'
    """
    found = admin.get("/models", {"endpoint": endpoint})
    show(found, lambda: _describe(found), as_json=as_json)


def _describe(found: Mapping[str, Any]) -> Iterator[str]:
    for instance in found["instances"]:
        if not instance["answered"]:
            yield f"{instance['instance']} reports no models."
    if not found["models"]:
        yield "There is no model" + ("." if found["instances"] else ": no endpoint has many models.")
        return
    places = {(row["instance"], name): i for row in found["instances"] for i, name in enumerate(row["next_to_go"], 1)}
    rows = [
        (
            row["name"],
            row["instance"],
            row["tier"],
            in_bytes(row.get("bytes", 0) + row.get("mapped_bytes", 0)),
            "" if row.get("last_used_s") is None else f"{in_time(row['last_used_s'])} ago",
            str(row.get("hits", "")),
            "pinned" if row.get("pinned") else str(places.get((row["instance"], row["name"]), "")),
        )
        for row in found["models"]
    ]
    yield from format_table(HEADS, rows, terminal_width())


def _add(action: str, summary: str) -> None:
    @models.command(action, help=f"{summary}\n\n\b\nExamples:\n  torchmoor models {action} minilm-007.tar.gz")
    @click.argument("model")
    @click.option(
        "--endpoint",
        metavar="NAME",
        shell_complete=complete_endpoints,
        help="The endpoint; required if several have many models.",
    )
    @click.option("--instance", metavar="NAME", shell_complete=complete_instances, help="Act on this instance only.")
    @json_option
    @admin_options
    def act(admin: AdminClient, model: str, endpoint: str | None, instance: str | None, as_json: bool) -> None:
        query = {"endpoint": endpoint, "instance": instance}
        path = f"/models/{quote(model)}/{action}"
        found = admin.post(path, query, timeout_s=ACTION_TIMEOUT_S)
        done = [row for row in found["instances"] if row["status"] == 200]
        failed = [
            row for row in found["instances"] if row["status"] not in (200, 404)
        ]  # 404: the instance does not hold it
        for row in failed:
            report_warning(f"{row['instance']}: {row['error']}")
        show(
            found,
            lambda: [f"{row['instance']}: {model} {_PLACES.get(row.get('tier'), NOT_IN_MEMORY)}" for row in done],
            as_json=as_json,
        )
        if failed:
            raise click.exceptions.Exit(ExitStatus.FAILED)


_add("pin", "Keep MODEL in memory until it is unpinned; begin to load it if needed.")
_add("unpin", "Allow MODEL to be evicted again.")
_add("prewarm", "Begin to load MODEL before its first request.")
_add("unload", "Remove MODEL from memory once its running requests have ended.")
