"""The scan core: one kernel, and the device functions that algorithms build their terms from.

The kernel walks `y[t] = a[t] + b[t] * y[t -+ 1]` over tensors seen as `[B, T, F]`. A program owns BLOCK_N rows (pairs of
b and f) and goes through time in blocks of BLOCK_T segments of STEPS rows each:

1. every segment is walked from a zero state, row by row, with the product of its `b` beside it;
2. an associative scan over the segments gives the state that enters each;
3. the rows take that state and are written.

STEPS = 1 is a plain tile scan, for memory with time innermost; longer segments keep rows with F innermost in
registers between the two walks. PHASE splits long time axes over programs: REDUCE stores each chunk's map
from entering to leaving state, APPLY composes the maps of the chunks before its own.

An algorithm gives TERMS, which loads a row and returns `a`, `b` and whatever its outputs need later, and EMIT,
which writes the outputs. All of them see a position as `at = (b, f, t, in_rows, in_time, start)`.
"""

import triton
import triton.language as tl

WHOLE = tl.constexpr(0)
REDUCE = tl.constexpr(1)
APPLY = tl.constexpr(2)


@triton.jit
def scale(c, x):
    """c * x where a zero coefficient selects: what stands behind it is not read."""
    return tl.where(c == 0, 0.0, c * x)


@triton.jit
def combine(a1, b1, a2, b2):
    """The map (a1, b1), then the map (a2, b2)."""
    return a2 + scale(b2, a1), scale(b2, b1)


@triton.jit
def locate(stride, at):
    """Offset and mask of a position. A stride of None is an axis that the tensor does not have or repeats."""
    b, f, t, in_rows, in_time, start = at
    offset = tl.zeros([1, 1], tl.int64)
    mask = tl.full([1, 1], 1, tl.int1)
    if stride[0] is not None:
        offset += b * stride[0]
    if stride[2] is not None:
        offset += f * stride[2]
    if (stride[0] is not None) or (stride[2] is not None):
        mask = mask & in_rows
    if stride[1] is not None:
        # The row's address first: a run of time steps then stays visible as contiguous.
        offset = offset + t.to(tl.int64) * stride[1]
        mask = mask & in_time
    return offset, mask


@triton.jit
def load(ptr, stride, at, DTYPE: tl.constexpr):
    """A per-step value in the compute dtype, 0 outside."""
    offset, mask = locate(stride, at)
    return tl.load(ptr + offset, mask=mask, other=0).to(DTYPE)


@triton.jit
def load_where(condition, ptr, stride, at, DTYPE: tl.constexpr):
    """A per-step value where it is needed, 0 elsewhere: memory that nobody reads is not fetched."""
    offset, mask = locate(stride, at)
    return tl.load(ptr + offset, mask=mask & condition, other=0).to(DTYPE)


@triton.jit
def flag(ptr, stride, at):
    """A flag of any dtype; a byte of a bool tensor need not be 0 or 1."""
    offset, mask = locate(stride, at)
    return tl.load(ptr + offset, mask=mask, other=0) != 0


@triton.jit
def coefficient(ptr, stride, number, at, DTYPE: tl.constexpr):
    """gamma or lambda: a number, or a tensor that broadcasts."""
    if ptr is None:
        return tl.full([1, 1], number, DTYPE)
    else:
        return load(ptr, stride, at, DTYPE)


@triton.jit
def shifted(at, T, by: tl.constexpr):
    b, f, t, in_rows, in_time, start = at
    return b, f, t + by, in_rows, in_time & (t + by >= 0) & (t + by < T), start


