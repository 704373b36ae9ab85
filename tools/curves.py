"""Curves of several runs in one picture, an SVG file for the docs.

    python -m tools.curves --out=docs/images/ablations.svg --title="Success in training" \\
        "GRPO=runs/grpo" "without the KL term=runs/no_kl"

Reads metrics.jsonl of every workdir; `--x` counts steps, episodes or minutes of training. The
drawing is that of uirl_jax.watch.charts: from 12 points on a running mean over a faint line.
"""

import argparse
import itertools
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2

from tools import command_line
from uirl_jax.errors import ConfigError
from uirl_jax.store.files import write_atomically
from uirl_jax.watch import charts

COLORS = ("#2a5db0", "#b3541e", "#2f7d4f", "#8a3ea8", "#b0273d", "#54616f", "#9a7d0a", "#16818c")
LEGEND_PX, LEGEND_COLUMNS = 16, 2

_TEMPLATE = """\
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {{ width }} {{ height }}" \
font-family="sans-serif" font-size="11" role="img" aria-label="{{ plot.description }}">
<rect width="100%" height="100%" fill="#ffffff"/>
<text x="{{ left }}" y="16" font-size="13" font-weight="bold" fill="#1c1f26">{{ plot.title }}</text>
{% for line in plot.lines %}
<rect x="{{ left + loop.index0 % columns * column }}" y="{{ 25 + loop.index0 // columns * row }}" \
width="12" height="8" rx="2" fill="{{ colors[loop.index0 % colors|length] }}"/>
<text x="{{ left + 17 + loop.index0 % columns * column }}" \
y="{{ 33 + loop.index0 // columns * row }}" fill="#454b57">{{ line.label }} {{ line.last }}</text>
{% endfor %}
<g transform="translate(0 {{ top }})">
{% for tick in plot.y_ticks %}
<line x1="{{ left }}" x2="{{ right }}" y1="{{ tick.at|round(1) }}" y2="{{ tick.at|round(1) }}" \
stroke="#e3e6ec"/>
<text x="{{ left - 7 }}" y="{{ (tick.at + 3.8)|round(1) }}" text-anchor="end" fill="#5b6371">\
{{ tick.text }}</text>
{% endfor %}
{% for tick in plot.x_ticks %}
<text x="{{ tick.at|round(1) }}" y="{{ chart_height - 8 }}" text-anchor="middle" fill="#5b6371">\
{{ tick.text }}</text>
{% endfor %}
<text x="{{ right }}" y="{{ chart_height + 5 }}" text-anchor="end" fill="#5b6371">{{ x }}</text>
{% for line in plot.lines %}
{% set color = colors[loop.index0 % colors|length] %}
{% if line.raw_path %}
<path d="{{ line.raw_path }}" fill="none" stroke="{{ color }}" opacity="0.25"/>
{% endif %}
<path d="{{ line.path }}" fill="none" stroke="{{ color }}" stroke-width="2" \
stroke-linejoin="round"/>
{% endfor %}
</g>
</svg>
"""


def read_points(workdir: Path, metric: str, x: str) -> tuple[tuple[float, float], ...]:
    """(x, value) of every step of a run. Raises ConfigError where there is none."""
    path = workdir / "metrics.jsonl"
    try:
        rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: no metrics of a run ({error})") from error
    points = [
        (at, float(row[metric]))
        for at, row in zip(_places(path, rows, x), rows, strict=True)
        if metric in row
    ]
    if not points:
        known = sorted({name for row in rows for name in row if "/" in name})
        raise ConfigError(f"{path}: no {metric!r}; it has {', '.join(known) or 'nothing'}")
    return tuple(points)


def _places(path: Path, rows: Sequence[Mapping[str, Any]], x: str) -> list[float]:
    name = {"steps": "step", "episodes": "records/trained", "minutes": "time/step_s"}[x]
    # The line of step 0 has the evaluation of the base, and no step's values.
    if not all(name in row for row in rows if row.get("step")):
        raise ConfigError(f"{path}: --x={x} needs {name!r} in every line")
    values = [float(row.get(name, 0.0)) for row in rows]
    if x == "minutes":  # of training alone: a run may have rested between two processes
        return [s / 60 for s in itertools.accumulate(values)]
    return values


def draw(title: str, series: Sequence[charts.Series], *, unit: str, x: str) -> str:
    """The SVG file's text."""
    plot = charts.line_chart(
        title, series, unit=unit, full_share=unit == "%", x=x.removesuffix("s")
    )
    legend = 30 + -(-len(series) // LEGEND_COLUMNS) * LEGEND_PX
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    return environment.from_string(_TEMPLATE).render(
        plot=plot,
        x=x,
        colors=COLORS,
        columns=LEGEND_COLUMNS,
        column=(charts.WIDTH - charts.LEFT) / LEGEND_COLUMNS,
        row=LEGEND_PX,
        left=charts.LEFT,
        right=charts.WIDTH - charts.RIGHT,
        top=legend,
        width=charts.WIDTH,
        height=charts.HEIGHT + legend + 10,
        chart_height=charts.HEIGHT,
    )


@command_line.one_line_errors()
def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", nargs="+", metavar="LABEL=WORKDIR")
    parser.add_argument("--out", type=Path, required=True, help="the SVG file")
    parser.add_argument("--metric", default="success/mean", help="of metrics.jsonl")
    parser.add_argument("--title", default="Success in training")
    parser.add_argument("--unit", default="%", help="%% shows shares as per cent")
    parser.add_argument("--x", choices=("steps", "episodes", "minutes"), default="steps")
    args = parser.parse_args(argv)
    series = []
    for run in args.runs:
        label, equals, workdir = run.rpartition("=")
        if not equals or not label:
            raise ConfigError(f"{run!r}: expected LABEL=WORKDIR")
        series.append(charts.Series(label, read_points(Path(workdir), args.metric, args.x)))
    args.out.parent.mkdir(parents=True, exist_ok=True)
    svg = draw(args.title, series, unit=args.unit, x=args.x)
    write_atomically(args.out, svg.encode())
    print(args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
