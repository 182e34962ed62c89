"""Draw the figures of a group: times, speed-up, throughput and accuracy."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from common.report.plots import COLOURS, STYLE
from ddp_bench.report.diagnosis import Group, Point
from ddp_bench.report.records import PHASES

# What colours tell apart on a screen, markers tell apart in print.
MARKERS = "os^Dv<>P"
# Around a number beside a curve.
BOX = {"boxstyle": "round,pad=0.1", "facecolor": "white", "edgecolor": "none", "alpha": 0.8}


def draw_figures(group: Group, out: Path, warmup: int) -> None:
    """Draw what a group has numbers for, each figure into a file of `out`.

    Args: warmup: epochs of a run that do not count.
    """
    import matplotlib  # half a second

    with matplotlib.rc_context(STYLE):
        made = {
            "epoch_time_detailed": draw_times(group, warmup),
            "speedup_efficiency": draw_speedup(group),
            "throughput": draw_throughput(group),
            "accuracy": draw_accuracy(group),
        }
        for name, figure in made.items():
            if figure is not None:
                figure.savefig(out / f"{group.name}_{name}.png", dpi=120)


def draw_times(group: Group, warmup: int) -> Any:
    """Draw the seconds of each epoch, and beside them where a step's time goes."""
    curves = any(record.epochs for point in group.points for record in point.records)
    with_phases = [point for point in group.points if point.phases]
    panels = curves + bool(with_phases)
    if not panels:
        return None
    figure, axes = _make_panels(panels, 7.5)
    if curves:
        axis = axes.pop(0)
        for i, values, label in _list_curves(group, "epochs"):
            style = {"color": COLOURS[i % 8], "marker": MARKERS[i % 8]}
            axis.plot(range(1, len(values) + 1), values, label=label, **style)
        if warmup:
            axis.axvspan(0.5, warmup + 0.5, color="0.88", label="warm-up, not counted", zorder=0)
        title = f"{group.name}: time of an epoch"
        axis.set(xlabel="epoch", ylabel="training time of an epoch (s)", title=title)
        axis.set_ylim(bottom=0)
        _finish_epochs(axis, group, "epochs")
    if axes:
        axis = axes[0]
        bottoms = [0.0] * len(with_phases)
        for name, colour in zip(PHASES, COLOURS, strict=False):
            heights = [1000 * point.phases.get(name, 0.0) for point in with_phases]
            if any(heights):
                places = range(len(heights))
                axis.bar(places, heights, 0.65, bottom=bottoms, color=colour, label=name)
                bottoms = [a + b for a, b in zip(bottoms, heights, strict=True)]
        _name_bars(axis, with_phases)
        title = f"{group.name}: where a step's time goes"
        axis.set(ylabel="time of a step (ms)", title=title)
        axis.set_ylim(0, 1.25 * max([*bottoms, 1e-9]))
        axis.legend(ncols=3, fontsize=11, loc="upper center")
    return figure


def draw_speedup(group: Group) -> Any:
    """Draw speed-up and efficiency by ranks, strong and weak, beside the ideal."""
    lines = _list_lines(group)
    if not lines:
        return None
    figure, axes = _make_panels(2, 7.5)
    points = [point for line in lines.values() for point in line]
    ranks = sorted({point.ranks for point in points})
    axes[0].plot(ranks, ranks, "--", color="0.4", label="ideal")
    axes[1].axhline(100, linestyle="--", color="0.4", label="ideal")
    axes[1].axhline(80, linestyle=":", color="0.4", label="80 %: excellent")
    for axis, name, text in ((axes[0], "speedup", "{:.2f}x"), (axes[1], "efficiency", "{:.0f} %")):
        for i, (label, line) in enumerate(lines.items()):
            values = [getattr(point, name) for point in line]
            style = {"color": COLOURS[i % 8], "marker": MARKERS[i % 8], "markersize": 9}
            axis.plot([point.ranks for point in line], values, label=label, **style)
        # The lowest is labelled below and the highest above, so that no two meet.
        for place in ranks[1:]:
            there = sorted(getattr(point, name) for point in points if point.ranks == place)
            for value, offset in {there[-1]: 10, there[0]: -22}.items():
                where = {"xytext": (0, offset), "textcoords": "offset points", "ha": "center"}
                axis.annotate(text.format(value), (place, value), fontsize=12, bbox=BOX, **where)
    unit = f"{group.points[0].unit}s"
    axes[0].set(xlabel=unit, ylabel="speed-up in rows/s (x)", title=f"{group.name}: speed-up")
    axes[1].set(xlabel=unit, ylabel="efficiency (% of ideal)", title=f"{group.name}: efficiency")
    axes[1].set_ylim(0, max(115, *(1.15 * (point.efficiency or 0) for point in points)))
    axes[0].set_ylim(bottom=0)
    for axis, place in zip(axes, ("upper left", "lower left"), strict=True):
        axis.set_xticks(ranks)
        axis.margins(x=0.12)
        axis.legend(fontsize=12, loc=place)
    return figure


