"""Curves of several runs as one SVG file."""

import json
import xml.etree.ElementTree as ET

import pytest

from tools import curves
from uirl_jax.errors import ConfigError


def write_run(workdir, values):
    workdir.mkdir()
    rows = [
        {"step": n, "records/trained": 32.0 * n, "time/step_s": 30.0, "success/mean": value}
        for n, value in enumerate(values, start=1)
    ]
    workdir.joinpath("metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return workdir


@pytest.mark.parametrize(("x", "last"), [("steps", 5.0), ("episodes", 160.0), ("minutes", 2.5)])
def test_points_are_placed_by_what_was_asked_for(tmp_path, x, last):
    workdir = write_run(tmp_path / "run", [0.1, 0.2, 0.4, 0.8, 1.0])
    points = curves.read_points(workdir, "success/mean", x)
    assert points[-1] == (last, 1.0)
    assert [value for _, value in points] == [0.1, 0.2, 0.4, 0.8, 1.0]


@pytest.mark.parametrize(
    ("x", "name"), [("episodes", "records/trained"), ("minutes", "time/step_s")]
)
def test_run_that_counts_neither_episodes_nor_time_has_no_curve_over_them(tmp_path, x, name):
    """As the metrics of a cold start."""
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "learner/loss": 2.0}\n')
    assert curves.read_points(tmp_path, "learner/loss", "steps") == ((1.0, 2.0),)
    with pytest.raises(ConfigError, match=f"--x={x} needs '{name}'"):
        curves.read_points(tmp_path, "learner/loss", x)


def test_picture_names_every_run_and_is_xml(tmp_path, capsys):
    one = write_run(tmp_path / "one", [0.25, 0.5])
    two = write_run(tmp_path / "two", [0.75, 0.625])
    out = tmp_path / "images" / "figure.svg"
    assert curves.main([f"--out={out}", f"a < b={one}", f"second={two}"]) == 0
    texts = [element.text for element in ET.parse(out).iter("{http://www.w3.org/2000/svg}text")]
    assert "a < b 50.0\xa0%" in texts and "second 62.5\xa0%" in texts
    assert capsys.readouterr().out.strip() == str(out)


@pytest.mark.parametrize(
    ("x", "ends"), [("steps", "step 2"), ("episodes", "episode 64"), ("minutes", "minute 1")]
)
def test_picture_says_in_words_where_its_curves_end(tmp_path, x, ends):
    workdir = write_run(tmp_path / "run", [0.25, 0.5])
    out = tmp_path / "figure.svg"
    assert curves.main([f"--out={out}", f"--x={x}", f"one={workdir}"]) == 0
    assert f"50.0\xa0% at {ends}, between" in ET.parse(out).getroot().get("aria-label")


@pytest.mark.parametrize(
    ("run", "metric", "said"),
    [
        ("nothing", "success/mean", "expected LABEL=WORKDIR"),
        ("a=/nowhere", "success/mean", "no metrics of a run"),
        ("a={run}", "success/men", "no 'success/men'; it has records/trained, success/mean"),
    ],
)
def test_mistake_is_one_line(tmp_path, capsys, run, metric, said):
    workdir = write_run(tmp_path / "run", [0.5])
    out = tmp_path / "figure.svg"
    arguments = [f"--out={out}", f"--metric={metric}", run.format(run=workdir)]
    assert curves.main(arguments) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1 and said in error
    assert not out.exists()
