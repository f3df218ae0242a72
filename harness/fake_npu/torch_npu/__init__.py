"""The fake torch_npu: NPU tensors in host memory, the vendor's attention in fp32 torch, Triton
kernels on the virtual NPU, and a clock that only work on the device moves.

It is strict where the real one is, or is silently wrong: signatures come from signatures.toml
(an unknown keyword is a TypeError), tensors of the host and of the device do not mix, events
need enable_timing and a synchronize, fresh memory is NaN, and the pitfalls of
npu_fusion_attention are as documented: scale defaults to 1, True in atten_mask means masked
out, sparse_mode counts only with atten_mask, modes 2 and 3 want the 2048x2048 mask.

Environment: FAKE_NPU_RECORD names a file that gets one JSON line for each call. FAKE_NPU is
a JSON object: chip, cann, torch_npu (versions to pretend), fail (names of interfaces that
raise), slow (milliseconds by operator or kernel name).
"""

from __future__ import annotations

import hashlib
import inspect
import json
import math
import os
import re
import sys
import tomllib
import types
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_TABLE = tomllib.loads((Path(__file__).resolve().parent.parent / "signatures.toml").read_text())
_PRETEND: dict[str, Any] = json.loads(os.environ.get("FAKE_NPU", "{}"))
__version__ = str(_PRETEND.get("torch_npu", _TABLE["version"]))
OP_MS, KERNEL_MS, VENDOR_MS = 0.01, 1.0, 2.0
MOST_VALUES = 1 << 22  # elements of a launch's tensors; larger launches are timed, not computed
_clock_ms = 0.0


def _signature(text: str) -> inspect.Signature:
    """Of `name(a, b=1)`, or of an operator's schema."""
    inside = text[text.index("(") + 1 : text.rindex(")", 0, text.find(" -> ") if " -> " in text else len(text))]
    words = re.sub(r"(?:Tensor|int|float|bool|str)(?:\[\])?\?? (?=\w)", "", inside)
    scope: dict[str, Any] = {}
    exec(f"def function({words}): pass", scope)  # noqa: S102 (text of this folder)
    return inspect.signature(scope["function"])


SIGNATURES = {
    entry["name"]: _signature(entry.get("schema") or entry["signature"])
    for entry in (*_TABLE["operator"], *_TABLE["function"])
    if "schema" in entry or "signature" in entry
}


