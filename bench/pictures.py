"""What the pictures of committed results have in common: their files, their origin, tables of figures."""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

Row = dict[str, str]


def rows(folder: Path, name: str) -> list[Row]:
    with (folder / f"{name}.csv").open() as file:
        return list(csv.DictReader(file))


def origin(folder: Path, names: Sequence[str]) -> str:
    """The GPU on which results were measured, and of each file the commit and the day."""
    stamps = {name: json.loads((folder / f"{name}.json").read_text())["stamp"] for name in names}
    gpus = sorted({stamp["gpu"].split(",")[0] for stamp in stamps.values()})
    return ", ".join(
        [*gpus, *(f"{name} {stamp['commit'][:7]} ({stamp['date'][:10]})" for name, stamp in stamps.items())]
    )


def save(figure: Any, folder: Path, picture: str, *names: str) -> None:
    """Writes the picture, which says of which results it is."""
    figure.supxlabel(origin(folder, names or (picture,)), x=0.99, ha="right", fontsize="x-small", color="0.4")
    path = folder / f"{picture}.png"
    figure.savefig(path, dpi=110, metadata={"Software": None})  # the same picture from the same figures
    print(path)


def new_figure(width: float, height: float) -> Any:
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def cells(
    axis: Any,
    values: Mapping[tuple[str, str], float],
    *,
    title: str,
    labels: tuple[str, str],
    colours: tuple[float, float],
    names: Mapping[str, str] | None = None,
) -> None:
    """A table of figures with (y, x) as keys, coloured from red, the worst, to green, the best. Other cells were not
    measured.
    """
    from matplotlib import colormaps

    down, across = list(dict.fromkeys(y for y, _ in values)), list(dict.fromkeys(x for _, x in values))
    table = [[values.get((y, x), float("nan")) for x in across] for y in down]
    colour_of = colormaps["RdYlGn"].with_extremes(bad="0.9")
    axis.imshow(table, cmap=colour_of, vmin=colours[0], vmax=colours[1], aspect="auto")
    axis.set_xticks(range(len(across)), across)
    axis.set_yticks(range(len(down)), [(names or {}).get(y, y) for y in down])
    axis.set(xlabel=labels[1], ylabel=labels[0])
    axis.set_title(title, fontsize="medium")
    for i, j in product(range(len(down)), range(len(across))):
        measured = table[i][j] == table[i][j]
        red, green, blue, _ = colour_of((table[i][j] - colours[0]) / (colours[1] - colours[0]))
        dark = measured and 0.3 * red + 0.6 * green + 0.1 * blue < 0.45
        text = f"{table[i][j]:.2f}" if measured else "not\nmeasured"
        axis.text(j, i, text, ha="center", va="center", fontsize="small" if measured else "xx-small",
                  color="white" if dark else "black")  # fmt: skip


def lines(axis: Any, measured: Sequence[Row], *, by: str, x: str, y: str) -> None:
    for name in dict.fromkeys(row[by] for row in measured):
        line = [(float(row[x]), float(row[y])) for row in measured if row[by] == name]
        axis.plot(*zip(*line, strict=True), marker=".", label=f"{by} {name}")
    axis.grid(alpha=0.3)
