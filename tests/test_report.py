"""The report: everything in one file, every plot drawn, refusals that name what differs."""

import base64
import copy
import functools
import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_metrics import many, method, record, text

from ready_jax.serve import plots, published, report, summary
from ready_jax.serve.grade import Grade

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
SETS = {
    name: dict(in_file=20, used=12, longest=99, prompts_sha256="0" * 64, first_prompt="<user>")
    for name in ("gsm8k", "mbpp")
}


@functools.cache
def numbers() -> dict[str, Any]:
    """Of three methods on two sets, one of them graded."""
    rows = many()
    for row in rows:
        row["methods"] = {
            "autoregressive": row["methods"]["autoregressive"], "dspark": row["methods"]["a"],
            "ready": row["methods"]["b"],
        }  # fmt: skip
    grades = {("gsm8k", f"gsm8k-{i}", "ready"): Grade("correct", "1") for i in range(12)}
    return summary.summary(rows, grades)


def evaluated(**changes: Any) -> dict[str, Any]:
    """A finished evaluation."""
    conditions = dict(
        model="nano", dtype="bfloat16", enable_thinking=False, temperature=0.0, max_new_tokens=36, batch_size=1,
        prompt_tokens=None, target_sha256={"model.safetensors": "1" * 64}, benchmarks=SETS,
        methods=dict(autoregressive={}, dspark={"model.safetensors": "2" * 64}, ready={"model.safetensors": "3" * 64}),
    )  # fmt: skip
    seconds = dict(load=1.0, compile=2.0, warm_up=0.5, decode=9.0, grade=0.1)
    budget = dict(seconds=seconds, device_peak_bytes=2**30, device_limit_bytes=2**37, host_peak_bytes=2**31)
    run = dict(
        device="gpu", device_kind="NVIDIA H200", devices=1, versions={"jax": "0.11.2"}, commit="abc", budget=budget
    )
    return dict(conditions=conditions | changes, run=run, complete=True) | copy.deepcopy(numbers())


class Reading(HTMLParser):
    """Tags in order, the images' sources, and the text."""

    def __init__(self, page: str):
        super().__init__()
        self.open: list[str] = []
        self.sources: list[str] = []
        self.links: list[str] = []
        self.words = ""
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        found = dict(attrs)
        if tag == "img":
            self.sources.append(found["src"] or "")
        elif tag != "meta":
            self.open.append(tag)
        self.links += [value or "" for name, value in attrs if name in ("href", "src")]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.words += data + "\n"


@pytest.fixture(scope="module")
def page() -> str:
    return report.page(evaluated()).html()


def test_the_page_needs_no_other_file_and_is_well_formed(page):
    read = Reading(page)
    assert read.open == []
    assert len(read.sources) == 5
    assert all(link.startswith("data:image/svg+xml;base64,") for link in read.links)
    assert "<script" not in page


def test_every_plot_holds_every_method_in_its_colour(page):
    for source in Reading(page).sources:
        drawing = base64.b64decode(source.split(",")[1]).decode().lower()
        assert drawing.startswith("<?xml")
        for name in plots.COLOURS[1:3]:
            assert name.lower() in drawing


def test_the_page_says_what_was_measured(page):
    words = Reading(page).words
    assert "nano, 1 x NVIDIA H200, bfloat16, batch 1 per device, greedy, thinking off, at most 36 new tokens" in words
    assert "says nothing about the 27B model" in words
    assert "budget: device peak 1.00 of 128.0 GiB" in words
    assert "302.78" in words
    assert published.CONDITIONS in words
    assert "ready over dspark" in words
    assert "0 texts differ" in words
    assert re.search(r"\+\d+\.\d\d % \[\+", words)


def test_markdown_has_the_same_tables():
    made = report.page(evaluated())
    text = made.markdown()
    assert [line[3:] for line in text.splitlines() if line.startswith("## ")] == [table.title for table in made.tables]
    for table in made.tables:
        assert all(len(row) == len(table.columns) for row in table.rows)


def test_equal_runs_give_equal_files(page):
    assert report.page(evaluated()).html() == page


