"""docs/benchmarks.md says what the kept figures say, and that the others are not there."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest

from tests.bench import claims, page, plots, publish, result
from tests.bench.result import Machine, Result
from tests.bench.sections import SECTIONS
from tests.unit.bench_figures import FIGURES

SLOW = """
import pathlib, time
try:
    time.sleep(60)
finally:
    pathlib.Path(__file__).with_name("ended").touch()
"""
MACHINE = Machine(cpu="A CPU", cores=3, memory_gib=7.5, system="Linux 6", python="3.11.1", parts={"nats-py": "2"})


def kept(directory: Path, figures: object, benchmark: str = "streams") -> None:
    made = Result(
        benchmark=benchmark,
        command=SECTIONS[benchmark].shown,
        commit="0123456789",
        changed=True,
        date="2026-11-30 01:02 UTC",
        took_s=600.0,
        load_before=0.25,
        load_after=1.5,
        machine=MACHINE,
        figures=msgspec.Raw(msgspec.json.encode(figures)),
    )
    result.save(made, directory)


def test_the_page_is_what_the_kept_figures_make_it() -> None:
    assert page.render(page.load()) == page.PAGE.read_text("utf-8"), "make benchmarks-page"


def test_every_plot_of_the_page_is_there() -> None:
    named = re.findall(r"!\[.+?\]\((benchmarks/\w+\.svg)\)", page.PAGE.read_text("utf-8"))
    assert [name for name in named if not (page.PAGE.parent / name).is_file()] == []


def test_what_was_not_run_is_told(tmp_path: Path) -> None:
    text = page.render(page.load(tmp_path))
    for name, section in SECTIONS.items():
        _, _, below = text.partition(f"\n## {section.title}\n")
        assert f"*It was not run. `make benchmarks ONLY={name}` runs it.*" in below.partition("\n## ")[0], name
    assert "Nothing was run" in text
    assert {claim.found for claim in claims.claims({})} == {None}


def test_figures_stand_in_their_section_with_what_they_are_figures_of(tmp_path: Path) -> None:
    kept(tmp_path, FIGURES["streams"])
    text = page.render(page.load(tmp_path))
    section = text.partition("\n## A thousand streams\n")[2].partition("\n## ")[0]
    said = ("at 0123456789 with changes", "A CPU; load 0.25")
    for figure in ("7 streams", "1,433", "6,789", "147", "1.25 / 9.50 ms", *said):
        assert figure in section, figure
    assert "A CPU, 3 cores" in text and "Nothing was run" not in text


@pytest.mark.parametrize("name", FIGURES)
def test_every_benchmark_has_its_section_its_claims_and_its_plots(name: str, tmp_path: Path) -> None:
    kept(tmp_path, FIGURES[name], name)
    runs = page.load(tmp_path)
    plots.write(runs, tmp_path)
    text = page.render(runs)
    section = text.partition(f"\n## {SECTIONS[name].title}\n")[2].partition("\n## ")[0]
    assert "with changes" in section and f"ONLY={name}" not in text
    assert all(claim.met is not None for claim in claims.MADE.get(name, claims.nothing)(FIGURES[name]))
    named = set(re.findall(r"!\[.+?\]\(benchmarks/(\w+\.svg)\)", text))
    assert (
        named
        == {path.name for path in tmp_path.glob("*.svg")}
        == {f"{each}.svg" for each, plot in plots.PLOTS.items() if plot.benchmark == name}
    )


def test_figures_of_another_version_of_a_benchmark_are_not_shown(tmp_path: Path) -> None:
    kept(tmp_path, {"streams": 7})
    assert "another version of it. `make benchmarks ONLY=streams` runs it" in page.render(page.load(tmp_path))


def test_plots_without_figures_are_removed(tmp_path: Path) -> None:
    for name in plots.PLOTS:
        (tmp_path / f"{name}.svg").touch()
    plots.write(page.load(tmp_path), tmp_path)
    assert list(tmp_path.glob("*.svg")) == []


def test_what_a_benchmark_prints_is_kept_with_what_was_run(tmp_path: Path) -> None:
    (printed := tmp_path / "printed.json").write_bytes(msgspec.json.encode(FIGURES["streams"]))
    section = SECTIONS["streams"]._replace(command=f"json.tool {printed}").asked(["--indent", "1"])
    found = publish.run(section, publish.Given(["--sort-keys"], ["code=trace.csv"]))
    assert found is not None and found.command == f"python -m json.tool {printed} --indent 1 code=trace.csv"
    result.save(found, tmp_path)
    run = page.load(tmp_path)["streams"]
    assert isinstance(run, page.Run) and run.figures == FIGURES["streams"]


@pytest.mark.parametrize(
    ("command", "told"),
    [("json.tool nowhere", "exit status"), ("this", "malformed"), ("json.tool --json-lines /dev/null", "truncated")],
)
def test_a_benchmark_that_fails_leaves_nothing_and_says_why(
    command: str, told: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert publish.run(SECTIONS["streams"]._replace(command=command), publish.Given([], [])) is None
    said = capfd.readouterr().err.splitlines()[-1]
    assert said.startswith("streams: failed:") and told in said


def test_a_benchmark_that_takes_too_long_may_end_in_order(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "slow.py").write_text(SLOW)
    section = SECTIONS["streams"]._replace(
        command=f"cProfile -o {tmp_path / 'profile'} {tmp_path / 'slow.py'}", most_s=2.0
    )
    assert publish.run(section, publish.Given([], [])) is None
    assert "timed out" in capfd.readouterr().err
    assert (tmp_path / "ended").exists()
