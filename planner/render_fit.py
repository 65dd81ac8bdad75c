"""Whether a model fits, as a table a person reads."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from planner.api.fit import Fit
from planner.render import GIB, MIB, sequences, size


def show_fit(fit: Fit, model: str) -> RenderableType:
    """The verdict, the memory of the worst rank, and what else fits."""
    text = Text()
    where = f"{fit.num_devices} GPUs of {fit.hardware}, {sequences(fit.global_batch_size, fit.seq_len)}"
    text.append("fits" if fit.fits else "does not fit", style="bold green" if fit.fits else "bold red")
    text.append(f": {model} on {where}\n")
    text.append("fastest plan" if fit.fits else "the layout that lacks least")
    text.append(f": {fit.layout}; its worst rank takes {size(fit.peak_bytes)} of the {size(fit.room_bytes)} it may")
    return Group(text, _ledger(fit), _edges(fit))


def _ledger(fit: Fit) -> Table:
    scale, unit = (GIB, "GiB") if fit.peak_bytes >= GIB else (MIB, "MiB")
    table = Table(title="Memory of the worst rank", title_justify="left")
    table.add_column(unit)
    table.add_column("", justify="right")
    for name, num_bytes in fit.ledger_bytes.items():
        table.add_row(name.replace("_", " "), f"{num_bytes / scale:.2f}")
    table.add_section()
    table.add_row("total", f"{fit.peak_bytes / scale:.2f}")
    table.add_row("may take", f"{fit.room_bytes / scale:.2f}")
    return table


def _edges(fit: Fit) -> Table:
    table = Table(title="What fits, of what was tried", title_justify="left", show_header=False)
    rows = {
        "fewest GPUs": fit.least_devices,
        "longest sequence": None if fit.longest_seq_len is None else f"{fit.longest_seq_len:,} tokens",
        "largest micro-batch": None
        if fit.largest_micro_batch is None
        else f"{fit.largest_micro_batch} {'sequences' if fit.seq_len > 1 else 'samples'}",
    }
    if fit.seq_len == 1:
        del rows["longest sequence"]
    absent = "not looked for" if fit.fits else "none"  # unlike devices, or a model that is known at one length alone
    for name, value in rows.items():
        table.add_row(name, absent if value is None else str(value))
    if not fit.fits:
        table.add_row("smallest change", fit.change)
    return table
