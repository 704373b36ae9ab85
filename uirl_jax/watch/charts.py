"""Geometry of the report's charts: numbers in, coordinates and tick labels out.

`draw` selects the charts, its template renders them as inline SVG. This module has no metric names
and writes no markup, so that all escaping is done by the template.
"""

import dataclasses
import itertools
import math
from collections.abc import Sequence

WIDTH, HEIGHT = 360.0, 176.0  # of a chart's viewBox; about CSS pixels on a phone
LEFT, RIGHT, TOP, BOTTOM = 46.0, 10.0, 10.0, 24.0
MAX_POINTS = 300  # longer series are averaged in bins; a chart has about as many pixels
SMOOTHED_FROM = 12  # shorter series are drawn as they are
TOOLTIPS_UP_TO = 120


@dataclasses.dataclass(frozen=True)
class Series:
    label: str
    points: tuple[tuple[float, float], ...]  # (step, value), steps ascending, at least one


@dataclasses.dataclass(frozen=True)
class Tick:
    at: float  # in the viewBox, along its own axis
    text: str


@dataclasses.dataclass(frozen=True)
class Dot:
    x: float
    y: float
    text: str


@dataclasses.dataclass(frozen=True)
class Line:
    label: str
    path: str  # SVG path data: a line, or a closed area where the chart is stacked
    raw_path: str  # the unsmoothed line, drawn faintly; "" without smoothing
    dots: tuple[Dot, ...]
    last: str  # the last value as text; for a stacked area its own height


@dataclasses.dataclass(frozen=True)
class Chart:
    title: str
    description: str  # the chart in words, for screen readers
    smoothed_over: int  # points of each running mean; 1: no smoothing
    stacked: bool
    lines: tuple[Line, ...]
    x_ticks: tuple[Tick, ...]
    y_ticks: tuple[Tick, ...]


def line_chart(
    title: str,
    series: Sequence[Series],
    *,
    unit: str = "",
    stacked: bool = False,
    from_zero: bool = False,
    full_share: bool = False,
    x: str = "step",
) -> Chart:
    """Lays out one chart.

    Args:
        series: at least one, each with at least one point.
        unit: "%" shows shares as per cent; any other unit is appended to the number ("s").
        stacked: stacked areas instead of lines; all series must have the same steps.
        from_zero: the axis includes zero, as needed where lengths show quantities.
        full_share: the axis is 0 to 1, whatever the values are.
        x: name of the points' x value in texts.
    """
    binned = [dataclasses.replace(line, points=_bins(line.points)) for line in series]
    if stacked:
        drawn = _cumulated(binned)
        window = 1
    else:
        window = _window(max(len(line.points) for line in binned))
        drawn = [
            dataclasses.replace(line, points=_running_mean(line.points, window)) for line in binned
        ]
    values = [value for line in (*binned, *drawn) for _, value in line.points]
    low, high, step = _axis(min(values), max(values), from_zero or stacked)
    if full_share:
        low, high, step = 0.0, 1.0, 0.25
    steps = [at for line in binned for at, _ in line.points]
    first, last = min(steps), max(steps)

    def to_x(at: float) -> float:
        share = (at - first) / (last - first) if last > first else 0.5
        return LEFT + share * (WIDTH - LEFT - RIGHT)

    def to_y(value: float) -> float:
        return HEIGHT - BOTTOM - (value - low) / (high - low) * (HEIGHT - TOP - BOTTOM)

    def path(points: Sequence[tuple[float, float]]) -> str:
        return "M" + "L".join(f"{to_x(at):.1f} {to_y(value):.1f}" for at, value in points)

    lines = []
    below: Sequence[tuple[float, float]] = [(at, 0.0) for at, _ in drawn[0].points]
    for raw, smooth in zip(binned, drawn, strict=True):
        shape = path(smooth.points)
        if stacked:
            shape += "L" + path(list(reversed(below)))[1:] + "Z"
            below = smooth.points
        dots = (
            Dot(to_x(at), to_y(top), f"{raw.label}, {x} {at:.0f}: {format_value(v, unit)}")
            for (at, v), (_, top) in zip(
                raw.points, smooth.points if stacked else raw.points, strict=True
            )
        )
        lines.append(
            Line(
                raw.label,
                shape,
                path(raw.points) if window > 1 else "",
                tuple(dots) if len(raw.points) <= TOOLTIPS_UP_TO else (),
                format_value((raw if stacked else smooth).points[-1][1], unit),
            )
        )
    return Chart(
        title=title,
        description=f"{title}. " + " ".join(_describe(line, unit, x) for line in binned),
        smoothed_over=window,
        stacked=stacked,
        lines=tuple(lines),
        x_ticks=tuple(Tick(to_x(at), f"{at:.0f}") for at in _step_ticks(first, last)),
        y_ticks=tuple(
            Tick(to_y(low + k * step), format_value(low + k * step, unit, step))
            for k in range(round((high - low) / step) + 1)
        ),
    )


