"""Blocks about the virtual NPU: calibration, sensitivity, mutation, schedules, and the GPU."""

from __future__ import annotations

from typing import Any

from harness.studies.tiles import lines, summary

from .blocks import block
from .markdown import figure, number, percent, table
from .records import REPOSITORY, Records

HARDWARE = REPOSITORY / "harness" / "virtual_npu" / "hardware.toml"
FELT = 0.02  # effects below this share are left out of the sensitivity table


@block("calibration", "calibration")
def calibration(records: Records) -> str:
    """Predicted beside measured for the published rows."""
    found = records["calibration"]
    assert records.error is not None
    low, high = records.error.calibration
    text = (
        f"Mean absolute error {percent(found['mape'], 1)}, worst row {percent(found['worst'], 1)}, rank correlation "
        f"{found['spearman']:.3f} over {len(found['rows'])} rows. Measured over predicted lies between {low:.2f} and "
        f"{high:.2f} (10th to 90th percentile): this is the interval of every predicted time below."
    )
    if "holdout_mape" in found:
        text += (
            f" Three constants fitted on one half of the rows and judged on the other half give "
            f"{percent(found['holdout_mape'], 1)}; the shipped constants are fitted on none of them."
        )
    rows = [
        [row["name"], number(row["measured_ms"]), number(row["predicted_ms"]), f"{row['ratio']:.2f}"]
        for row in found["rows"]
    ]
    header = [
        "N x D, mask, tile, accumulator, order",
        "ms, measured by others",
        "ms, predicted",
        "predicted / measured",
    ]
    return "\n\n".join(
        [
            text,
            figure("calibration", "Published times of a textbook forward and their predictions."),
            table(header, rows),
        ]
    )


@block("sensitivity", "sensitivity")
def sensitivity(records: Records) -> str:
    """What predicted times hang on."""
    found = records["sensitivity"]
    names = list(found["cases"])
    rows, small = [], []
    for label in found["factors"]:
        effects = {name: found["cases"][name]["effects"][label] for name in names}
        if max(abs(value - 1) for name in names for value in effects[name]) < FELT:
            small.append(label)
            continue
        low, high = found["factors"][label]
        mark = " *" if label in found["unconstrained"] else ""
        cells = [" / ".join(f"{value:.2f}" for value in effects[name]) for name in names]
        rows.append([f"{label} x {low:g} / x {high:.2g}{mark}", *cells])
    text = (
        "Predicted time over the unchanged one when a constant is multiplied by its lower / upper factor. The "
        "published rows hardly feel the constants marked *, so the intervals add their effect."
    )
    if small:
        text += f" Below {percent(FELT)} everywhere: {', '.join(small)}."
    return text + "\n\n" + table(["constant", *names], rows)


@block("tiles", "tiles")
def tiles(records: Records) -> str:
    """Whether the choice of settings hangs on constants that are not settled."""
    rows = records["tiles"]["rows"]
    header = ["case", "constants", "shipped ms, predicted", "best other ms, predicted", "which", "shipped behind by"]
    text = summary(rows) + " Two times of one line differ by the model alone: the interval is of both together."
    return text + "\n\n" + table(header, lines(rows), left=(0, 1, 4))


@block("mutation", "mutation")
def mutation(records: Records) -> str:
    """How many deleted synchronisations are noticed."""
    found = records["mutation"]
    rows = []
    for kernel, row in found["kernels"].items():
        rest = row["deleted"] - row["noticed"] - row.get("proven", 0) - row.get("not_reached", 0)
        cells = [row["deleted"], row["noticed"], row.get("proven", 0), row.get("not_reached", 0), rest]
        rows.append([kernel, *(str(cell) for cell in cells)])
    text = (
        f"{found['noticed']} of {found['deleted']} deletions are noticed "
        f"({percent(found['noticed'] / found['deleted'], 1)}), bishengir {found['release']}."
    )
    if found.get("share_of_needed"):
        text += f" Of those that the log of a run does not prove redundant: {percent(found['share_of_needed'], 1)}."
    shares = [
        f"{name} {percent(group['share'], 1)} of {group['deleted']}"
        for name, group in found.get("groups", {}).items()
        if group["deleted"]
    ]
    if shares:
        text += f" By kernels: {', '.join(shares)}."
    header = ["kernel", "deleted", "noticed", "redundant by the log of the run", "never reached", "without evidence"]
    return text + "\n\n" + table(header, rows)


@block("schedules", "schedules")
def schedules(records: Records) -> str:
    """Hazards under several schedules."""
    found = records["schedules"]
    faults = [row for row in found["rows"] if row["fault"]]
    releases = sorted({row["release"] for row in found["rows"]})
    text = (
        f"{len(found['rows'])} configurations (bishengir {' and '.join(releases)}) under the schedules "
        f"{', '.join(found['schedules'])}: {len(faults)} with a hazard or other bits than under the first."
    )
    if not faults:
        return text
    header = ["suite", "case", "bishengir", "fault"]
    rows = [[row["suite"], row["case"], row["release"], row["fault"]] for row in faults]
    return text + "\n\n" + table(header, rows, left=range(4))


def constant_sources() -> dict[str, list[str]]:
    """Constants of the time model by how well they are known: "guess", "fitted", the others."""
    kinds: dict[str, list[str]] = {"guess": [], "fitted": [], "published": []}
    section = ""
    for line in HARDWARE.read_text().splitlines():
        code, _, comment = line.partition("#")
        if code.startswith("["):
            section = code.strip().strip("[]")
        elif "=" in code and section not in ("chip", "memory"):
            name = f"{section}.{code.split('=')[0].strip()}"
            kind = next((word for word in ("guess", "fitted") if comment.strip().startswith(word)), "published")
            kinds[kind].append(name)
    return kinds


@block("constants")
def constants(records: Records) -> str:
    """How many constants of the time model stand on what."""
    kinds = constant_sources()
    return (
        f"Of {sum(map(len, kinds.values()))} constants {len(kinds['published'])} come from a published table or "
        f"follow from one, {len(kinds['fitted'])} ({', '.join(f'`{name}`' for name in kinds['fitted'])}) is fitted on "
        f"published times of other kernels, and {len(kinds['guess'])} are guesses: "
        f"{', '.join(f'`{name}`' for name in kinds['guess'])}."
    )


def _device(found: dict[str, Any]) -> str:
    device = found.get("device", "a CUDA GPU")
    return str(device.get("name", device)) if isinstance(device, dict) else str(device)


@block("cuda", "cuda")
def cuda(records: Records) -> str:
    """The same sources on a GPU: measured."""
    found = records["cuda"]
    rows = []
    for row in found["rows"]:
        cells = [row["case"], row["status"], str(row.get("heads") or "-"), number(row.get("errors"), 2)]
        cells += [number(row.get(name)) for name in ("ms", "sdpa_ms", "ratio")]
        rows.append([*cells, row.get("message") or ""])
    header = ["case", "status", "heads checked", "largest error", "ms, measured", "SDPA ms, measured", "SDPA / own"]
    text = f"On {_device(found)}; every time in this table is measured."
    return text + "\n\n" + table([*header, "note"], rows, left=(0, 1, 7))