def _called(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Check a call against its signature, write it down, and fail if this one shall fail."""
    try:
        bound = SIGNATURES[name].bind(*args, **kwargs)
    except TypeError as error:
        raise TypeError(f"{name}: {error}") from None
    path = os.environ.get("FAKE_NPU_RECORD")
    if path:
        shown = {key: _shown(value) for key, value in bound.arguments.items() if key not in ("self", "cls")}
        with open(path, "a") as file:
            file.write(json.dumps({"call": name, "pid": os.getpid(), **shown}) + "\n")
    if name in _PRETEND.get("fail", ()):
        raise RuntimeError(f"{name}: the fake was told to fail")
    bound.apply_defaults()
    return dict(bound.arguments)


def _shown(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return f"{value.dtype} {list(value.shape)}"
    return value if isinstance(value, (int, float, str, bool, type(None))) else type(value).__name__


def _advance(ms: float) -> None:
    global _clock_ms
    _clock_ms += ms


# Tensors


class NpuTensor(torch.Tensor):
    """A tensor of the device; its memory is the host's."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _torch_function(func, args, kwargs or {})


_ACROSS = ("copy_", "set_")  # may mix tensors of the host and of the device
_DESCRIPTORS: dict[Any, Any] = {}  # what an attribute of a tensor of the device is
_FRESH = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")


def _is_npu(device: Any) -> bool:
    return device is not None and torch.device(device).type == "npu"


def _walk(value: Any, change: Any) -> Any:
    if isinstance(value, (tuple, list)) and not isinstance(value, torch.Size):
        changed = [_walk(one, change) for one in value]
        return type(value)(changed)
    return change(value)


def _plain(value: Any) -> Any:
    return value.as_subclass(torch.Tensor) if isinstance(value, NpuTensor) else value


def _wrapped(value: Any) -> Any:
    whole = isinstance(value, torch.Tensor) and not isinstance(value, NpuTensor)
    return value.as_subclass(NpuTensor) if whole else value


def _torch_function(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Any torch call: on host memory, with the result on the device where it belongs there."""
    name = getattr(func, "__name__", "")
    found: list[Any] = []
    _walk((*args, *kwargs.values()), found.append)
    tensors = [x for x in found if isinstance(x, torch.Tensor)]
    with torch._C.DisableTorchFunctionSubclass():
        on_npu = any(isinstance(x, NpuTensor) for x in tensors)
        if on_npu and name == "__get__" and func.__self__ in _DESCRIPTORS:
            return _DESCRIPTORS[func.__self__]
        strangers = [x for x in tensors if not isinstance(x, NpuTensor) and x.dim()]
        if on_npu and strangers and name not in _ACROSS:
            raise RuntimeError(f"Expected all tensors to be on the same device, but found npu:0 and cpu in {name}")
        target = on_npu and name != "cpu"
        named = [x for x in (kwargs.get("device"), *args[1:2] * (name == "to")) if isinstance(x, (str, torch.device))]
        if named:
            target = _is_npu(named[0])
            kwargs = {key: "cpu" if key == "device" else x for key, x in kwargs.items()}
            args = tuple("cpu" if i == 1 and name == "to" and x is named[0] else x for i, x in enumerate(args))
        result = func(*args, **kwargs)
        if on_npu != target and name in ("to", "cpu"):
            result = result.clone()  # a copy, never an alias of the other memory
        if not target:
            return _walk(result, _plain) if on_npu else result
        if name in _FRESH and result.is_floating_point():
            result.fill_(torch.nan)
        _advance(OP_MS)
        return _walk(result, _wrapped)


class _Mode(TorchFunctionMode):
    """Sees factory functions too."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _torch_function(func, args, kwargs or {})


# torch.npu


class _Properties:
    name, cube_core_num, vector_core_num, L2_cache_size = "Ascend910B3", 20, 40, 1 << 20
    total_memory = 64 << 30


class Event:
    """As torch.npu.Event, on the fake's clock."""

    timed: bool
    at: float | None

    def __new__(cls, *args: Any, **kwargs: Any) -> Event:
        given = _called("torch.npu.Event.__new__", (cls, *args), kwargs)
        event = super().__new__(cls)
        event.timed, event.at = given["enable_timing"], None
        return event

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def record(self, *args: Any, **kwargs: Any) -> None:
        _called("torch.npu.Event.record", (self, *args), kwargs)
        self.at, _Npu.pending = _clock_ms, True

    def elapsed_time(self, *args: Any, **kwargs: Any) -> float:
        end = _called("torch.npu.Event.elapsed_time", (self, *args), kwargs)["end_event"]
        if not (self.timed and end.timed):
            raise RuntimeError("elapsed_time needs events with enable_timing=True")
        if self.at is None or end.at is None:
            raise RuntimeError("elapsed_time needs recorded events")
        if _Npu.pending:
            raise RuntimeError("elapsed_time before synchronize: the end event has not happened")
        return float(end.at - self.at)


class _Npu(types.ModuleType):
    pending = False
    Event = Event

    def is_available(self, *args: Any, **kwargs: Any) -> bool:
        _called("torch.npu.is_available", args, kwargs)
        return True

    def get_device_name(self, *args: Any, **kwargs: Any) -> str:
        _called("torch.npu.get_device_name", args, kwargs)
        return str(_PRETEND.get("chip", _Properties.name))

    def get_device_properties(self, *args: Any, **kwargs: Any) -> type[_Properties]:
        _called("torch.npu.get_device_properties", args, kwargs)
        return _Properties

    def get_device_limit(self, *args: Any, **kwargs: Any) -> dict[str, int]:
        _called("torch.npu.get_device_limit", args, kwargs)
        return {"cube_core_num": _Properties.cube_core_num, "vector_core_num": _Properties.vector_core_num}

    def synchronize(self, *args: Any, **kwargs: Any) -> None:
        _called("torch.npu.synchronize", args, kwargs)
        _Npu.pending = False


def _get_cann_version(*args: Any, **kwargs: Any) -> str:
    _called("torch.npu.utils.get_cann_version", args, kwargs)
    return str(_PRETEND.get("cann", "8.5.0"))


# The vendor's attention


def _visible(given: dict[str, Any], rows: int, keys: int) -> torch.Tensor | None:
    """Which keys a row sees, as npu_fusion_attention documents its mask and mode."""
    mask, mode = given["atten_mask"], given["sparse_mode"]
    if mask is None:
        return None  # sparse_mode is ignored
    if mask.dtype not in (torch.bool, torch.uint8):
        raise RuntimeError(f"atten_mask must be bool or uint8, got {mask.dtype}")
    hidden = _plain(mask).bool()
    if mode == 2:
        if list(hidden.shape) != [2048, 2048]:
            raise RuntimeError(f"sparse_mode 2 needs the compressed mask [2048, 2048], got {list(hidden.shape)}")
        # Blocks below the diagonal are seen, those on it as the mask says.
        row, key = torch.arange(rows)[:, None], torch.arange(keys)[None, :]
        return torch.where(row // 2048 == key // 2048, ~hidden[row % 2048, key % 2048], row > key)
    if mode in (0, 1):
        if list(hidden.shape[-2:]) != [rows, keys]:
            raise RuntimeError(f"sparse_mode {mode} needs a mask [..., {rows}, {keys}], got {list(hidden.shape)}")
        return ~hidden
    raise RuntimeError(f"sparse_mode {mode} is not in this fake")


def _attention(given: dict[str, Any], scale: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    for name in ("query", "key", "value"):
        if not isinstance(given[name], NpuTensor):
            raise RuntimeError(f"{name} must be on the NPU, got a tensor on the CPU")
    if given["input_layout"] != "BNSD":
        raise RuntimeError(f"input_layout {given['input_layout']} is not in this fake")
    if given["query"].shape[1] != given["head_num"]:
        raise RuntimeError(f"head_num must be {given['query'].shape[1]}, got {given['head_num']}")
    if given["keep_prob"] != 1:
        raise RuntimeError("dropout is not in this fake")
    q, k = (_plain(given[name]).float() for name in ("query", "key"))
    scores = q @ k.transpose(-1, -2) * scale
    visible = _visible(given, q.shape[2], k.shape[2])
    if visible is not None:
        scores = scores.masked_fill(~visible, -math.inf)
    highest = scores.amax(-1, keepdim=True)
    p = torch.exp(scores - highest)
    return p, highest, p.sum(-1, keepdim=True)


def npu_fusion_attention(*args: Any, **kwargs: Any) -> tuple[Any, ...]:
    """softmax(mask(scale q kᵀ)) v and the softmax's maximum and sum, [B, N, S, 8]."""
    given = _called("torch_npu.npu_fusion_attention", args, kwargs)
    with torch._C.DisableTorchFunction():
        p, highest, total = _attention(given, given["scale"])
        out = (p / total) @ _plain(given["value"]).float()
        wide = [x.expand(*x.shape[:3], 8).contiguous() for x in (highest, total)]
        _advance(_PRETEND.get("slow", {}).get("npu_fusion_attention", VENDOR_MS))
        tensors = (out.to(given["query"].dtype), *wide, torch.empty(0))
        return (*(x.as_subclass(NpuTensor) for x in tensors), 0, 0, 0)


def npu_fusion_attention_grad(*args: Any, **kwargs: Any) -> tuple[Any, ...]:
    """dq, dk, dv and two that are empty here."""
    given = _called("torch_npu.npu_fusion_attention_grad", args, kwargs)
    with torch._C.DisableTorchFunction():
        for name in ("softmax_max", "softmax_sum", "attention_in"):
            if not isinstance(given[name], NpuTensor):
                raise RuntimeError(f"{name} must be a tensor on the NPU")
        _attention(given, given["scale_value"])  # for its checks
        q, k, v, dout = (_plain(given[name]).float() for name in ("query", "key", "value", "dy"))
        raw = q @ k.transpose(-1, -2) * given["scale_value"]
        p = torch.exp(raw - _plain(given["softmax_max"])[..., :1]) / _plain(given["softmax_sum"])[..., :1]
        visible = _visible(given, q.shape[2], k.shape[2])
        if visible is not None:
            p = p.masked_fill(~visible, 0.0)
        delta = (dout * _plain(given["attention_in"]).float()).sum(-1, keepdim=True)
        ds = p * (dout @ v.transpose(-1, -2) - delta) * given["scale_value"]
        grads = ds @ k, ds.transpose(-1, -2) @ q, p.transpose(-1, -2) @ dout
        _advance(_PRETEND.get("slow", {}).get("npu_fusion_attention_grad", VENDOR_MS))
        tensors = (*(x.to(given["query"].dtype) for x in grads), torch.empty(0), torch.empty(0))
        return tuple(x.as_subclass(NpuTensor) for x in tensors)


# Triton: kernels with NPU tensors run on the virtual NPU


def _install_triton() -> None:
    repository = str(Path(__file__).resolve().parents[3])
    sys.path.append(repository)
    from harness import virtual_npu
    from harness.virtual_npu import driver as virtual

    sys.path.remove(repository)

    virtual_npu.install()
    known: dict[Any, Any] = {}

    class Launcher(virtual._Launcher):
        def __call__(self, *args: Any) -> None:
            with torch._C.DisableTorchFunction():
                tensors = [x for x in args[9:] if isinstance(x, torch.Tensor)]
                if any(not isinstance(x, NpuTensor) for x in tensors):
                    raise ValueError("Pointer argument cannot be accessed from Triton (cpu tensor?)")
                plain = [_plain(x) for x in args]
                own = [_plain(x) for x in tensors]
                program, name = args[4], args[4].name
                small = sum(x.numel() for x in own) <= MOST_VALUES
                key: Any = (program, args[:3], *(x for x in plain[9:] if isinstance(x, (int, float))))
                for x in own:
                    key += (tuple(x.shape), x.stride(), _digest(x) if small else None)
                if key not in known:
                    with virtual_npu.run(mode="values" if small else "timing") as recording:
                        super().__call__(*plain)
                    known[key] = ([x.clone() for x in own] if small else [], recording.ms or KERNEL_MS)
                elif small:  # the same work on the same bytes: repeats need not be computed again
                    for x, after in zip(own, known[key][0], strict=True):
                        x.copy_(after)
                _advance(_PRETEND.get("slow", {}).get(name, known[key][1]))

    class Driver(virtual.VirtualDriver):
        launcher_cls = Launcher

        def get_active_torch_device(self) -> torch.device:
            return torch.device("npu:0")

    from triton.runtime.driver import driver

    driver.set_active(Driver())


def _digest(tensor: torch.Tensor) -> bytes:
    return hashlib.sha256(tensor.contiguous().view(torch.uint8).numpy().tobytes()).digest()


def _install() -> None:
    torch.utils.rename_privateuse1_backend("npu")
    base = torch.Tensor.__base__.__dict__
    _DESCRIPTORS.update({base["device"]: torch.device("npu:0"), base["is_cpu"]: False})
    npu = _Npu("torch.npu")
    npu.utils = types.SimpleNamespace(get_cann_version=_get_cann_version)  # type: ignore[attr-defined]
    torch.npu = npu  # type: ignore[attr-defined]
    sys.modules["torch.npu"] = npu
    _install_triton()
    _Mode().__enter__()


_install()
