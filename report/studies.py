"""Blocks of the studies of the kernels: steps, ablation, roofline, timelines, accuracy."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from harness.studies.ablation import available, source
from harness.studies.accuracy import STDS
from harness.studies.techniques import SHIPPED, Technique

from .blocks import block
from .markdown import figure, number, percent, table
from .records import Records

WHO = ("ours", "textbook", "torch")


def geomean(values: Iterable[float]) -> float:
    """Geometric mean; NaN of none."""
    logs = [math.log(value) for value in values]
    return math.exp(sum(logs) / len(logs)) if logs else math.nan


def steps(records: Records, suite: str) -> list[dict[str, Any]]:
    """The recorded steps of a kernel: step, why, predicted_gain, case, ms_before, ms_after, kept."""
    found = records[f"{suite}_steps"]
    return found if isinstance(found, list) else found["steps"]


@block("backward-pipeline")
def backward_pipeline(records: Records) -> str:
    """The design of the backward's pipeline, where it is in the kernel file."""
    if "def get_path_bwd(" not in source("backward"):
        return "*The backward has no explicit pipeline yet; every shape takes the general path.*"
    return Path(__file__).with_name("backward_pipeline.md").read_text()


def _gain(value: object) -> str:
    return f"x {value:.2f}" if isinstance(value, (int, float)) else str(value if value is not None else "-")


def _steps(records: Records, suite: str) -> str:
    """Kept and dropped steps, each with its reason, expected and seen gain."""
    tables = []
    for kept, title in ((True, "Kept:"), (False, "Tried and dropped:")):
        rows = []
        for row in steps(records, suite):
            if bool(row["kept"]) is not kept:
                continue
            before, after = row.get("ms_before"), row.get("ms_after")
            seen = f"x {before / after:.2f}" if before and after else "-"
            cells = [str(row["step"]), str(row["why"]), str(row.get("case", "-"))]
            rows.append([*cells, _gain(row.get("predicted_gain")), seen, number(before), number(after)])
        header = ["step", "why", "case", "gain expected", "gain seen", "ms before, predicted", "ms after, predicted"]
        if rows:
            tables.append(f"{title}\n\n" + table(header, rows, left=(0, 1, 2)))
    return "\n\n".join(tables) or "*No steps recorded.*"


@block("steps-forward", "forward_steps")
def steps_forward(records: Records) -> str:
    """The forward's steps."""
    return _steps(records, "forward")


@block("steps-backward", "backward_steps")
def steps_backward(records: Records) -> str:
    """The backward's steps."""
    return _steps(records, "backward")


def ablation_times(records: Records, suite: str) -> dict[str, dict[str, dict[str, Any]]]:
    """By technique, by case: the row of results/ablation.json."""
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for row in records["ablation"]["rows"]:
        if row["suite"] == suite and "case" in row:
            found.setdefault(row["technique"], {})[row["case"]] = row
    return found


def slowdowns(records: Records, item: Technique) -> dict[str, float]:
    """By case, the time with a technique switched off over the time with it."""
    times = ablation_times(records, item.suite)
    base = times.get(item.of or SHIPPED, {})
    return {
        case: row["ms"] / base[case]["ms"]
        for case, row in times.get(item.name, {}).items()
        if row["ms"] and case in base and base[case]["ms"]
    }


def ablated(suite: str) -> list[Technique]:
    """The techniques of a suite without the shipped kernel itself."""
    return [item for item in available(suite) if item.name != SHIPPED]


def _ablation(records: Records, suite: str) -> str:
    times = ablation_times(records, suite)
    cases = list(times.get(SHIPPED, {}))
    values = {
        row["technique"]: row["values"]
        for row in records["ablation"]["rows"]
        if row["suite"] == suite and "values" in row
    }
    rows = [
        [
            SHIPPED,
            "ms, predicted",
            *(number(times[SHIPPED][case]["ms"]) for case in cases),
            "",
            values.get(SHIPPED, "-"),
        ]
    ]
    for item in ablated(suite):
        found = slowdowns(records, item)
        cells = []
        for case in cases:
            row = times.get(item.name, {}).get(case)
            fault = row["fault"] if row is not None else "-"
            cells.append(f"{found[case]:.2f}" if case in found else fault)
        mean = geomean(found.values())
        name = item.name + (" (of the general path)" if item.of else "")
        checked = values.get(item.name, "-").split(":")[0]
        rows.append([name, item.off, *cells, "-" if math.isnan(mean) else f"{mean:.2f}", checked])
    header = ["switched off alone", "instead", *cases, "mean", "values"]
    where = [[item.name, f"`{item.code}`"] for item in ablated(suite)]
    text = (
        "Predicted time with one technique switched off over the time of the kernel as shipped; above 1 the technique "
        "pays. A ratio of two predictions of one model; where the constants marked * in the sensitivity table matter, "
        "it moves with them."
    )
    found_at = table(["technique", f"find it in `{suite}.py` by"], where, left=(0, 1))
    parts = [text, table(header, rows, left=(0, 1))]
    if any(slowdowns(records, item) for item in ablated(suite)):
        parts.append(figure(f"ablation-{suite}", f"What each technique of the {suite} gains (predicted), by case."))
    return "\n\n".join([*parts, found_at])


@block("ablation-forward", "ablation")
def ablation_forward(records: Records) -> str:
    """The forward's techniques, each switched off."""
    return _ablation(records, "forward")


@block("ablation-backward", "ablation")
def ablation_backward(records: Records) -> str:
    """The backward's techniques, each switched off."""
    return _ablation(records, "backward")