def test_texts_are_escaped_and_differences_shown():
    rows = [record(0, text(9), d=method([1] * 4, tokens=[*text(8), 5], margin=0.01))]
    rows[0]["id"] = "<script>alert(1)</script>"
    found = evaluated(benchmarks={"gsm8k": SETS["gsm8k"]}) | summary.summary(rows)
    page = report.page(found).html()
    assert "<script>" not in page
    assert "&lt;script&gt;alert(1)" in page
    assert "0.0100" in page


def test_one_method_alone_has_tables_and_no_plots():
    found = evaluated() | summary.summary([record(0, text(9))])
    assert report.page(found).figures == {}


def test_an_unfinished_evaluation_is_refused(tmp_path, capsys):
    file = tmp_path / "x.json"
    file.write_text(json.dumps(evaluated() | {"complete": False}))
    assert report.main([str(file)]) == 1
    assert "goes on where it stopped" in capsys.readouterr().err


# Two runs


def test_runs_under_other_conditions_are_not_compared(tmp_path, capsys):
    """Field case F03: records that differ in the thinking flag."""
    first, second = evaluated(), evaluated(enable_thinking=True)
    second["run"] = second["run"] | {"device_kind": "cpu"}
    with pytest.raises(
        ValueError, match=r"enable_thinking: false and true\n  device_kind: \"NVIDIA H200\" and \"cpu\""
    ):
        report.compare(first, second)
    files = [tmp_path / "a.json", tmp_path / "b.json"]
    for file, found in zip(files, (first, second), strict=True):
        file.write_text(json.dumps(found))
    assert report.main(["compare", *map(str, files)]) == 1
    assert "enable_thinking" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["max_new_tokens", "batch_size", "dtype", "prompt_tokens", "target_sha256"])
def test_every_condition_counts(name):
    with pytest.raises(ValueError, match=name):
        report.compare(evaluated(), evaluated(**{name: "other"}))


def test_drafters_and_commits_may_differ(tmp_path, capsys):
    first, second = evaluated(), copy.deepcopy(evaluated())
    second["conditions"]["methods"]["ready"] = {"model.safetensors": "4" * 64}
    second["run"]["commit"] = "def"
    second["overall"]["ready"]["acceptance_length"] = first["overall"]["ready"]["acceptance_length"] * 1.1
    text = report.compare(first, second).markdown()
    assert "+10.00 %" in text
    assert "| commit | abc | def |" in text
    assert "4444" in text
    file = tmp_path / "a.json"
    file.write_text(json.dumps(first))
    assert report.main(["compare", str(file), str(file)]) == 0
    assert "# a and a" in capsys.readouterr().out


# In a browser


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine: the structure of the page is tested above")
def test_the_page_opens_in_chromium_with_all_plots_drawn(page, tmp_path: Path):
    from PIL import Image

    file = tmp_path / "report.html"
    probe = """<script>
        const seen = (image) => ` ${image.complete && image.naturalWidth > 100}@${Math.round(image.offsetTop)}`;
        addEventListener("load", () => { document.title += [...document.images].map(seen).join("") });
    </script>"""
    file.write_text(page.replace("</body>", probe + "</body>"))
    command = [
        str(CHROMIUM),
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--hide-scrollbars",
        "--window-size=1200,5000",
    ]
    command += [f"--user-data-dir={tmp_path / 'profile'}", "--force-device-scale-factor=1"]
    options: dict[str, Any] = dict(capture_output=True, text=True, timeout=60, check=True)
    found = subprocess.run([*command, "--dump-dom", file.as_uri()], **options).stdout
    places = re.findall(r" (true|false)@(\d+)", (re.search(r"<title>(.*?)</title>", found) or [""])[0])
    assert [drawn for drawn, _ in places] == ["true"] * 5
    subprocess.run([*command, f"--screenshot={tmp_path / 'page.png'}", file.as_uri()], **options)
    pixels = np.asarray(Image.open(tmp_path / "page.png").convert("RGB")).astype(int)
    for colour in plots.COLOURS[1:3]:
        wanted = np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)])
        row = np.flatnonzero((np.abs(pixels - wanted).max(axis=-1) < 12).any(axis=1))
        for _, top in places:
            assert ((row >= int(top)) & (row < int(top) + 500)).any(), f"{colour} is missing in the plot at {top}"
