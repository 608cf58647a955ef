"""Where rows stand, from the send-count matrix alone: both sides compute the same, so no metadata travels.

Example, E = 4, R = 2, counts {2, 1, 0, 3} of rank 0 and {1, 1, 2, 0} of rank 1. Rank 0 owns experts 0 and 1 and receives 3
rows for expert 0 and 2 for expert 1: the run of (source 1, expert 1) begins at row 3 + 1 = 4. At rank 1 the run of (source
0, expert 3) begins at row 2.
"""

import triton
import triton.language as tl


@triton.jit
def column(matrix, stride, first, local, align, R: tl.constexpr, RP: tl.constexpr, ELP: tl.constexpr):
    """Rows that each source sends to one expert of an owner, and where the expert's rows begin.

    Args:
        matrix: pointer to int32; row r of the send-count matrix begins at ``matrix + r * stride``.
        first: the owner's first expert. local: the expert, counted from it.
        align: each expert's rows are padded to a multiple of this.
        RP, ELP: powers of two, at least R and the experts of any rank.

    Returns:
        (int32 [RP] rows by source, the expert's first row)
    """
    r = tl.arange(0, RP)
    j = tl.arange(0, ELP)
    mask = (r < R)[:, None] & (j <= local)[None, :]
    counts = tl.load(matrix + r[:, None] * stride + (first + j)[None, :], mask=mask, other=0)
    totals = tl.sum(counts, 0)
    padded = (totals + align - 1) // align * align
    begin = tl.sum(tl.where(j < local, padded, 0), 0)
    return tl.sum(tl.where((j == local)[None, :], counts, 0), 1), begin


@triton.jit
def run_of(rows, source, RP: tl.constexpr):
    """Of a column: rows of smaller sources, and rows of ``source``."""
    r = tl.arange(0, RP)
    return tl.sum(tl.where(r < source, rows, 0), 0), tl.sum(tl.where(r == source, rows, 0), 0)


@triton.jit
def place_of(matrix_row, expert, E: tl.constexpr, EP: tl.constexpr):
    """First place of an expert's rows in their source's token list: the counts of all smaller experts.

    Args:
        matrix_row: pointer to the source's int32 [E].
    """
    e = tl.arange(0, EP)
    return tl.sum(tl.load(matrix_row + e, mask=(e < E) & (e < expert), other=0), 0)
