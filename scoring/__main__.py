"""`python -m scoring`: check or score the forward and the backward."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

import torch

from harness import devices
from harness.configs import SUITES, Case, select
from harness.evaluator import MODES, Evaluator, Settings, evaluate, judges
from harness.journal import Journal, fingerprint
from harness.results import CaseResult, Status, write_json
from harness.virtual_npu import CONTEST_RELEASE, RELEASES

from .report import Reporter, document, make_console, print_report

REPOSITORY = Path(__file__).resolve().parent.parent
SCORE_JSON = REPOSITORY / "results" / "score.json"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m scoring", description=__doc__)
    parser.add_argument("--suite", choices=[*SUITES, "all"], default="all", help="default: all")
    parser.add_argument("--mode", choices=MODES, default="score", help="score checks, then times; default: score")
    parser.add_argument(
        "--case",
        action="append",
        default=[],
        metavar="N",
        help="only this case, by number or name (3, P1, C2-bf16); may repeat",
    )
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="write results; default for a whole score: results/score.json"
    )
    parser.add_argument(
        "--forward", type=Path, default=REPOSITORY / "forward.py", metavar="FILE", help="file with attention_fwd"
    )
    parser.add_argument(
        "--backward", type=Path, default=REPOSITORY / "backward.py", metavar="FILE", help="file with attention_bwd"
    )
    parser.add_argument(
        "--release", choices=RELEASES, default=CONTEST_RELEASE, help=f"bishengir; default: {CONTEST_RELEASE}"
    )
    parser.add_argument("--full", action="store_true", help="check all heads of every case")
    parser.add_argument(
        "--jobs", type=int, default=min(2, os.cpu_count() or 1), metavar="N", help="cases at a time; default: 2"
    )
    parser.add_argument(
        "--timeout", type=float, metavar="S", help="limit of one call in seconds; default: 180, with --full 1800"
    )
    parser.add_argument(
        "--no-static-check",
        action="store_true",
        help="run what harness/static_check.py refuses too, to look for a fault; such a score counts for nothing",
    )
    parser.add_argument(
        "--memory", type=float, metavar="GIB", help="host memory of one child; default: 6, on an accelerator 32"
    )
    parser.add_argument(
        "--journal",
        type=Path,
        metavar="FILE",
        help="finished cases, for --resume; default: FILE of --json with .journal, else results/local/MODE.journal",
    )
    parser.add_argument("--resume", action="store_true", help="go on with a run that was ended: see --journal")
    parser.add_argument("--seed", type=int, default=0, help="public part of the inputs' seed; default: 0")
    parser.add_argument("--secret", type=int, help="secret part, to repeat a run; default: drawn anew")
    return parser


def _selected(arguments: argparse.Namespace) -> list[Case]:
    if arguments.case and arguments.suite == "all":
        raise ValueError("--case needs --suite forward or --suite backward, got --suite all")
    suites = SUITES if arguments.suite == "all" else (arguments.suite,)
    return [case for suite in suites for case in select(suite, arguments.case)]


def main(argv: list[str] | None = None) -> int:
    """Run the command line; returns 0 when every case passed, 1 when one did not, 2 for wrong usage."""
    parser = _parser()
    arguments = parser.parse_args(argv)
    try:
        chosen = _selected(arguments)
        submissions = {suite: getattr(arguments, suite) for suite in {case.suite for case in chosen}}
        for suite, path in submissions.items():
            if not path.is_file():
                raise ValueError(f"--{suite} must name a Python file, got {path}, which does not exist")
        options = {} if arguments.secret is None else {"secret_seed": arguments.secret}
        device_kind = devices.choose()
        full = arguments.full or judges(device_kind)
        memory = arguments.memory or (6.0 if device_kind == "virtual" else 32.0)
        settings = Settings(
            device=device_kind,
            release=arguments.release,
            mode=arguments.mode,
            full=full,
            jobs=arguments.jobs,
            seconds=arguments.timeout or (1800.0 if full else 180.0),
            memory_bytes=int(memory * 2**30),
            public_seed=arguments.seed,
            static_check=not arguments.no_static_check,
            **options,
        )
    except ValueError as error:
        parser.error(str(error))
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // settings.jobs))
    probe = Evaluator(submissions, settings)
    try:
        device = probe.describe()
    except RuntimeError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    finally:
        probe.close()

    console = make_console()
    console.print(f"device: {device['name']} ({device['kind']}), {device['compiler']}; times are {device['time']}")
    if "warning" in device:
        console.print(f"[yellow]warning:[/] {device['warning']}")
    if arguments.no_static_check:
        console.print("[yellow]warning:[/] --no-static-check: what this run says counts for nothing")
    timed = arguments.mode == "score"
    json_path: Path | None = arguments.json
    if json_path is None and timed and not arguments.case and arguments.suite == "all":
        json_path = SCORE_JSON
    place = json_path.with_name(f"{json_path.name}.journal") if json_path and json_path != SCORE_JSON else None
    place = arguments.journal or place or REPOSITORY / "results" / "local" / f"{arguments.mode}.journal"
    journal = Journal(place, fingerprint(submissions, settings, device))
    try:
        results = [result for result in journal.start(arguments.resume) if result.case in chosen]
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    left = [case for case in chosen if case not in {result.case for result in results}]
    if arguments.resume:
        console.print(f"resumed: {len(results)} of {len(chosen)} cases are finished, {os.path.relpath(place)}")

    def write() -> None:
        if json_path is not None and results:
            write_json(json_path, document(device, results, timed))

    def keep(result: CaseResult) -> None:
        journal.add(result)
        results.append(result)
        reporter.finished(result)
        write()

    write()
    interrupted = False
    with Reporter(console, len(chosen), len(results)) as reporter:
        try:
            evaluate(left, submissions, settings, on_result=keep, on_start=reporter.started)
        except KeyboardInterrupt:
            interrupted = True
    console.print()
    print_report(console, device, results, timed)
    console.print(f"inputs: --seed {settings.public_seed} --secret {settings.secret_seed}")
    if json_path is not None and results:
        console.print(f"wrote {os.path.relpath(json_path)}")
    if interrupted:
        console.print(f"interrupted after {len(results)} of {len(chosen)} cases")
        return 130
    return 0 if all(result.status is Status.PASSED for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
