"""Charts as files: the theme for slides has larger texts and wider charts, of the same numbers."""

from __future__ import annotations

import re

import pandas as pd
import pytest

from mlhpc.analysis.drawing.charts import BLUE, build_specification, draw_result_panels, draw_stacked_bars
from mlhpc.analysis.page.pictures import encode_chart


@pytest.mark.parametrize("sizes", [("mini",), ("mini", "full")])
def test_slides_have_larger_texts_and_wider_charts(sizes: tuple[str, ...]) -> None:
    rows = [
        {"benchmark": "oc20", "size": size, "label": f"{size} {at}", "share [%]": 10.0 * at}
        for size in sizes
        for at in (1, 2)
    ]
    table = pd.DataFrame(rows)
    drawn = build_specification(
        draw_result_panels(table, lambda part: draw_stacked_bars(part, {"share [%]": BLUE}, "share"))
    )
    page, slides = (encode_chart(drawn, "svg", theme).decode() for theme in ("page", "slides"))
    widths = [float(re.search(r'<svg[^>]* width="([\d.]+)"', svg)[1]) for svg in (page, slides)]  # type: ignore[index]
    assert 1.15 < widths[1] / widths[0] < 1.6
    largest = [max(map(float, re.findall(r'font-size="([\d.]+)px"', svg))) for svg in (page, slides)]
    assert largest[1] / largest[0] == pytest.approx(1.6, abs=0.05)
    texts = [re.findall(r"<text[^>]*>([^<]*)<", svg) for svg in (page, slides)]
    assert set(map(str, sizes)) <= {word for text in texts[1] for word in text.split()}
    labels = sorted(row["label"] for row in rows)
    assert [sorted(set(text) & set(labels)) for text in texts] == [labels, labels]
