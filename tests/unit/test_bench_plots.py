"""Pictures of a run: they are there, they are pictures, and the page needs nothing besides itself."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from pdq.bench import plots
from pdq.bench.metrics import summarise
from pdq.bench.records import Record

PNG = b"\x89PNG\r\n\x1a\n"
DONE = Record(planned_s=0, sent_s=0.1, end_s=2.1, input_tokens=9, output_tokens=3, chunks=((0.5, 1), (1, 1), (2, 1)))
FAILED = Record(planned_s=1, sent_s=1, end_s=1.5, input_tokens=9, error="queue_full")
WARM_UP = Record(planned_s=0, sent_s=0, end_s=9, input_tokens=9, warm_up=True)


@pytest.mark.parametrize("records", [[DONE, FAILED, WARM_UP], [FAILED], []])
def test_a_run_is_drawn_whatever_came_of_it(tmp_path: Path, records: list[Record]) -> None:
    slos = {"ttft": 400.0}
    made = plots.write(tmp_path / "plots", records, summarise(records, slos), slos)
    assert [path.name for path in made] == ["ttft.png", "itl.png", "timeline.png", "index.html"]
    assert all(path.read_bytes().startswith(PNG) for path in made[:-1])
    page = made[-1].read_text("utf-8")
    assert page.count("data:image/png;base64,") == 3
    assert not re.search(r'(src|href)="(?!data:)', page)
    assert f"Failed requests:                         {records.count(FAILED)}\n" in page