def _describe(series: Series, unit: str, x: str) -> str:
    values = [value for _, value in series.points]
    return (
        f"{series.label}: {format_value(values[0], unit)} at {x} {series.points[0][0]:.0f}, "
        f"{format_value(values[-1], unit)} at {x} {series.points[-1][0]:.0f}, between "
        f"{format_value(min(values), unit)} and {format_value(max(values), unit)}."
    )


def _bins(points: Sequence[tuple[float, float]]) -> tuple[tuple[float, float], ...]:
    """At most MAX_POINTS points, each the mean of its bin at the bin's last step."""
    if len(points) <= MAX_POINTS:
        return tuple(points)
    edges = [round(k * len(points) / MAX_POINTS) for k in range(MAX_POINTS + 1)]
    return tuple(
        (points[stop - 1][0], sum(value for _, value in points[start:stop]) / (stop - start))
        for start, stop in itertools.pairwise(edges)
    )


def _window(count: int) -> int:
    return 1 if count < SMOOTHED_FROM else max(3, count // 12)


def _running_mean(
    points: Sequence[tuple[float, float]], window: int
) -> tuple[tuple[float, float], ...]:
    """The mean of the last `window` values, or of all values so far if there are fewer."""
    result = []
    for idx, (at, _) in enumerate(points):
        recent = [value for _, value in points[max(0, idx - window + 1) : idx + 1]]
        result.append((at, sum(recent) / len(recent)))
    return tuple(result)


def _cumulated(series: Sequence[Series]) -> list[Series]:
    total = [0.0] * len(series[0].points)
    result = []
    for line in series:
        total = [below + value for below, (_, value) in zip(total, line.points, strict=True)]
        steps = [at for at, _ in line.points]
        result.append(dataclasses.replace(line, points=tuple(zip(steps, total, strict=True))))
    return result


def _axis(low: float, high: float, from_zero: bool) -> tuple[float, float, float]:
    """(low, high, step) with round steps around the values: three to six ticks."""
    if from_zero:
        low, high = min(low, 0.0), max(high, 0.0)
    if high - low <= 1e-12 * max(abs(low), abs(high)):
        pad = abs(high) / 2 or 0.5
        low, high = (0.0, 2 * pad) if from_zero else (low - pad, high + pad)
    step = nice_step((high - low) / 4)
    return math.floor(low / step + 1e-9) * step, math.ceil(high / step - 1e-9) * step, step


def nice_step(rough: float) -> float:
    """The smallest of 1, 2, 2.5, 5 times a power of ten that is at least `rough` (> 0)."""
    power = 10.0 ** math.floor(math.log10(rough))
    return next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= rough * (1 - 1e-9))


def _step_ticks(first: float, last: float) -> list[float]:
    step = max(1, math.ceil(nice_step(max(last - first, 1.0) / 4)))  # steps are integers
    inner = [float(at) for at in range(math.ceil(first / step) * step, int(last) + 1, step)]
    return inner or [first]


def format_value(value: float, unit: str = "", step: float | None = None) -> str:
    """A number as text: `41.2 %`, `1,520`, `0.0031`, `2.5 s`.

    Args: step: of an axis, so that all its labels have the same number of decimals.
    """
    shown = value * 100 if unit == "%" else value
    if step is not None:
        grain = step * 100 if unit == "%" else step
        decimals = 0
        while decimals < 9 and abs(round(grain, decimals) - grain) > 1e-6 * grain:
            decimals += 1
    elif shown == 0 or abs(shown) >= 100:
        decimals = 0
    else:
        decimals = max(0, 2 - math.floor(math.log10(abs(shown))))
        decimals = min(decimals, 1) if unit == "%" and abs(shown) >= 1 else decimals
    form = ".1e" if decimals > 6 or abs(shown) >= 1e7 else f",.{decimals}f"
    text = f"{shown:{form}}"
    text = text.replace("-", "\N{MINUS SIGN}")
    return f"{text}\N{NO-BREAK SPACE}{unit}" if unit else text