def draw_throughput(group: Group) -> Any:
    """Draw the rows per second of each point."""
    figure, [axis] = _make_panels(1, max(7.5, 1.6 * len(group.points)))
    colours = {"one rank": "0.45", "strong": COLOURS[0], "weak": COLOURS[1], "unpaired": COLOURS[4]}
    values = [point.number("rows_per_second") for point in group.points]
    chosen = [colours[point.mode] for point in group.points]
    bars = axis.bar(range(len(values)), values, 0.65, color=chosen)
    axis.bar_label(bars, [f"{value:,.0f}" for value in values], padding=3, fontsize=12)
    _name_bars(axis, group.points)
    axis.set_ylim(0, 1.12 * max(values))
    axis.set(ylabel="throughput (rows/s)", title=f"{group.name}: throughput")
    axis.grid(axis="x", visible=False)
    return figure


def draw_accuracy(group: Group) -> Any:
    """Draw the validation accuracy by epoch: more ranks must not cost any."""
    if not any(record.accuracy for point in group.points for record in point.records):
        return None
    figure, [axis] = _make_panels(1, 8.5)
    for i, values, label in _list_curves(group, "accuracy"):
        # Curves should lie on each other, and the lower one still show.
        style = {"linewidth": max(1.5, 7 - 2 * i), "markersize": max(4, 14 - 3 * i)}
        style |= {"color": COLOURS[i % 8], "marker": MARKERS[i % 8]}
        axis.plot(range(1, len(values) + 1), values, label=label, **style)
    axis.set(xlabel="epoch", ylabel="validation accuracy (%)", title=f"{group.name}: accuracy")
    _finish_epochs(axis, group, "accuracy")
    return figure


def _make_panels(count: int, width: float) -> tuple[Any, list[Any]]:
    """Return a figure with `count` axes side by side, each `width` inches wide."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width * count, 6), layout="constrained")
    return figure, list(figure.subplots(1, count, squeeze=False)[0])


def _list_curves(group: Group, name: str) -> Iterator[tuple[int, list[float], str | None]]:
    """Yield the number of the point, the values by epoch and the legend of each record that has
    them; one record of a point has a legend.
    """
    for i, point in enumerate(group.points):
        mode = (f", {point.mode}" if point.mode in ("strong", "weak") else "") + point.hook
        label = f"{point.ranks} {point.unit}{'s' * (point.ranks > 1)}{mode}"
        label += f"\n({point.batch_rows} rows a step)"
        having = [values for record in point.records if (values := getattr(record, name))]
        for number, values in enumerate(having):
            yield i, values, None if number else label


def _finish_epochs(axis: Any, group: Group, name: str) -> None:
    longest = max(len(getattr(r, name)) for point in group.points for r in point.records)
    axis.set_xlim(0.5, longest + 0.5)
    axis.xaxis.get_major_locator().set_params(integer=True)
    axis.legend(fontsize=11)


def _name_bars(axis: Any, points: list[Point]) -> None:
    def named(point: Point) -> str:
        mode = f"{point.mode}{point.hook}" if point.mode in ("strong", "weak") else ""
        return f"{point.ranks}\n{point.batch_rows} rows\n{mode}"

    axis.set_xticks(range(len(points)), [named(point) for point in points], fontsize=12)
    axis.set_xlabel(f"{points[0].unit}s, rows of a step")


def _list_lines(group: Group) -> dict[str, list[Point]]:
    """Return the points by what a line of them is called, the one rank first; nothing where no two
    points compare.
    """
    alone = {point.batch_rows: point for point in group.points if point.ranks == 1}
    lines: dict[str, list[Point]] = {}
    for point in group.points:
        if point.mode == "strong":
            name, base = f"strong, {point.batch_rows} rows in all", alone[point.batch_rows]
        elif point.mode == "weak":
            base = alone[point.batch_rows // point.ranks]
            name = f"weak, {base.batch_rows} rows a rank"
        else:
            continue
        lines.setdefault(name + point.hook, [base]).append(point)
    return lines
