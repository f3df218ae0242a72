"""`make submission`: the two files alone, and the proof that they run."""

from __future__ import annotations

from pathlib import Path

import pytest

from scoring.submission import FILES, main, prove, write


def test_the_files_run_alone_in_a_new_folder(tmp_path, capsys) -> None:
    folder = tmp_path / "a" / "submission"
    assert main(["--out", str(folder)]) == 0
    assert sorted(path.name for path in folder.iterdir()) == sorted(FILES)
    printed = capsys.readouterr().out
    assert "causal 1,2,128,64: largest errors out " in printed
    assert "import and run alone" in printed


def test_what_else_is_in_the_folder_is_kept(tmp_path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match=r"--out must name an empty or new folder, got .* with notes.txt"):
        write(tmp_path)
    assert (tmp_path / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("import math", "import math\nfrom harness import virtual_npu"), "forward.py imports harness, which a grader"),
        (("attention = _attention.apply", ""), "forward has no attention"),
        (("b_p = tl.exp(b_s - b_m_new[:, None])", "b_p = tl.exp(b_s - b_m_new[:, None]) * 2"), "errors above 1e-2"),
    ],
)
def test_files_that_do_not_run_alone(change, message, tmp_path) -> None:
    write(tmp_path / "s")
    path: Path = tmp_path / "s" / "forward.py"
    text = path.read_text()
    assert change[0] in text
    path.write_text(text.replace(*change, 1))
    with pytest.raises(RuntimeError, match=message):
        prove(tmp_path / "s", on_npu=False)
