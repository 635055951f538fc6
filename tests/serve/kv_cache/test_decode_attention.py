"""The Triton programs that attend for all texts of a step, in Triton's interpreter, and compiled for a GPU that need not be there."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")


@pytest.mark.parametrize(
    "name",
    [
        "agrees_with_attention_text_by_text",
        "a_text_has_the_same_bits_alone",
        "narrow_formats_store_rounded_rows",
        "latents_are_stored_together_and_attended_text_by_text",
        "a_text_that_has_grown_is_found_at_its_new_place",
    ],
)
def test_attention_of_all_texts_has_this_property_in_triton_s_interpreter(name: str) -> None:
    ended = subprocess.run(
        [sys.executable, Path(__file__).with_name("interpreted_attention.py"), name],
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 0, ended.stderr


FOR_HOPPER = """
import itertools
import re
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from phalanx_serve.kv_cache import decode_attention as programs

ALIGNED = ("table", "query", "key", "value", "out", "parts", "sums")

def made(program, pointers, numbers, floats, fixed):
    signature = pointers | dict.fromkeys(numbers, "i32") | dict.fromkeys(floats, "fp32")
    names = program.arg_names
    signature = {name: signature.get(name, "constexpr") for name in names}
    attributes = {(names.index(name),): [["tt.divisibility", 16]] for name in ALIGNED if name in pointers}
    source = ASTSource(program, signature, constexprs=fixed, attrs=attributes)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4, "num_stages": 2})

for dtype, nbytes in (("bf16", 2), ("fp16", 2), ("fp32", 4)):
    for width, (sinks, capped) in itertools.product((64, 128), ((False, False), (True, True))):
        block, of_sinks = programs.block_of(width), {"sinks": f"*{dtype}"} if sinks else {}
        none = {} if sinks else {"sinks": None}
        sums = {"out": f"*{dtype}", "parts": "*fp32", "sums": "*fp32"} | of_sinks
        table = {"table": "*i64"}
        shape = {"WIDTH": width, "BLOCK": block, "LOG2_E": 1.4426950408889634}
        attend = made(
            programs.attend_program,
            table | {"query": f"*{dtype}"} | sums,
            ["rows_at", "splits_at", "layer", "query_head", "query_row"],
            ["scale", "cap"],
            shape | none | {"GROUP": 4, "CHUNKS": 1, "HEADS": 16, "TILE": programs.tile_of(width, nbytes), "CAPPED": capped},
        )
        combine = made(programs.combine_program, table | sums, ["joints_at"], [], shape | none | {"SLOTS": 16})
        store = made(
            programs.store_program,
            table | {"key": f"*{dtype}", "value": f"*{dtype}"},
            ["rows_at", "layer", "key_head", "key_row", "value_head", "value_row"],
            [],
            {"KEY_WIDTH": width, "VALUE_WIDTH": width, "KEY_BLOCK": block, "VALUE_BLOCK": block},
        )
        ptx = attend.asm["ptx"]
        copies = re.findall(r"cp[.]async[.]cg[.]shared[.]global .*, 0x10, ", ptx)
        print(
            all(len(program.asm["cubin"]) > 0 for program in (attend, combine, store)),
            attend.metadata.shared < 100 << 10,
            len(copies) > 0,
            "mma.sync" in ptx,
        )
"""
"""Compiles for a GPU that need not be there: cubin, shared memory of the smaller GPUs, copies of 16 bytes, tensor cores."""


def test_the_programs_compile_for_hopper_and_read_keys_in_the_widest_copies() -> None:
    ended = subprocess.run([sys.executable, "-c", FOR_HOPPER], capture_output=True, text=True)
    expected = 8 * ["True True True True"] + 4 * ["True True True False"]
    assert ended.stdout.splitlines() == expected, ended.stderr