@triton.jit
def load_next(ptr, stride, at, T, value, DTYPE: tl.constexpr, DENSE: tl.constexpr):
    """Row t+1 of a tile whose row t is `value`.

    With time innermost a load one element off is no vector load, so that four elements take three from their
    neighbours in registers and load the fourth.
    """
    columns: tl.constexpr = value.shape[1]
    rows: tl.constexpr = value.shape[0]
    b, f, t, in_rows, in_time, start = at
    if DENSE and (columns >= 4) and (stride[1] is not None):
        quads: tl.constexpr = columns // 4
        even, odd = tl.split(tl.reshape(tl.broadcast_to(value, [rows, columns]), [rows, quads, 2, 2]))
        _, second = tl.split(even)
        first, third = tl.split(odd)
        t_fourth = start + 4 + 4 * tl.arange(0, quads)[None, :]
        fourth = load(ptr, stride, (b, f, t_fourth, in_rows, t_fourth < T, start), DTYPE)
        fourth = tl.broadcast_to(fourth, [rows, quads])
        pairs = tl.join(tl.join(first, third), tl.join(second, fourth))
        return tl.reshape(pairs, [rows, columns])
    else:
        return load(ptr, stride, shifted(at, T, 1), DTYPE)


@triton.jit
def store(ptr, stride, at, value):
    offset, mask = locate(stride, at)
    tl.store(ptr + offset, value, mask=mask)


@triton.jit
def edge(value, column, at_column):
    """One column of a tile, as a tile of one column."""
    return tl.sum(tl.where(column == at_column, value, 0.0), axis=1, keep_dims=True)


@triton.jit
def combine_exclusive(a1, b1, pa1, pb1, a2, b2, pa2, pb2):
    """`combine`, beside the map of everything before the second operand's last row."""
    a, b = combine(a1, b1, a2, b2)
    pa, pb = combine(a1, b1, pa2, pb2)
    return a, b, pa, pb


@triton.jit
def scan_columns(a, b, carry, REVERSE: tl.constexpr, EXCLUSIVE: tl.constexpr, BLOCK_T: tl.constexpr):
    """Scan the maps of all columns: the state after each one, the state before it if asked for, and the map's b."""
    if BLOCK_T == 1:
        return a + scale(b, carry), carry + tl.zeros_like(a), b
    elif EXCLUSIVE:
        none = tl.zeros_like(a)
        a, b, pa, pb = tl.associative_scan((a, b, none, none + 1.0), 1, combine_exclusive, reverse=REVERSE)
        return a + scale(b, carry), pa + scale(pb, carry), b
    else:
        a, b = tl.associative_scan((a, b), 1, combine, reverse=REVERSE)
        after = a + scale(b, carry)
        return after, after, b


