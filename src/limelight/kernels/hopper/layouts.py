"""How products lie in the registers of a warpgroup, and how they become operands."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.constexpr_function
def products_layout(columns):
    """Of the product of a warpgroup's rows with a tile that has so many columns."""
    return gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, columns, 16]
    )


@gluon.constexpr_function
def _conversion(dtype):
    return f"cvt.rn.{'bf16x2' if dtype == gl.bfloat16 else 'f16x2'}.f32 $0, $2, $1;"


@gluon.jit
def rounded(numbers, like):
    """As numbers of 16 bits, two in a register. like: a tile of their dtype.

    Carried to the next step, the compiler's own conversions are packed the wrong way round.
    """
    return gl.inline_asm_elementwise(
        _conversion(like.dtype), "=r,r,r", [numbers], dtype=like.dtype, is_pure=True, pack=2
    )


@gluon.constexpr_function
def _reversal(dtype):
    if dtype == gl.bfloat16:
        return "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;"
    return "{ .reg .b16 a, b; mov.b32 {a, b}, $2; cvt.f32.f16 $0, a; cvt.f32.f16 $1, b; }"


@gluon.jit
def widened(numbers):
    """Rounded numbers in float32. The compiler's own way takes twice as many instructions."""
    return gl.inline_asm_elementwise(
        _reversal(numbers.dtype), "=r,=r,r", [numbers], dtype=gl.float32, is_pure=False, pack=2
    )


@gluon.jit
def operand(numbers, COLUMNS: gl.constexpr):
    """Rounded numbers as the left operand of a product with so many columns.

    They stay in the same registers.
    """
    layout: gl.constexpr = gl.DotOperandLayout(
        operand_index=0, parent=products_layout(COLUMNS), k_width=2
    )
    return gl.convert_layout(numbers, layout)
