"""The process in which `compilers` and `lanes` compile: one JSON job a line in, one result out.

A process of its own, since a Triton imported under TRITON_INTERPRET=1 compiles nothing and since
LLVM aborts its process on some of what it refuses. Standard error is a file open for reading too;
it is cut at the start of each job, so what it holds speaks of the job that was last begun.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import triton
from triton._C.libtriton import ir, passes
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.compiler.compiler import make_backend
from triton.errors import TritonError

#: Before, passes and sources are called in other ways, and AMD's linker is no part of it.
TOO_OLD = "compiling for a card that is not there needs Triton 3.6"


def _source(job: dict[str, Any]) -> Any:
    """The kernel with its arguments' types; a pointer that the job does not name is None."""
    if tuple(int(part) for part in triton.__version__.split(".")[:2]) < (3, 6):
        raise RuntimeError(f"{TOO_OLD}, and this is {triton.__version__}")
    module, name = job["kernel"].split(":")
    kernel = getattr(importlib.import_module(module), name)
    signature: dict[str, str] = {}
    constants: dict[tuple[int], Any] = {}
    attributes: dict[tuple[int], list[list[Any]]] = {}
    for index, parameter in enumerate(kernel.params):
        absent = parameter.name.endswith("_ptr") and parameter.name not in job["types"]
        if parameter.is_constexpr or absent:
            signature[parameter.name] = "constexpr"
            constants[index,] = None if absent else job["constants"][parameter.name]
            continue
        signature[parameter.name] = job["types"].get(parameter.name, "i32")
        if job["aligned"] and not parameter.do_not_specialize:
            attributes[index,] = [["tt.divisibility", 16]]
    return ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)


def _options(job: dict[str, Any]) -> dict[str, Any]:
    return {k: tuple(v) if isinstance(v, list) else v for k, v in job["options"].items()}


def _assembly(job: dict[str, Any]) -> dict[str, Any]:
    """Compile to the end; return the assembly, which for NVIDIA is read back from the cubin."""
    compiled = triton.compile(_source(job), target=GPUTarget(*job["target"]), options=_options(job))
    if "cubin" not in compiled.asm:
        return {"shared": compiled.metadata.shared, "text": compiled.asm["amdgcn"]}
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
        command = [str(tool), "-res-usage", "-sass", file.name]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return {"shared": compiled.metadata.shared, "text": done.stdout}


def _layouts(job: dict[str, Any]) -> dict[str, Any]:
    """Run the passes that vendors' compilers share with upstream, for that many lanes a warp.

    The front end is NVIDIA's, whose only say is which fp8 types exist.
    """
    name, lanes, num_warps = job["layouts_for"], job["lanes"], job["options"]["num_warps"]
    target = GPUTarget("cuda", 90, 32)
    backend = make_backend(target)
    options = backend.parse_options(_options(job))
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    code = backend.get_codegen_implementation(options)
    module = _source(job).make_ir(target, options, code, backend.get_module_map(), context)

    manager = ir.pass_manager(context)
    passes.common.add_inliner(manager)
    passes.common.add_canonicalizer(manager)
    passes.ttir.add_combine(manager)
    passes.ttir.add_reorder_broadcast(manager)
    passes.common.add_cse(manager)
    passes.common.add_symbol_dce(manager)
    passes.ttir.add_loop_unroll(manager)
    passes.ttir.add_convert_to_ttgpuir(manager, name, num_warps, lanes, 1)
    passes.ttgpuir.add_coalesce(manager)
    passes.ttgpuir.add_remove_layout_conversions(manager)
    passes.ttgpuir.add_optimize_thread_locality(manager)
    passes.ttgpuir.add_remove_layout_conversions(manager)
    passes.ttgpuir.add_reduce_data_duplication(manager)
    passes.common.add_cse(manager)
    passes.common.add_canonicalizer(manager)
    manager.run(module, "layouts")
    text = str(module)

    manager = ir.pass_manager(context)
    passes.convert.add_scf_to_cf(manager)
    passes.ttgpuir.add_allocate_shared_memory(manager)
    manager.run(module, "shared")
    return {"shared": module.get_int_attr("ttg.shared"), "text": text}


def _innermost(error: BaseException) -> str:
    while error.__cause__ is not None:
        error = error.__cause__
    return str(getattr(error, "error_message", None) or error)


def main() -> None:
    """Serve the jobs of standard input. What is no refusal ends the process with its traceback."""
    results = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what Triton prints is no result
    for line in sys.stdin:
        os.ftruncate(sys.stderr.fileno(), 0)
        job = json.loads(line)
        result: dict[str, Any] = {}
        try:
            result = _layouts(job) if "lanes" in job else _assembly(job)
        except (TritonError, RuntimeError, subprocess.CalledProcessError) as error:
            result["refusal"] = _innermost(error)
        result["log"] = os.pread(sys.stderr.fileno(), 1 << 20, 0).decode(errors="replace")
        print(json.dumps(result), file=results, flush=True)


if __name__ == "__main__":
    main()