@triton.jit(do_not_specialize=["B", "T", "F", "A", "length", "chunks"])
def scan_kernel(
    x,
    strides,
    outputs,
    out_stride,
    init,
    init_stride,
    partials,
    gamma: tl.float64,
    lambda_: tl.float64,
    bound_0: tl.float64,
    bound_1: tl.float64,
    bound_2: tl.float64,
    B,
    T,
    F,
    A,
    length,
    chunks,
    TERMS: tl.constexpr,
    EMIT: tl.constexpr,
    LOOKS_AHEAD: tl.constexpr,
    REVERSE: tl.constexpr,
    OPTION: tl.constexpr,
    DTYPE: tl.constexpr,
    AXES: tl.constexpr,
    ALIGNED: tl.constexpr,
    PHASE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_T: tl.constexpr,
    STEPS: tl.constexpr,
    BLOCK_A: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    if ALIGNED:
        # Lets the compiler see that masks change every 16 elements at most, so that loads stay vectors.
        if AXES == "features":
            F = F // 16 * 16
        else:
            T = T // 16 * 16
    chunk = tl.program_id(0) % chunks
    group = (tl.program_id(0) // chunks).to(tl.int64)
    lane = tl.arange(0, BLOCK_N)[:, None]
    column = tl.arange(0, BLOCK_T)[None, :]
    if AXES == "time":
        b = group * BLOCK_N + lane
        f = tl.zeros([1, 1], tl.int64)
        in_rows = b < B
    elif AXES == "features":
        groups = tl.cdiv(F, BLOCK_N)
        b = tl.zeros([1, 1], tl.int64) + group // groups
        f = (group % groups) * BLOCK_N + lane
        in_rows = f < F
    else:
        row = group * BLOCK_N + lane
        b = row // F
        f = row % F
        in_rows = b < B
    DENSE: tl.constexpr = STEPS == 1
    first_column: tl.constexpr = 0 if REVERSE else BLOCK_T - 1

    here = (b, f, column, in_rows, column == 0, 0)
    zeros = tl.zeros([BLOCK_N, 1], DTYPE)
    carry = zeros
    factor = zeros + 1.0
    if PHASE != REDUCE:
        if init is not None:
            carry = carry + load(init, init_stride, here, DTYPE)
    if PHASE == APPLY:
        # Compose the maps of the chunks that come before this one in scan order.
        c = tl.arange(0, BLOCK_C)[None, :]
        before = (c > chunk) if REVERSE else (c < chunk)
        before = before & (c < chunks) & in_rows
        place = (b * F + f) * chunks + c
        map_a = tl.load(partials + place, mask=before, other=0.0)
        map_b = tl.load(partials + B.to(tl.int64) * F * chunks + place, mask=before, other=1.0)
        map_a, map_b = tl.associative_scan((map_a, map_b), 1, combine, reverse=REVERSE)
        outermost: tl.constexpr = 0 if REVERSE else BLOCK_C - 1
        carry = edge(map_a, c, outermost) + scale(edge(map_b, c, outermost), carry)

    # Chunks are whole numbers of blocks.
    per_chunk = tl.cdiv(length, BLOCK_T * STEPS)
    first = chunk.to(T.dtype) * per_chunk
    blocks = tl.minimum(per_chunk, tl.cdiv(T, BLOCK_T * STEPS) - first)
    for block in range(blocks):
        index = first + (blocks - 1 - block if REVERSE else block)
        start = index * (BLOCK_T * STEPS)
        base = start + column * STEPS

        seg_a = tl.zeros([BLOCK_N, BLOCK_T], DTYPE)
        seg_b = seg_a + 1.0
        walked = ()
        for step in tl.static_range(STEPS):
            t = base + (STEPS - 1 - step if REVERSE else step)
            in_time = t < T
            at = (b, f, t, in_rows, in_time, start)
            a_t, b_t, kept = TERMS(
                x, strides, at, T, A, gamma, lambda_, bound_0, bound_1, bound_2, OPTION, DTYPE, BLOCK_A, DENSE
            )
            if init is None:
                # Nothing enters the first row.
                b_t = tl.where(t == (T - 1 if REVERSE else 0), 0.0, b_t)
            # Outside, the state is handed on unchanged.
            live = in_rows & in_time
            a_t = tl.where(live, a_t, 0.0)
            b_t = tl.where(live, b_t, 1.0)
            if step == 0:
                seg_a = a_t
                seg_b = b_t
            else:
                seg_a, seg_b = combine(seg_a, seg_b, a_t, b_t)
            walked = walked + ((seg_a, seg_b, kept),)

        after, entering, factors = scan_columns(
            seg_a, seg_b, carry, REVERSE, PHASE != REDUCE and (LOOKS_AHEAD or STEPS > 1), BLOCK_T
        )
        if PHASE == REDUCE:
            factor = combine(zeros, factor, zeros, edge(factors, column, first_column))[1]
        else:
            ahead = entering
            for step in tl.static_range(STEPS):
                t = base + (STEPS - 1 - step if REVERSE else step)
                at = (b, f, t, in_rows, t < T, start)
                if STEPS == 1:
                    y = after
                else:
                    y = walked[step][0] + scale(walked[step][1], entering)
                EMIT(outputs, out_stride, at, y, ahead, walked[step][2])
                ahead = y
        carry = edge(after, column, first_column)

    if PHASE == REDUCE:
        place = (b * F + f) * chunks + chunk
        tl.store(partials + place, carry, mask=in_rows)
        tl.store(partials + B.to(tl.int64) * F * chunks + place, factor, mask=in_rows)


@triton.jit
def emit_state(outputs, stride, at, y, ahead, kept):
    store(outputs[0], stride, at, y)
