"""Blocks of the studies of the kernels: steps, ablation, roofline, timelines, accuracy."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from harness.studies.ablation import available, source
from harness.studies.accuracy import DOUT_EXPONENTS, STDS
from harness.studies.techniques import SHIPPED, Technique

from .blocks import block
from .markdown import figure, number, percent, span, table
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


def error_note(records: Records) -> str:
    """What a predicted time stands for, for a table without a column for it."""
    if records.error is None:
        return "No interval: `make calibrate` has not been run."
    low, high = records.error.calibration
    return (
        f"Interval of each predicted time here: {low:.2f} to {high:.2f} times of it by the calibration, wider where "
        "the constants marked * in the sensitivity table matter."
    )


def _gain(value: object) -> str:
    return f"x {value:.2f}" if isinstance(value, (int, float)) else str(value if value is not None else "-")


def _steps(records: Records, suite: str) -> str:
    """Kept and dropped steps, each with its reason, expected and seen gain."""
    tables = []
    for kept, title in ((True, "Kept:"), (False, "What did not work, and was dropped:")):
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
    return "\n\n".join([error_note(records), *tables]) if tables else "*No steps recorded.*"


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


def _switch(item: Technique) -> str:
    """How a technique is switched off, in words."""
    found = []
    for name, value in item.settings.items():
        inner = value.values() if isinstance(value, Mapping) else ()
        parts = [entry for entry in inner if isinstance(entry, Mapping)] or ([value] if inner else [])
        keys = list(dict.fromkeys(str(key) for part in parts for key in part if isinstance(key, str)))
        found.append(f"table `{name}`" + (": " + ", ".join(f"`{key}`" for key in keys) if keys else ""))
    found += [f"`{name}` gives `{value}`" for name, value in item.replace.items()]
    for name, value in item.options.items():
        found.append(f"option `{name}` " + ("left out" if value is None else f"= {value}"))
    if item.edits:
        found.append(f"{len(item.edits)} edit{'s' if len(item.edits) > 1 else ''} of the text")
    if item.causal is not None:
        found.append("called without a mask")
    return "; ".join(found)


def _line(item: Technique) -> str:
    """Link to the first line of a kernel file with a technique's code."""
    before = source(item.suite).split(item.code)[0]
    line = before.count("\n") + 1
    return f"[{item.suite}.py:{line}]({item.suite}.py#L{line})"


def _by_scale(suite: str, found: Mapping[str, Mapping[str, Any]]) -> str:
    """Errors of the techniques that were checked on inputs of several scales; empty without any."""
    rows = []
    stds: list[str] = []
    for name, row in found.items():
        errors = row.get("errors", {})
        if len(errors) > 1:
            stds = list(errors)
            cells = [number(value, 2) if value is not None else "not finite" for value in errors.values()]
            rows.append([name if name == SHIPPED else f"without: {name}", *cells])
    if not rows:
        return ""
    what = "out" if suite == "forward" else "dq, dk, dv"
    text = f"Largest relative L2 error of {what} (fp16) by standard deviation of q, k and v:"
    return text + "\n\n" + table(["", *(f"std {std}" for std in stds)], rows, left=(0,))


def _ablation(records: Records, suite: str) -> str:
    times = ablation_times(records, suite)
    cases = list(times.get(SHIPPED, {}))
    values = {row["technique"]: row for row in records["ablation"]["rows"] if row["suite"] == suite and "values" in row}
    checked = {name: row["values"].split(":")[0] for name, row in values.items()}
    shipped = [SHIPPED, "ms, predicted", *(number(times[SHIPPED][case]["ms"]) for case in cases), ""]
    rows = [[*shipped, checked.get(SHIPPED, "-")]]
    if records.error is not None:
        base = {case: times[SHIPPED][case]["ms"] for case in cases}
        spans = [span(records.interval(case, ms)) if ms else "-" for case, ms in base.items()]
        rows.append(["", "its interval", *spans, "", ""])
    reasons: dict[str, str] = {}
    for item in ablated(suite):
        found = slowdowns(records, item)
        cells = []
        for case in cases:
            row = times.get(item.name, {}).get(case)
            fault = row["fault"] if row is not None else "-"
            cells.append(f"{found[case]:.2f}" if case in found else fault)
            if row is not None and fault:
                reasons.setdefault(item.name, f"{case} {fault}: {row['detail']}")
        told = values.get(item.name, {}).get("values", "right")
        if not told.startswith(("right", "not checked")):
            reasons.setdefault(item.name, told)
        mean = geomean(found.values())
        name = item.name + (" (of the general path)" if item.of else "")
        last = checked.get(item.name, "-")
        rows.append([name, item.off, *cells, "-" if math.isnan(mean) else f"{mean:.2f}", last])
    header = ["switched off alone", "instead", *cases, "mean", "values"]
    text = (
        "Predicted time with one technique switched off over the time of the kernel as shipped; above 1 the technique "
        "pays. A ratio of two predictions of one model; where the constants marked * in the sensitivity table matter, "
        "it moves with them. A case without a number is one where the switch changes nothing (-), that was left out "
        "(compile options are tried on some cases only), or that did not run."
    )
    parts = [text, table(header, rows, left=(0, 1))]
    if reasons:
        # Names of generated files and numbers of lines would change with every edit.
        told = [f"* {name}: {re.sub(r' at [a-z]+_[0-9a-f]+[.]py:[0-9]+', '', why)}" for name, why in reasons.items()]
        parts.append("What did not run, or not rightly, when switched off:\n\n" + "\n".join(told))
    if scaled := _by_scale(suite, values):
        parts.append(scaled)
    if any(slowdowns(records, item) for item in ablated(suite)):
        parts.append(figure(f"ablation-{suite}", f"What each technique of the {suite} gains (predicted), by case."))
    where = [[item.name, f"`{item.code}`", _line(item), _switch(item)] for item in ablated(suite)]
    header = ["technique (row above)", f"find it in `{suite}.py` by", "line", "switch"]
    return "\n\n".join([*parts, table(header, where, left=(0, 1, 2, 3))])


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
        if entry.get("wrong"):
            tried += f", {len(entry['wrong'])} left out"
        rows.append([name, first["space"], tried, number(shipped), number(first["ms"]), f"`{text}`"])
    header = ["Z,H,N,D", "kernel", "settings tried", "shipped ms, predicted", "best ms, predicted", "best settings"]
    if not rows:
        return "*No shape has been tuned to the end.*"
    return f"{error_note(records)}\n\n" + table(header, rows, left=(0, 1, 5))