@block("tune", "tune")
def tune(records: Records) -> str:
    """What the tuner found beside what is shipped."""
    rows = []
    for entry in records["tune"].values():
        best = [row for row in entry.get("best", ()) if "ms" in row]
        if not best:
            continue
        shape = entry["shape"]
        first = min(best, key=lambda row: row["ms"])
        shipped = min((row["ms"] for row in best if row["shipped"]), default=None)
        text = " ".join(f"{name}={value}" for name, value in first["settings"].items())
        mask = "causal" if shape["causal"] else "full"
        name = f"{shape['z']},{shape['h']},{shape['n']},{shape['d']} {mask} {shape['dtype']}"
        tried = str(len(entry["rows"]))
        rows.append([name, first["space"], tried, number(shipped), number(first["ms"]), f"`{text}`"])
    header = ["Z,H,N,D", "kernel", "settings tried", "shipped ms, predicted", "best ms, predicted", "best settings"]
    return table(header, rows, left=(0, 1, 5)) if rows else "*No shape has been tuned to the end.*"


@block("roofline", "roofline")
def roofline(records: Records) -> str:
    """Each case beside the floors of the chip and the needs of its pipes."""
    found = records["roofline"]["rows"]
    floors = list(found[0]["floors_ms"])
    header = ["case", "ms, predicted", *(f"{name} floor" for name in floors), "TFLOP/s", "of the cube's peak"]
    header += ["busiest pipe", "busy", "L2 traffic at its rate"]
    rows = []
    beyond = []
    for row in found:
        flops = row["flops"] / row["ms"] / 1e9
        pipes = {name: ms for name, ms in row["needs_ms"].items() if name != "L2"}
        busiest = max(pipes, key=pipes.__getitem__)
        shares = [percent(row["floors_ms"][name] / row["ms"]) for name in floors]
        cells = [row["case"], number(row["ms"]), *shares, number(flops)]
        cells += [percent(row["flops"] / row["ms"] * 1e3 / records["roofline"]["peak_flops"]), busiest]
        cells += [percent(pipes[busiest] / row["ms"]), percent(row["needs_ms"]["L2"] / row["ms"])]
        rows.append(cells)
        if row["needs_ms"]["L2"] > row["ms"]:
            beyond.append(row["case"])
    text = table(header, rows, left=(0,))
    if beyond:
        text += (
            f"\n\nIn {', '.join(beyond)} the kernel's own traffic at the fitted rate of L2 takes longer than the "
            "predicted time. The model stretches transfers by that rate and takes only the documented 7 TB/s as a "
            "hard limit: if the fitted rate is one too, the prediction is too low by at least that much."
        )
    return "\n\n".join(
        [
            text,
            figure(
                "roofline",
                "Predicted speed over arithmetic intensity, by bytes through L2 and by compulsory bytes from HBM.",
            ),
            figure("pipes", "Share of the predicted time in which each pipe of the busiest core works."),
        ]
    )


def _timeline(records: Records, suite: str) -> str:
    rows = {row["key"]: row for row in records["timelines"]["rows"]}
    before, after = rows[f"{suite} before"], rows[f"{suite} after"]
    caption = (
        f"A steady stretch of {after['case']} (predicted): `{before['kernel']}` above, `{after['kernel']}` below."
    ).replace("`", "")
    return figure(f"timeline-{suite}", caption)


@block("timeline-forward", "timelines")
def timeline_forward(records: Records) -> str:
    """The forward's pipes, before and after."""
    return _timeline(records, "forward")


@block("timeline-backward", "timelines")
def timeline_backward(records: Records) -> str:
    """The backward's pipes, before and after."""
    return _timeline(records, "backward")


def accuracy_errors(records: Records, dtype: str, outputs: Iterable[str], std: float, who: str) -> list[float]:
    """The finite relative L2 errors over head dimensions, masks and outputs."""
    wanted = set(outputs)
    return [
        values[who]
        for row in records["accuracy"]["rows"]
        if row["dtype"] == dtype and row["std"] == std
        for output, values in row["errors"].items()
        if output in wanted and isinstance(values[who], float)
    ]


@block("accuracy", "accuracy")
def accuracy(records: Records) -> str:
    """Errors over input scales."""
    rows = []
    for dtype in ("fp16", "bf16"):
        for outputs in (("out",), ("dq",), ("dk",), ("dv",)):
            for std in STDS:
                cells = [dtype, outputs[0], f"{std:g}"]
                worst: dict[str, float] = {}
                for who in WHO:
                    found = accuracy_errors(records, dtype, outputs, std, who)
                    worst[who] = max(found, default=math.nan)
                    cells.append("-" if not found else number(worst[who], 2))
                cells.append(number(worst["ours"] / worst["torch"], 2) if not math.isnan(worst["ours"]) else "-")
                rows.append(cells)
    header = [
        "dtype",
        "output",
        "std of q, k, v",
        "this project",
        "textbook",
        "PyTorch, same precision",
        "ours / PyTorch",
    ]
    faults = [
        f"{row['key']}, {output}: {who}: {value if isinstance(value, str) else 'not finite'}"
        for row in records["accuracy"]["rows"]
        for output, values in row["errors"].items()
        for who, value in values.items()
        if not isinstance(value, float)
    ]
    text = (
        "Largest relative L2 error against fp64 over head dimensions 64, 128, 256 and both masks (one head; computed "
        "by the virtual NPU with the hardware's roundings):"
    )
    parts = [text, table(header, rows, left=(0, 1))]
    if faults:
        parts.append("Without a value:\n\n" + "\n".join(f"* {fault}" for fault in faults))
    parts.append(figure("accuracy", "Relative L2 error against fp64 over the standard deviation of the inputs."))
    return "\n\n".join(parts)
