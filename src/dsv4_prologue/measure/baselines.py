"""What ours is measured against, each with its provenance, or with the reason why it is not there.

    copy                         the limit: a bare copy of the same useful bytes
    eager                        the composition of torch operations, on the device
    portable                     two launches of Triton, one program a unit (`measure.portable`)
    vllm                         the operator of the vLLM installed here
    library:PATH:namespace.op    the operator of any shared library that registers it with torch

A baseline that cannot be had is a value with a reason, and so is one that cannot be launched:
`probe` finds those. `copy` has no operator and is not found here; `ceilings` has it.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.metadata
import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from dsv4_prologue.contract import HEAD_DIM, ROPE_DIM, PageLayout
from dsv4_prologue.op import fused_deepseek_v4_qnorm_rope_kv_rope_quant_insert as fused
from dsv4_prologue.selection import select, use_card
from dsv4_prologue.verify.conformance import RefusedError

OPERATOR = "fused_deepseek_v4_qnorm_rope_kv_rope_quant_insert"
#: `copy` and `parts` are no operators: bare copies, and parts of our own call.
NO_OPERATORS = ("copy", "parts")
NAMES = (*NO_OPERATORS, "eager", "portable", "vllm")

#: Ours by the form of the call: what it does with Q. A baseline is compared with the same form.
IN_PLACE, BUFFER, NEW = "in place", "buffer", "new tensor"

#: Head counts that the operators with an argument `q_head_padded` write.
PADDED_HEADS = (8, 16, 32, 64, 128)
#: The trailing flags of the 13-argument schema, and the values that ask for our contract.
_FLAGS = {
    "apply_q_norm": True,
    "kv_mxfp8": False,
    "apply_q_rope": True,
    "is_q_interleaved": False,
}
_SIX = ("Tensor",) * 6
_IN_PLACE = (*_SIX, "float", "int")
_OUT_OF_PLACE = (*_SIX, "int", "float", "int")
#: What the composition holds at a time, beside the arguments: on a device its chunks are of 1 GiB
#: of f32, of which a few copies live at once. In bytes.
EAGER_BYTES = 4 << 30

Call = Callable[[], object]


class RequestError(ValueError):
    """What was asked for cannot be measured here."""


class Inputs(NamedTuple):
    """The eight arguments of one call, in their order; contiguous, so that every baseline takes
    them.
    """

    q: Tensor  # bf16 [N, H, 512]
    kv: Tensor  # bf16 [N, 512]
    k_cache: Tensor  # uint8 [pages, bytes], page stride rounded up to a multiple of 576
    slot_mapping: Tensor  # int64 [N], all of them in the cache, shuffled
    position_ids: Tensor  # int64 [N], random
    cos_sin_cache: Tensor  # f32 [max_pos, 64]
    eps: float = 1e-6
    cache_block_size: int = 64


def make_inputs(
    num_tokens: int, num_heads: int, device: torch.device, *, seed: int = 0, max_pos: int = 8192
) -> Inputs:
    """Random numbers of an engine's size, for timing; what is checked is made of worse."""
    page, pages = PageLayout(64), num_tokens // 64 + 2
    cache = torch.zeros(pages, page.usual_stride, dtype=torch.uint8, device=device)
    index = torch.empty(2, -(-num_tokens // 2) * 2, dtype=torch.int64, device=device)
    inputs = Inputs(
        torch.empty(num_tokens, num_heads, HEAD_DIM, dtype=torch.bfloat16, device=device),
        torch.empty(num_tokens, HEAD_DIM, dtype=torch.bfloat16, device=device),
        cache[:, : page.payload_bytes],
        index[0, :num_tokens],  # both aligned to 16 bytes
        index[1, :num_tokens],
        torch.empty(max_pos, ROPE_DIM, dtype=torch.float32, device=device),
    )
    fill_inputs(inputs, seed)
    return inputs


def fill_inputs(inputs: Inputs, seed: int) -> None:
    """Fill what is read anew, from a seed; the cache is left as it is."""
    make = torch.Generator(device=inputs.q.device).manual_seed(seed)
    inputs.q.normal_(generator=make)
    inputs.kv.normal_(generator=make)
    slots = inputs.k_cache.shape[0] * inputs.cache_block_size
    shuffled = torch.randperm(slots, generator=make, device=inputs.q.device)
    inputs.slot_mapping.copy_(shuffled[: inputs.q.shape[0]])
    inputs.position_ids.random_(inputs.cos_sin_cache.shape[0], generator=make)
    cos, sin = inputs.cos_sin_cache.chunk(2, dim=1)
    torch.sin(cos.uniform_(0, 6.3, generator=make), out=sin)
    cos.cos_()


@dataclass(frozen=True)
class Unavailable:
    """A baseline that is not there, or cannot run, and why."""

    name: str
    reason: str
    provenance: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Baseline:
    """An operator to be measured beside ours.

    `bind(inputs, **launch)` gives the call to be timed, which returns what the operator returns:
    None in place, else its new Q. `launches` are the launch arguments it may be given; the first
    is as shipped.
    """

    name: str
    forms: tuple[str, ...]  # of ours that do the same
    bind: Callable[..., Call]
    provenance: Mapping[str, Any]
    launches: tuple[Mapping[str, int], ...] = ({},)
    capturable: bool = True  # False: it synchronises, which no graph can hold
    extra_bytes: int = 0  # memory of a call beside its arguments and its result
    padded_heads: tuple[int, ...] | None = None  # the head counts it writes; None: any

    @property
    def in_place(self) -> bool:
        return IN_PLACE in self.forms

    def refusal(self, num_heads: int) -> str:
        """Why it cannot do what ours does with so many heads; empty if it can."""
        if self.padded_heads is not None and num_heads not in self.padded_heads:
            return f"writes one of {self.padded_heads} heads, not {num_heads}"
        return ""


def file_provenance(path: Path) -> dict[str, Any]:
    """Name, size and SHA-256 of a file."""
    total = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 24):
            total.update(block)
    return {"file": path.name, "bytes": path.stat().st_size, "sha256": total.hexdigest()}


def bind_operator(operator: Any, schema: torch.FunctionSchema) -> tuple[str, Callable[..., Call]]:
    """Recognise a registered schema; return the form of the call and how inputs are bound to it.

    Three are known, all beginning with our six tensors: 8 arguments with `eps` and the page size, Q
    changed in place; 9, with the heads to write before them, a new Q returned; and 13, with four
    flags behind. Raises ValueError, with the schema, for another.
    """
    kinds = tuple(str(argument.type) for argument in schema.arguments)
    returns = tuple(str(result.type) for result in schema.returns)
    alias = schema.arguments[0].alias_info if kinds else None
    changes_q = alias is not None and alias.is_write
    if kinds == _IN_PLACE and not returns and changes_q:
        return IN_PLACE, lambda inputs: partial(operator, *inputs)
    names = [argument.name for argument in schema.arguments[9:]]
    flags = tuple(_FLAGS[name] for name in names if name in _FLAGS)
    if (
        kinds == _OUT_OF_PLACE + ("bool",) * len(flags)
        and len(flags) in (0, len(_FLAGS))
        and returns == ("Tensor",)
        and not changes_q
    ):

        def bind(inputs: Inputs) -> Call:
            *tensors, eps, page_tokens = inputs
            heads = inputs.q.shape[1]
            return partial(operator, *tensors, heads, eps, page_tokens, *flags)

        return NEW, bind
    raise ValueError(f"its schema is none of the 8, 9 and 13 arguments known: {schema}")


def _registered(namespace: str, name: str) -> Any:
    """The operator torch knows under that name, or None."""
    return getattr(getattr(torch.ops, namespace), name, None)


def _from_torch(
    label: str, namespace: str, name: str, provenance: dict[str, Any]
) -> Baseline | Unavailable:
    """The registered operator as a baseline."""
    operator = _registered(namespace, name)
    if operator is None:
        return Unavailable(label, f"torch.ops.{namespace} has no {name}", provenance)
    schema = getattr(operator, operator.overloads()[0])._schema
    provenance |= {"operator": f"{namespace}.{name}", "schema": str(schema)}
    provenance |= {"launch": "its own", "patches": []}
    try:
        form, bind = bind_operator(operator, schema)
    except ValueError as error:
        return Unavailable(label, str(error), provenance)
    if form == IN_PLACE:
        return Baseline(label, (IN_PLACE,), bind, provenance)
    return Baseline(label, (BUFFER, NEW), bind, provenance, padded_heads=PADDED_HEADS)


def _eager(device: torch.device) -> Baseline | Unavailable:
    """Our composition of torch operations, which works on a few tokens at a time."""
    if select(device).card.kernel == "torch":
        return Unavailable("eager", f"it is what ours is on the card {select(device).card.name}")

    def bind(inputs: Inputs) -> Call:
        def call() -> None:
            with use_card("cpu"):
                fused(*inputs)

        return call

    provenance = {
        "package": "dsv4-prologue",
        "what": "kernels/composition.py, in chunks of 1 GiB of f32",
        "version": torch.__version__,
        "device": device.type,
        "patches": [],
    }
    return Baseline(
        "eager", (IN_PLACE,), bind, provenance, capturable=False, extra_bytes=EAGER_BYTES
    )


def _portable(device: torch.device) -> Baseline | Unavailable:
    if device.type == "cpu":
        return Unavailable("portable", "Triton compiles for no CPU")
    if importlib.util.find_spec("triton") is None:
        return Unavailable("portable", "Triton is not installed")
    import triton

    from dsv4_prologue.measure import portable

    cast = select(device).card.fp8_cast
    patches = [] if cast == "compiler" else ["the integer E4M3 encoder, for want of a cast"]
    provenance = {
        "package": "triton",
        "version": triton.__version__,
        **file_provenance(Path(portable.__file__)),
        "launch": "num_warps not given: 4",
        "patches": patches,
    }
    return Baseline(
        "portable",
        (IN_PLACE,),
        lambda inputs, **launch: partial(portable.run, *inputs, fp8_cast=cast, **launch),
        provenance,
        launches=({}, *({"num_warps": warps} for warps in (1, 2, 8))),
    )


def _vllm() -> Baseline | Unavailable:
    try:
        module = importlib.import_module("vllm._custom_ops")
    # What a broken or misplaced installation raises; anything else is a fault worth seeing.
    except (ImportError, AttributeError, OSError, RuntimeError) as error:
        return Unavailable("vllm", f"importing vllm._custom_ops: {first_line(error)}")
    provenance: dict[str, Any] = {"package": "vllm", "version": _version_of("vllm")}
    folder = Path(str(module.__file__)).parent
    provenance["files"] = [file_provenance(path) for path in sorted(folder.glob("_C*.so"))]
    return _from_torch("vllm", "_C", OPERATOR, provenance)


def _version_of(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def split_library(name: str) -> tuple[Path, str, str]:
    """`library:PATH:namespace.op` -> path, namespace, operator; RequestError for anything else."""
    kind, _, rest = name.partition(":")
    path, _, operator = rest.rpartition(":")
    namespace, _, op = operator.partition(".")
    if kind != "library" or not (path and namespace and op):
        raise RequestError(f"against: expected library:PATH:namespace.op, got {name!r}")
    return Path(path), namespace, op


def _library(name: str) -> Baseline | Unavailable:
    path, namespace, op = split_library(name)
    label = f"library:{path.name}"
    provenance = file_provenance(path)
    if _registered(namespace, op) is not None:
        return Unavailable(
            label, f"torch.ops.{namespace}.{op} is somebody else's in this process", provenance
        )
    try:
        torch.ops.load_library(str(path.resolve()))
    except (OSError, RuntimeError) as error:
        reason = first_line(error).replace(str(path.resolve()), path.name)
        return Unavailable(label, f"loading it: {reason}", provenance)
    return _from_torch(label, namespace, op, provenance)


def namespace_of(name: str) -> str | None:
    """The namespace of torch.ops that a baseline takes for itself, or None.

    Two that take the same one cannot live in one process.
    """
    if name == "vllm":
        return "_C"
    return split_library(name)[1] if name.startswith("library:") else None


def check_name(name: str) -> None:
    """Raise RequestError for what is no baseline's name, or a library that is not there."""
    if name.startswith("library:"):
        path, _, _ = split_library(name)
        if not path.is_file():
            raise RequestError(f"against: expected the file of a library, got {path}: no file")
    elif name not in NAMES:
        known = ", ".join(NAMES)
        raise RequestError(
            f"against: expected one of {known}, library:PATH:namespace.op, got {name!r}"
        )


def find(name: str, device: torch.device) -> Baseline | Unavailable:
    """The baseline of that name, loaded but not yet launched; not one of NO_OPERATORS.

    Raises RequestError for a name that is none.
    """
    check_name(name)
    if name == "eager":
        return _eager(device)
    if name == "portable":
        return _portable(device)
    return _vllm() if name == "vllm" else _library(name)


def first_line(error: BaseException) -> str:
    """An error in one line: its type, and the first line of what it says."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else 'no message'}"


def launch_errors() -> tuple[type[Exception], ...]:
    """What a launch that does not work raises: torch's, and Triton's compiler's."""
    if importlib.util.find_spec("triton") is None:
        return (RuntimeError, ValueError)
    from triton.errors import TritonError

    return (RuntimeError, ValueError, TritonError)


def _launch_and_wait(device: torch.device) -> None:
    module = torch.get_device_module(device)
    module.synchronize()
    torch.zeros(1, device=device).add_(1)
    module.synchronize()


def as_prologue(baseline: Baseline) -> Callable[..., Tensor]:
    """A baseline called as `prologue` is, with its inputs by name; returns its Q.

    What it changes in place is a copy of q, and a q_out gets a copy of its result. Raises
    RefusedError for a call that it does not have.
    """

    def operator(**arguments: Any) -> Tensor:
        inputs = Inputs(*(arguments[name] for name in Inputs._fields))
        reason = baseline.refusal(inputs.q.shape[1])
        if reason:
            raise RefusedError(reason)
        if baseline.in_place:
            inputs = inputs._replace(q=inputs.q.clone())
        try:
            result = baseline.bind(inputs)()
        except launch_errors() as error:
            raise RefusedError(first_line(error)) from error
        q_out: Tensor = inputs.q if baseline.in_place else cast("Tensor", result)
        wanted: Tensor | None = arguments.get("q_out")
        return q_out if wanted is None else wanted.copy_(q_out)

    return operator


def probe(baseline: Baseline, device: torch.device, **launch: int) -> str:
    """Launch it once; return why that cannot be done here, or nothing if it can.

    On some devices a failed launch shows neither at the call nor when the device is waited for,
    but only at the next launch, whosever that is; so there is one. Raises RuntimeError if the
    device is not usable afterwards: no figure of this process could be believed.
    """
    inputs = make_inputs(2, 64, device, max_pos=16)
    errors = launch_errors()
    try:
        baseline.bind(inputs, **launch)()
        _launch_and_wait(device)
    except errors as error:
        reason = first_line(error)
    else:
        return ""
    try:
        _launch_and_wait(device)
    except errors as error:
        raise RuntimeError(
            f"{baseline.name} left the device unusable: {reason}; then {first_line(error)}"
        ) from error
    return f"it cannot be launched: {reason}"