@block("roofline", "roofline")
def roofline(records: Records) -> str:
    """Each case beside the floors of the chip and the needs of its pipes."""
    found = records["roofline"]["rows"]
    floors = list(found[0]["floors_ms"])
    header = [
        "case",
        "ms, predicted",
        "interval",
        *(f"{name} floor" for name in floors),
        "TFLOP/s",
        "of the cube's peak",
    ]
    header += ["busiest pipe", "busy", "L2 traffic at its rate"]
    rows = []
    beyond = []
    for row in found:
        flops = row["flops"] / row["ms"] / 1e9
        pipes = {name: ms for name, ms in row["needs_ms"].items() if name != "L2"}
        busiest = max(pipes, key=pipes.__getitem__)
        shares = [percent(row["floors_ms"][name] / row["ms"]) for name in floors]
        cells = [row["case"], number(row["ms"]), span(records.interval(row["case"], row["ms"])), *shares, number(flops)]
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


def accuracy_errors(
    records: Records, dtype: str, outputs: Iterable[str], std: float, who: str, exponent: int = 0
) -> list[float]:
    """The finite relative L2 errors over head dimensions, masks and outputs; dout times two to
    the exponent."""
    wanted = set(outputs)
    return [
        values[who]
        for row in records["accuracy"]["rows"]
        if row["dtype"] == dtype and row["std"] == std and row.get("exponent", 0) == exponent
        for output, values in row["errors"].items()
        if output in wanted and isinstance(values[who], float)
    ]


def _errors(records: Records, dtype: str, outputs: tuple[str, ...], std: float, exponent: int = 0) -> list[str]:
    """Cells with the largest errors of all three, and ours over PyTorch's."""
    found = {who: accuracy_errors(records, dtype, outputs, std, who, exponent) for who in WHO}
    cells = [number(max(errors), 2) if errors else "-" for errors in found.values()]
    complete = found["ours"] and found["torch"]
    return [*cells, number(max(found["ours"]) / max(found["torch"]), 2) if complete else "-"]


def _worst_ratio(records: Records) -> str:
    """The largest of all ratios of our error to PyTorch's, and where it is."""
    ratios = [
        (values["ours"] / values["torch"], f"{output} of {row['key']}")
        for row in records["accuracy"]["rows"]
        for output, values in row["errors"].items()
        if isinstance(values["ours"], float) and isinstance(values["torch"], float) and values["torch"] > 0
    ]
    ratio, where = max(ratios)
    return (
        f"In none of the {len(ratios)} comparisons of one configuration and output is this project's error more than "
        f"{ratio:.2f} times that of PyTorch in the same precision ({where})."
    )


@block("accuracy", "accuracy")
def accuracy(records: Records) -> str:
    """Errors over input scales."""
    header = ["dtype", "output", "std of q, k, v"]
    columns = ["this project", "textbook", "PyTorch, same precision", "ours / PyTorch"]
    rows = [
        [dtype, output, f"{std:g}", *_errors(records, dtype, (output,), std)]
        for dtype in ("fp16", "bf16")
        for output in ("out", "dq", "dk", "dv")
        for std in STDS
    ]
    exponents = [e for e in DOUT_EXPONENTS if accuracy_errors(records, "fp16", ("dq",), STDS[0], "ours", e)]
    scaled = [
        [dtype, output, f"2^{exponent}", *_errors(records, dtype, (output,), STDS[0], exponent)]
        for dtype in ("fp16", "bf16")
        for output in ("dq", "dk", "dv")
        for exponent in exponents
    ]
    faults = [
        f"{row['key']}, {output}: {who}: {value if isinstance(value, str) else 'not finite'}"
        for row in records["accuracy"]["rows"]
        for output, values in row["errors"].items()
        for who, value in values.items()
        if not isinstance(value, float)
    ]
    parts = [
        "Largest relative L2 error against fp64 over head dimensions 64, 128, 256 and both masks (one head; computed "
        "by the virtual NPU with the hardware's roundings):",
        table([*header, *columns], rows, left=(0, 1)),
    ]
    if len(exponents) > 1:
        parts.append(
            f"The same with dout times a power of two, as a loss scaler makes it (std of q, k, v {STDS[0]:g}). In fp16 "
            "the score gradients of the smallest ones are subnormal:"
        )
        parts.append(table(["dtype", "output", "dout times", *columns], scaled, left=(0, 1, 2)))
    parts.append(_worst_ratio(records))
    if faults:
        parts.append("Without a value:\n\n" + "\n".join(f"* {fault}" for fault in faults))
    parts.append(figure("accuracy", "Relative L2 error against fp64 over the standard deviation of the inputs."))
    return "\n\n".join(parts)
