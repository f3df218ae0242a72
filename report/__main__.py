"""`python -m report`: rewrites the blocks of REPORT.md and README.md, and figures/.

With `--html FILE` it writes the page instead.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path

from harness.studies import ablation, accuracy, roofline, timelines
from harness.studies.rows import Kept

from . import model, score, studies
from .blocks import render
from .charts import FIGURES, draw
from .markdown import insert
from .records import REPOSITORY, Records

DOCUMENTS = ("REPORT.md", "README.md")
PICTURES = REPOSITORY / "figures"
BLOCK_MODULES = (score, model, studies)  # importing them registers their blocks


def documents(records: Records, folder: Path = REPOSITORY) -> dict[str, str]:
    """The text of each document with its blocks rewritten."""
    blocks = render(records)
    return {name: insert((folder / name).read_text(), blocks) for name in DOCUMENTS}


def write(pictures: Mapping[str, str], texts: Mapping[str, str]) -> list[str]:
    """Write what has changed; returns the names. A figure without results is deleted."""
    PICTURES.mkdir(exist_ok=True)
    wanted = {PICTURES / f"{name}.svg": text for name, text in pictures.items()}
    wanted |= {REPOSITORY / name: text for name, text in texts.items()}
    changed = []
    for path, text in wanted.items():
        if not path.is_file() or path.read_text() != text:
            path.write_text(text)
            changed.append(str(path.relative_to(REPOSITORY)))
    for path in PICTURES.glob("*.svg"):
        if path not in wanted:
            path.unlink()
            changed.append(f"{path.relative_to(REPOSITORY)} (deleted)")
    return changed


def stale() -> list[str]:
    """What a reader must know of results that these sources did not make."""
    found = []
    for study in (ablation, accuracy, roofline, timelines):
        name = study.RESULTS.name
        try:
            missing = Kept(study.RESULTS, study.wanted()).missing()
        except ValueError as error:
            found.append(f"results/{name}: {error}")
        else:
            if missing:
                found.append(f"results/{name}: {len(missing)} rows are missing or of other sources")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description="REPORT.md, README.md and figures/ from results/.")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write the page to this file instead")
    arguments = parser.parse_args()
    records = Records()
    pictures, texts = draw(records), documents(records)
    print("\n".join(stale()), file=sys.stderr)
    left_out = sorted(name for name in FIGURES if name not in pictures)
    if left_out:
        print(f"without results: {', '.join(left_out)}")
    if arguments.html is not None:
        from .page import page

        arguments.html.parent.mkdir(parents=True, exist_ok=True)
        arguments.html.write_text(page(texts["REPORT.md"], pictures))
        print(f"wrote {arguments.html}")
        return
    changed = write(pictures, texts)
    print("\n".join(f"wrote {name}" for name in changed) or "nothing has changed")


if __name__ == "__main__":
    main()
