"""Compile kernels for Ascend as far as there is open code.

Run by `verify.ascend`, in a Python of its own that has triton-ascend and ascendnpu-ir and not much
else. Reads from standard input JSON `{"package", "path", "jobs"}`: the folder of this package,
folders to import other kernels from, and jobs `{"kernel", "types", "constants", "target"}`, the
last being Ascend's name of a chip. Writes a list of results, one a job:

* `stage`: "frontend", "adapter" or "middle end", whichever refused it, or "accepted";
* `refusal`: what that stage said, empty if accepted;
* `names`: the kernel's run-time arguments, in order;
* `ttir`, `hivm`: Triton's IR, and the last one before the closed code generator, if reached.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
import types
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import triton
from triton._C.libtriton import ir
from triton.backends.ascend.compiler import AscendBackend, make_ttir
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.compiler.errors import CompilationError

TRITON = Path(triton.__file__).parent
ADAPTER = TRITON / "backends" / "ascend" / "triton-adapter-opt"
MIDDLE_END = TRITON.parent / "ascendnpuir" / "bin" / "bishengir-compile"

#: The passes and flags are those that triton-ascend 3.2.0 itself gives for this chip.
_NOT_SIMT = "compile-on-910-95=False force-simt-template=False"
ADAPTER_FLAGS = (
    f"--discrete-mask-access-conversion={_NOT_SIMT}",
    "--triton-to-annotation",
    f"--triton-to-unstructure={_NOT_SIMT}",
    "--triton-to-hivm",
    "--triton-to-hfusion",
    "--triton-to-llvm",
    "--bubble-up-operation",
    "--triton-to-linalg=global-kernel=false named-ops=True enable-nd2nz-on-vector=False "
    "enable-select-analysis=False compile-on-910-95=False",
)
MIDDLE_END_FLAGS = (
    "--enable-auto-multi-buffer=True",
    "--enable-auto-bind-sub-block=True",
    "--enable-hfusion-compile=true",
    "--enable-hivm-compile=true",
    "--enable-triton-kernel-compile=true",
)
#: What the adapter says of every sum and maximum when it prints no locations. Nothing else passes.
NOISE = re.compile(
    r"(warning: linalg\.yield .* no location!|note: .* operation: linalg\.yield .*|)"
)

#: In the place of the code generator: keeps its input and makes an empty output.
HIVMC = """#!/bin/sh
for a in "$@"; do [ "$a" = --version ] && { echo "hivmc 1.2.0"; exit 0; }; done
for a in "$@"; do [ -f "$a" ] && cp "$a" "$HIVM_OUT"; done
before=; for a in "$@"; do [ "$before" = -o ] && : > "$a"; before=$a; done
"""


class _RefusedError(Exception):
    """A stage said no."""


def _type(name: str, types: dict[str, str]) -> str:
    """Triton's name of an argument's type: what the job says, or that of an integer."""
    return types.get(name) or types.get("strides" if "stride" in name else "counts", "i32")


def _frontend(job: dict[str, Any]) -> dict[str, Any]:
    """Triton's own stage: from Python to its IR."""
    module, _, name = job["kernel"].partition(":")
    kernel = getattr(importlib.import_module(module), name)
    names = [name for name in kernel.arg_names if name not in job["constants"]]
    signature = {name: _type(name, job["types"]) for name in names}
    source = ASTSource(fn=kernel, signature=signature, constants=job["constants"])
    backend = AscendBackend(GPUTarget("npu", job["target"], 0))
    options = backend.parse_options({})
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    result = {"stage": "frontend", "refusal": "", "names": names, "ttir": "", "hivm": ""}
    try:
        functions = backend.get_codegen_implementation()
        module_ir = source.make_ir(options, functions, backend.get_module_map(), context)
    except CompilationError as error:
        cause: BaseException = error
        while cause.__cause__ is not None:
            cause = cause.__cause__
        return {**result, "refusal": str(cause).strip().splitlines()[-1]}
    return {**result, "ttir": str(make_ttir(module_ir, {"hash": ""}, options))}


def _run(command: list[str], **environment: str) -> None:
    """Run a stage. What it prints is a refusal, noise apart: the adapter fails and exits with 0."""
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env={**os.environ, **environment}
    )
    lines = [line.removeprefix("<unknown>:0: ").strip() for line in done.stderr.splitlines()]
    said = [line for line in lines if not NOISE.fullmatch(line)]
    if done.returncode or said:
        telling = re.findall(r"(?:error|ERROR): *(.+)|(Assertion.+)", "\n".join(said))
        lines = [one or other for one, other in telling] or said[:1]
        reason = "; ".join(dict.fromkeys(line[:200] for line in lines[:2]))
        raise _RefusedError(f"{reason} (exit status {done.returncode})")


def _lower(result: dict[str, Any], target: str) -> dict[str, Any]:
    """Ascend's stages: from Triton's IR to the last before machine code."""
    if result["refusal"]:
        return result
    stage = "adapter"
    with tempfile.TemporaryDirectory() as folder:
        ttir, linalg, hivm, hivmc = (
            Path(folder, name) for name in ("ttir", "linalg", "hivm", "hivmc")
        )
        ttir.write_text(result["ttir"])
        hivmc.write_text(HIVMC)
        hivmc.chmod(0o755)
        try:
            _run([str(ADAPTER), str(ttir), *ADAPTER_FLAGS, "-o", str(linalg)])
            # triton-ascend takes this attribute out too before it goes on.
            linalg.write_text(re.sub(r', mix_mode\s*=\s*"[^"]*"', "", linalg.read_text()))
            stage = "middle end"
            flags = [f"--target={target}", *MIDDLE_END_FLAGS, "-o", str(Path(folder, "kernel"))]
            _run(
                [str(MIDDLE_END), str(linalg), *flags],
                PATH=os.pathsep.join((folder, os.environ.get("PATH", ""))),
                HIVM_OUT=str(hivm),
            )
        except _RefusedError as refused:
            return {**result, "stage": stage, "refusal": str(refused)}
        return {**result, "stage": "accepted", "hivm": hivm.read_text()}


def main() -> None:
    """Do the jobs on standard input."""
    for needed in (ADAPTER, MIDDLE_END):
        if not needed.exists():
            raise ImportError(f"there is no {needed.name}")
    request = json.load(sys.stdin)
    # The package without its __init__, and so without what that needs and this Python lacks.
    package = types.ModuleType("dsv4_prologue")
    package.__path__ = [request["package"]]
    sys.modules["dsv4_prologue"] = package
    sys.path += request["path"]
    jobs = request["jobs"]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        results = pool.map(
            _lower, [_frontend(job) for job in jobs], [job["target"] for job in jobs]
        )
        json.dump(list(results), sys.stdout)


if __name__ == "__main__":
    main()
