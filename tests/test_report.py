"""REPORT.md, README.md, the figures and the page agree with results/."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from harness.studies.ablation import available
from harness.studies.techniques import SHIPPED
from report import markdown
from report.__main__ import PICTURES, documents
from report.blocks import BLOCKS, render
from report.charts import FIGURES, draw
from report.diagrams import DIAGRAMS
from report.model import constant_sources
from report.page import page, slug
from report.records import RESULTS, WRITERS, Records, named_cases
from report.score import measured_textbook
from report.style import MOST_BYTES

ROOT = Path(__file__).resolve().parent.parent
NUMBER = re.compile(r"-?\d+\.?\d*(?:e-?\d+)?")
NAMES = re.compile(r'(?:id|href|clip-path)="[^"]*"')  # made from coordinates
STEPS = [
    {"step": "two slots", "why": "the cube waits | for the vector cores", "predicted_gain": 1.5, "case": "P5",
     "ms_before": 100.0, "ms_after": 80.0, "kept": True},
    {"step": "wider tiles", "why": "fewer loads", "predicted_gain": "10 %", "case": "P5",
     "ms_before": 80.0, "ms_after": 90.0, "kept": False},
]  # fmt: skip
SAMPLES = {
    "forward_steps": STEPS,
    "backward_steps": {"steps": STEPS[:1]},
    "mutation": {
        "release": "1.1.0",
        "deleted": 10,
        "noticed": 9,
        "kernels": {"forward: k": {"deleted": 10, "noticed": 9, "proven": 1, "not_reached": 0}},
    },
    "schedules": {
        "schedules": ["timed", "cube-first"],
        "rows": [{"suite": "forward", "case": "F1", "release": "1.1.0", "fault": "race on UB"}],
    },
    "sensitivity": {
        "factors": {name: [0.5, 2.0] for name in ("L2 bandwidth", "scalar issue")},
        "unconstrained": ["L2 bandwidth"],
        "cases": {
            "P1": {"effects": {"L2 bandwidth": [1.4, 0.8], "scalar issue": [0.999, 1.001]}, "sources": "other"},
        },
    },
    "cuda": {
        "device": {"name": "a GPU"},
        "rows": [
            {"case": "P1", "status": "passed", "heads": 1024, "errors": 1e-3, "ms": 2.0, "sdpa_ms": 1.0, "ratio": 0.5},
            {"case": "compute-sanitizer memcheck", "status": "skipped", "errors": None, "message": "not on PATH"},
        ],
    },
    "tune": {
        "(128, 8, 1024, 128) causal": {
            "shape": {"z": 128, "h": 8, "n": 1024, "d": 128, "causal": True, "dtype": "fp16"},
            "rows": [{}, {}],
            "wrong": [{}],
            "best": [
                {"space": "pipeline", "settings": {"KG": 512}, "ms": 3.0, "shipped": False},
                {"space": "pipeline", "settings": {"KG": 1024}, "ms": 3.1, "shipped": True},
            ],
        }
    },
}


@pytest.fixture(scope="module")
def committed() -> Records:
    return Records()


@pytest.fixture(scope="module")
def pictures(committed) -> dict[str, str]:
    return draw(committed)


@pytest.fixture
def sampled(tmp_path) -> Records:
    """The committed results with every missing file filled by a sample."""
    for name in WRITERS:
        source = RESULTS / f"{name}.json"
        if name in SAMPLES:
            (tmp_path / f"{name}.json").write_text(json.dumps(SAMPLES[name]))
        elif source.is_file():
            shutil.copy(source, tmp_path)
    return Records(tmp_path)


@pytest.mark.parametrize("name", ["REPORT.md", "README.md"])
def test_documents_agree_with_the_results(name, committed) -> None:
    """Run `make report` when this fails."""
    assert (ROOT / name).read_text() == documents(committed)[name]


def test_figures_agree_with_the_results(pictures) -> None:
    """Run `make report` when this fails. Coordinates may differ by rounding between machines."""
    assert {path.stem for path in PICTURES.glob("*.svg")} == set(pictures)
    for name, text in pictures.items():
        old, text = NAMES.sub("", (PICTURES / f"{name}.svg").read_text()), NAMES.sub("", text)
        assert NUMBER.sub("#", old) == NUMBER.sub("#", text), name
        pairs = zip(NUMBER.findall(old), NUMBER.findall(text), strict=True)
        assert all(abs(float(a) - float(b)) <= 0.05 for a, b in pairs), name


def test_figures_are_small_and_without_a_background(pictures) -> None:
    for name, text in pictures.items():
        assert len(text.encode()) < MOST_BYTES, name
        assert "#ffffff" not in text.lower(), name
        assert "dc:date" not in text, name


def test_every_figure_named_is_there(committed) -> None:
    for text in documents(committed).values():
        for name in re.findall(r"\(figures/([\w-]+)\.svg\)", text):
            assert name in FIGURES or name in DIAGRAMS
            assert (PICTURES / f"{name}.svg").is_file()


def test_every_block_is_shown_once() -> None:
    shown = [name for file in ("REPORT.md", "README.md") for name in markdown.markers((ROOT / file).read_text())]
    assert sorted(shown) == sorted(BLOCKS)


def test_predicted_and_measured_never_share_a_column(sampled) -> None:
    for name, text in render(sampled).items():
        for line in re.findall(r"^(\|.*\|)\n\| :?-", text, re.MULTILINE):
            for cell in line.strip("|").split("|"):
                if re.search(r"\bms\b", cell):
                    assert ("predicted" in cell) != ("measured" in cell), (name, cell)


def test_every_predicted_table_has_its_interval(sampled) -> None:
    for name, text in render(sampled).items():
        if re.search(r"^\|.*\bms\b.*predicted.*\|$", text, re.MULTILINE):
            assert re.search("interval", text, re.IGNORECASE), name


def test_the_events_of_the_report_are_those_of_the_kernels() -> None:
    """Who raises each cross-core event, and who waits for it."""
    report = (ROOT / "REPORT.md").read_text()
    sides = {"cube": "cube", "vector": "vector cores"}
    for suite, heading in (("forward", "## 3. "), ("backward", "## 4. ")):
        kernel = (ROOT / f"{suite}.py").read_text()
        waits = re.findall(r'_sync_wait\("(cube|vector)", "(cube|vector)", (\d)\)', kernel)
        section = report.split(f"\n{heading}")[1].split("\n## ")[0]
        rows = re.findall(r"^\| (\d) \| (cube|vector cores) \| (cube|vector cores) \|", section, re.MULTILINE)
        assert set(rows) == {(event, sides[source], sides[target]) for source, target, event in waits}


def test_a_missing_file_is_said_with_what_writes_it(tmp_path) -> None:
    texts = render(Records(tmp_path))
    assert texts["score"] == "*Left out: `results/score.json` is not there, `make score` writes it.*"
    assert "make ablation" in texts["ablation-forward"]
    assert "Left out" not in texts["constants"]
    assert set(draw(Records(tmp_path))) == set(DIAGRAMS)


def test_steps(sampled) -> None:
    text = render(sampled)["steps-forward"]
    kept, dropped = text.split("What did not work")
    assert "| two slots | the cube waits \\| for the vector cores | P5 | x 1.50 | x 1.25 | 100 | 80.0 |" in kept
    assert "| wider tiles | fewer loads | P5 | 10 % | x 0.89 | 80.0 | 90.0 |" in dropped
    assert "did not work" not in render(sampled)["steps-backward"]


def test_model_blocks(sampled) -> None:
    texts = render(sampled)
    assert "9 of 10 deletions are noticed (90.0 %)" in texts["mutation"]
    assert "| forward | F1 | 1.1.0 | race on UB |" in texts["schedules"]
    assert "| L2 bandwidth x 0.5 / x 2 * | 1.40 / 0.80 |" in texts["sensitivity"]
    assert "Below 2 % everywhere: scalar issue." in texts["sensitivity"]
    assert "| P1 | passed | 1024 | 0.0010 | 2.00 | 1.00 | 0.500 |  |" in texts["cuda"]
    assert "| compute-sanitizer memcheck | skipped | - | - | - | - | - | not on PATH |" in texts["cuda"]
    assert "| 128,8,1024,128 causal fp16 | pipeline | 2, 1 left out | 3.10 | 3.00 | `KG=512` |" in texts["tune"]
    assert "joined with the constants that no published time tests" in texts["score"]
    assert "(for other sources than these)" in texts["score"]


def test_intervals_are_around_their_times(committed) -> None:
    for case, row in named_cases(committed["score"]):
        if row["ms"] is not None:
            low, high = committed.interval(case.name, row["ms"])
            assert low < row["ms"] < high


def test_a_failed_case_has_no_time_and_still_a_row(tmp_path) -> None:
    content = json.loads((RESULTS / "score.json").read_text())
    row = next(row for row in content["cases"] if row["kind"] == "performance")
    row.update(status="hazard", ms=None, speedup=None, cube_utilisation=None, max_abs_error=None, rms_error=None)
    (tmp_path / "score.json").write_text(json.dumps(content))
    shutil.copy(RESULTS / "calibration.json", tmp_path)
    records = Records(tmp_path)
    assert "| hazard |" in render(records)["cases-forward"]
    assert "score" in draw(records)


def test_each_technique_has_its_row_and_its_code(committed) -> None:
    if not committed.has("ablation"):
        pytest.skip("no results/ablation.json: make ablation")
    report = (ROOT / "REPORT.md").read_text()
    for item in (item for suite in ("forward", "backward") for item in available(suite)):
        name = f"{item.name} (of the general path)" if item.of else item.name
        assert f"| {name} |" in report
        if item.name != SHIPPED:
            line = re.search(
                rf"^\| {re.escape(item.name)} \| `{re.escape(item.code)}` \| \[{item.suite}\.py:(\d+)\]", report, re.M
            )
            assert line, item.name
            assert item.code in (ROOT / f"{item.suite}.py").read_text().splitlines()[int(line[1]) - 1]


def test_what_the_report_names_exists() -> None:
    report = (ROOT / "REPORT.md").read_text()
    kernels = (ROOT / "forward.py").read_text() + (ROOT / "backward.py").read_text()
    names = set(re.findall(r"`(_\w+|attention_\w+|get_\w+)`", report))
    assert {"attention_fwd_kernel_pipeline", "get_path", "attention_bwd_kernel_delta"} <= names
    assert all(re.search(rf"\b{name}\b", kernels) for name in names)
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    known = {word for text in WRITERS.values() for word in re.findall(r"make ([a-z-]+)", text)}
    assert set(re.findall(r"`make\s([a-z-]+)", report)) - known <= targets
    assert all((ROOT / path).exists() for path in re.findall(r"`(harness/[\w/.]+)`", report))


def test_published_times() -> None:
    by_name = {case.name: case for case, _ in named_cases(Records()["score"])}
    assert measured_textbook(by_name["P1"]) == 12.29  # the fastest with a running maximum
    assert measured_textbook(by_name["P6"]) == 584.0
    assert measured_textbook(by_name["F1"]) is None


def test_constants_by_source() -> None:
    kinds = constant_sources()
    assert "sync.cross_core_cycles" in kinds["guess"]
    assert kinds["fitted"] == ["shared.l2_bytes_per_cycle"]
    assert "fixpipe.head_cycles" in kinds["published"]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        *((None, "-"), (0.0, "0"), (7.0, "7.00"), (2.987, "2.99"), (0.9996, "1.00"), (232.04, "232")),
        *((12345.0, "12345"), (0.0312, "0.0312"), (3e-5, "3.00e-05")),
    ],
)
def test_numbers(value, text) -> None:
    assert markdown.number(value) == text


def test_insert() -> None:
    old = "a\n<!-- begin:x -->\nold\n<!-- end:x -->\nb\n<!-- begin:y-z -->\n<!-- end:y-z -->\n"
    new = markdown.insert(old, {"x": "1\n", "y-z": "2", "unused": "3"})
    assert new == "a\n<!-- begin:x -->\n1\n<!-- end:x -->\nb\n<!-- begin:y-z -->\n2\n<!-- end:y-z -->\n"
    assert markdown.insert(new, {"x": "1", "y-z": "2"}) == new
    with pytest.raises(ValueError, match="known blocks, got y-z"):
        markdown.insert(old, {"x": "1"})
    for bad in ("<!-- begin:x -->", "<!-- end:x --><!-- begin:x -->", old + old):
        with pytest.raises(ValueError, match="each begin marker followed by its end marker"):
            markdown.insert(bad, {"x": "1", "y-z": "2"})


@pytest.fixture
def html(committed, pictures) -> str:
    return page(documents(committed)["REPORT.md"], pictures)


def test_the_page_stands_alone(html) -> None:
    assert not re.search(r"""(?:src|href)=["'](?!data:|#)(?!REPORT|README)[^"']*://""", html)
    assert html.count("data:image/svg+xml;base64,") == len(re.findall(r"<img ", html)) > 8
    links = re.findall(r'href="#([^"]+)"', html)
    assert len(links) > 8
    assert set(links) <= set(re.findall(r'id="([^"]+)"', html))
    assert not re.search(r'<a href="(?!#|https?:)', html)
    assert "<!--" not in html.split("<main>")[1].split("</main>")[0]


def test_slug() -> None:
    assert slug("8. A second witness: a GPU") == "8-a-second-witness-a-gpu"


@pytest.mark.skipif(not shutil.which("chromium"), reason="no chromium: the page is not opened in a browser")
@pytest.mark.parametrize("width", [390, 1280])
def test_the_page_in_a_browser(html, width, tmp_path) -> None:
    """No script error, nothing wider than the window, and tables sort by number both ways."""
    probe = """<script>
    const errors = []; window.addEventListener("error", e => errors.push(e.message));
    window.addEventListener("load", () => {
      const table = [...document.querySelectorAll("table")].find(t => /ms, /.test(t.tHead.textContent));
      const column = [...table.tHead.rows[0].cells].findIndex(c => /^ms, /.test(c.textContent));
      const values = () => [...table.tBodies[0].rows].map(r => Number(r.cells[column].textContent));
      const click = () => { table.tHead.rows[0].cells[column].firstChild.click(); return values(); };
      const found = { up: click(), down: click(), errors, wide: document.documentElement.scrollWidth - innerWidth };
      document.body.innerHTML = `<pre id=found>${JSON.stringify(found)}</pre>`;
    });
    </script>"""
    path = tmp_path / "page.html"
    path.write_text(html.replace("<title>", probe + "<title>"))
    command = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", f"--window-size={width},900", "--dump-dom"]
    run = subprocess.run([*command, path.as_uri()], capture_output=True, text=True, timeout=120, check=True)
    found = json.loads(run.stdout.split('<pre id="found">')[1].split("</pre>")[0])
    assert found["errors"] == []
    assert found["wide"] <= 0
    assert found["up"] == sorted(found["up"])
    assert found["down"] == sorted(found["up"], reverse=True)
