"""Writes csrc/cuda/common/wgmma_sm90.cuh: one wrapper for each shape of Hopper's warpgroup product that we use.

python tools/gen_wgmma.py writes the file; with --check it says whether the file is fresh (exit status 1: it is not).
"""

import sys
from pathlib import Path

TARGET = Path(__file__).parents[1] / "csrc/cuda/common/wgmma_sm90.cuh"
# N, and what A and B are: in registers, in shared memory with the depth contiguous, there with M or N contiguous
SHAPES = [(64, "ss"), (80, "ss"), (128, "ss"), (64, "rs"), (80, "rs"), (128, "rs"), (256, "rs")]
DTYPES = {
    "bf16": [*SHAPES, (72, "rs"), (64, "rk"), (64, "st"), (256, "ss"), (256, "st"), (256, "tt")],
    "f16": SHAPES,
}

HEAD = """/* wgmma_sm90.cuh -- written by tools/gen_wgmma.py; change that.
 *
 * d[N / 2] = (keep ? d : 0) + A B, m64 nN k16, float32 sums. `ss`: A and B from shared memory, both K-major. `rs`: A
 * from registers, B from shared memory with N contiguous (the transposed operand). `st`, `tt`: from shared memory, B or
 * both transposed. `rk`: A from registers, B K-major. a and b are matrix descriptors.
 */
#ifndef WGMMA_SM90_CUH
#define WGMMA_SM90_CUH

#include <stdint.h>

namespace ptx
{
"""

TAIL = """
} // namespace ptx

#endif
"""


def lines_of(items, each):
    """The items, comma-separated, `each` to a line."""
    return [", ".join(items[i : i + each]) for i in range(0, len(items), each)]


def wrapper(n, kind, dtype):
    """One function."""
    count = n // 2
    places = lines_of([f"%{i}" for i in range(count)], 16)
    if kind[0] != "r":
        a_type, a_place, a_inputs = "uint64_t a", f"%{count}", ['"l"(a)']
        transposed = ", ".join("1" if operand == "t" else "0" for operand in kind)
    else:
        a_type = "const uint32_t (&a)[4]"
        a_place = "{" + ", ".join(f"%{count + i}" for i in range(4)) + "}"
        a_inputs, transposed = [f'"r"(a[{i}])' for i in range(4)], "1" if kind == "rs" else "0"
    b = count + len(a_inputs)
    sums = lines_of([f'"+f"(d[{i}])' for i in range(count)], 8)
    inputs = ", ".join([*a_inputs, '"l"(b)', '"r"(static_cast<int>(keep))'])
    body = [
        f"__device__ inline void wgmma_m64n{n}k16_{dtype}_{kind}(float (&d)[{count}], {a_type}, uint64_t b, bool keep)",
        "{",
        '    asm volatile("{\\n"',
        '                 ".reg .pred keep;\\n"',
        f'                 "setp.ne.b32 keep, %{b + 1}, 0;\\n"',
        f'                 "wgmma.mma_async.sync.aligned.m64n{n}k16.f32.{dtype}.{dtype} "',
        *(
            f'                 "{"{" if i == 0 else " "}{line}{"}" if i == len(places) - 1 else ""}, "'
            for i, line in enumerate(places)
        ),
        f'                 "{a_place}, %{b}, keep, 1, 1, {transposed};\\n"',
        '                 "}\\n"',
        *(
            f"                 {':' if i == 0 else ' '} {line}{',' if i < len(sums) - 1 else ''}"
            for i, line in enumerate(sums)
        ),
        f"                 : {inputs});",
        "}",
    ]
    return "\n".join(body)


def text():
    """The whole file."""
    functions = "\n\n".join(wrapper(n, kind, dtype) for dtype, shapes in DTYPES.items() for n, kind in shapes)
    return f"{HEAD}\n/* clang-format off */\n{functions}\n/* clang-format on */\n{TAIL}"


def main(argv):
    if "--check" in argv:
        fresh = TARGET.exists() and TARGET.read_text() == text()
        print(f"{TARGET.name} is {'fresh' if fresh else 'stale: run tools/gen_wgmma.py'}")
        return 0 if fresh else 1
    TARGET.write_text(text())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
