"""The scan core: one kernel, and the device functions that algorithms build their terms from.

The kernel walks `y[t] = a[t] + b[t] * y[t -+ 1]` over tensors seen as `[B, T, F]`. A program owns BLOCK_N
rows (pairs of b and f) and goes through time in blocks of BLOCK_T segments of STEPS rows each:

1. every segment is walked from a zero state, row by row, with the product of its `b` beside it;
2. an associative scan over the segments, the columns of the tile, gives the state that enters each;
3. the rows take that state and are written.

A block is loaded whole, as vectors along whichever axis is innermost, and the next ones are on their way
while it is scanned (STAGES). With time innermost a segment is what one thread has loaded; with features
innermost `a` and `b` change threads on the way to the scan. PHASE splits long time axes over programs: REDUCE
stores each chunk's map from entering to leaving state, APPLY composes the maps of the chunks before its own.

An algorithm gives TERMS, which loads rows and returns `a`, `b` and whatever its outputs need later, and EMIT,
which writes the outputs. Both see a position as `at = (b, f, t, in_rows, in_time)`.
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
def carried(b, y):
    """b * y for a state y: one of 0 stays 0 behind a product of factors that overflowed."""
    return tl.where((b == 0) | ((y == 0) & (b == b)), 0.0, b * y)


@triton.jit
def combine(a1, b1, a2, b2):
    """The map (a1, b1), then the map (a2, b2)."""
    return a2 + carried(b2, a1), carried(b2, b1)


@triton.jit
def along(stride, axis: tl.constexpr):
    """The stride of an axis; a marker says of all but a 1 that they are multiples of 8 or 4."""
    if isinstance(stride[axis], int):
        return stride[axis]
    elif stride[4] is not None:
        return stride[axis] // 8 * 8
    elif stride[3] is not None:
        return stride[axis] // 4 * 4
    else:
        return stride[axis]


@triton.jit
def locate(stride, at):
    """Offset and mask of a position. A stride of None is an axis that the tensor does not have or repeats."""
    b, f, t, in_rows, in_time = at
    offset = tl.zeros([1, 1], tl.int64)
    mask = tl.full([1, 1], 1, tl.int1)
    if stride[0] is not None:
        offset += b * along(stride, 0)
    if stride[2] is not None:
        offset += f * along(stride, 2)
    if (stride[0] is not None) or (stride[2] is not None):
        mask = mask & in_rows
    if stride[1] is not None:
        # The row's address first: a run of time steps then stays visible as contiguous.
        offset = offset + t.to(tl.int64) * along(stride, 1)
        mask = mask & in_time
    return offset, mask


@triton.jit
def load(ptr, stride, at, DTYPE: tl.constexpr):
    """A per-step value in the compute dtype, 0 outside."""
    offset, mask = locate(stride, at)
    return tl.load(ptr + offset, mask=mask, other=0).to(DTYPE)


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
def split_rows(x, STEPS: tl.constexpr, SPREAD: tl.constexpr = False):
    """A tile of segments as one tile per row of a segment; all of it stays in its registers."""
    rows = (x,)
    # Each pass splits every tile in two; even and odd columns leave the rows in bit-reversed order.
    for _ in tl.static_range(3 if STEPS == 8 else STEPS // 2):
        halves = ()
        for row in tl.static_range(len(rows)):
            halves = halves + halve(rows[row], SPREAD)
        rows = halves
    return rows if SPREAD else bit_reversed(rows, STEPS)


@triton.jit
def join_rows(rows, STEPS: tl.constexpr, SPREAD: tl.constexpr = False):
    """The inverse of `split_rows`."""
    rows = rows if SPREAD else bit_reversed(rows, STEPS)
    for _ in tl.static_range(3 if STEPS == 8 else STEPS // 2):
        joined = ()
        for pair in tl.static_range(len(rows) // 2):
            joined = joined + (join_halves(rows[2 * pair], rows[2 * pair + 1], SPREAD),)
        rows = joined
    return rows[0]


@triton.jit
def halve(x, SPREAD: tl.constexpr):
    """The two halves of the columns of a spread tile; of others the even and the odd columns."""
    N: tl.constexpr = x.shape[0]
    HALF: tl.constexpr = x.shape[1] // 2
    if SPREAD:
        return tl.split(tl.permute(tl.reshape(x, [N, 2, HALF]), 0, 2, 1))
    else:
        return tl.split(tl.reshape(x, [N, HALF, 2]))


@triton.jit
def join_halves(x, y, SPREAD: tl.constexpr):
    """The inverse of `halve`."""
    both = tl.join(x, y)
    if SPREAD:
        both = tl.permute(both, 0, 2, 1)
    return tl.reshape(both, [x.shape[0], 2 * x.shape[1]])


@triton.jit
def bit_reversed(rows, STEPS: tl.constexpr):
    if STEPS == 8:
        return rows[0], rows[4], rows[2], rows[6], rows[1], rows[5], rows[3], rows[7]
    elif STEPS == 4:
        return rows[0], rows[2], rows[1], rows[3]
    else:
        return rows


@triton.jit
def beyond(at, T, by: tl.constexpr, DENSE: tl.constexpr):
    """One segment on or back, from where `neighbours` completes a dense tile; elsewhere simply row t+by."""
    b, f, t, in_rows, _ = at
    t = t + by * DENSE
    return b, f, t, in_rows, (t >= 0) & (t < T)


@triton.jit
def neighbours(value, other, at, by: tl.constexpr, DENSE: tl.constexpr):
    """Row t+1 or t-1 from the tile of row t and the tile at `beyond`.

    With time innermost a load one row off is no vector load, but one a whole segment off is: each row then
    takes its neighbour's register, and the one at the end of a segment the other segment's nearest.
    """
    if DENSE > 1:
        whole = at[3] & at[4]
        rows = split_rows(tl.broadcast_to(value, whole.shape), DENSE)
        others = split_rows(tl.broadcast_to(other, whole.shape), DENSE)
        moved = rows[1:] + (others[0],) if by == 1 else (others[DENSE - 1],) + rows[: DENSE - 1]
        return join_rows(moved, DENSE)
    else:
        return other


@triton.jit
def load_next(ptr, stride, at, T, value, DTYPE: tl.constexpr, DENSE: tl.constexpr):
    """Row t+1 of what `value` is at row t."""
    return neighbours(value, load(ptr, stride, beyond(at, T, 1, DENSE), DTYPE), at, 1, DENSE)


@triton.jit
def store(ptr, stride, at, value):
    offset, mask = locate(stride, at)
    tl.store(ptr + offset, value, mask=mask)


@triton.jit
def edge(value, column, at_column):
    """One column of a tile, as a tile of one column."""
    return tl.sum(tl.where(column == at_column, value, 0.0), axis=1, keep_dims=True)


@triton.jit
def within_bounds(a, b, at, T, init, REVERSE: tl.constexpr):
    """Outside, the state is handed on unchanged; without `init` nothing enters the first row."""
    t = at[2]
    if init is None:
        b = tl.where(t == (T - 1 if REVERSE else 0), 0.0, b)
    live = at[3] & at[4]
    return tl.where(live, a, 0.0), tl.where(live, b, 1.0)


@triton.jit
def turned(rows, REVERSE: tl.constexpr):
    """Rows of a segment from time order to scan order, or back."""
    return rows[::-1] if REVERSE else rows


@triton.jit
def scan_columns(a, b, carry, column, EXCLUSIVE: tl.constexpr):
    """Scan the maps of the columns: the state after each, the state before it if asked for, the map's b."""
    if a.shape[1] > 1:
        a, b = tl.associative_scan((a, b), 1, combine)
    after = a + carried(b, carry)
    before = carry + tl.zeros_like(a)
    if EXCLUSIVE and a.shape[1] > 1:
        # The neighbour's state is one shuffle where a second pair of operands would be as many as the scan.
        neighbour = tl.broadcast_to(tl.maximum(column - 1, 0), a.shape)
        before = tl.where(column == 0, before, tl.gather(after, neighbour, 1))
    return after, before, b


@triton.jit(do_not_specialize=["B", "T", "F", "length", "chunks"])
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
    length,
    chunks,
    A: tl.constexpr,
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
    STAGES: tl.constexpr,
):
    # Lets the compiler see that masks change every ALIGNED elements at most, so that loads stay vectors.
    if AXES == "features":
        F = F // ALIGNED * ALIGNED
    else:
        T = T // ALIGNED * ALIGNED
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
    LAST: tl.constexpr = BLOCK_T - 1
    # With time innermost the rows of a segment are a vector, side by side in one thread. With features
    # innermost they are spread, the first row of every segment before the second of any: lanes differ in
    # their segments, and meet in fewer banks of shared memory so.
    SPREAD: tl.constexpr = AXES == "features"
    DENSE: tl.constexpr = 1 if SPREAD else STEPS
    EXCLUSIVE: tl.constexpr = (PHASE != REDUCE) and (LOOKS_AHEAD or STEPS > 1)

    zeros = tl.zeros([BLOCK_N, 1], DTYPE)
    carry = zeros
    factor = zeros + 1.0
    if PHASE != REDUCE:
        if init is not None:
            here = (b, f, column, in_rows, column == 0)
            carry = carry + load(init, init_stride, here, DTYPE)
    if PHASE == APPLY:
        # Compose the maps of the chunks that come before this one in scan order.
        c = tl.arange(0, BLOCK_C)[None, :]
        if REVERSE:
            source = chunks - 1 - c
            before = source > chunk
        else:
            source = c
            before = source < chunk
        place = (b * F + f) * chunks + source
        before = before & in_rows
        map_a = tl.load(partials + place, mask=before, other=0.0)
        map_b = tl.load(partials + B.to(tl.int64) * F * chunks + place, mask=before, other=1.0)
        map_a, map_b = tl.associative_scan((map_a, map_b), 1, combine)
        carry = edge(map_a, c, BLOCK_C - 1) + carried(edge(map_b, c, BLOCK_C - 1), carry)

    # Chunks are whole numbers of blocks.
    per_chunk = tl.cdiv(length, BLOCK_T * STEPS)
    first = chunk.to(T.dtype) * per_chunk
    blocks = tl.minimum(per_chunk, tl.cdiv(T, BLOCK_T * STEPS) - first)
    for block in tl.range(blocks, num_stages=STAGES):
        index = first + (blocks - 1 - block if REVERSE else block)
        # Segments go in scan order, so that every scan is a forward one; the rows of one in time order.
        i = tl.arange(0, BLOCK_T * STEPS)[None, :]
        segment, step = (i % BLOCK_T, i // BLOCK_T) if SPREAD else (i // STEPS, i % STEPS)
        segment = LAST - segment if REVERSE else segment
        t = index * (BLOCK_T * STEPS) + segment * STEPS + step
        at = (b, f, t, in_rows, t < T)
        a_t, b_t, kept = TERMS(
            x, strides, at, T, (gamma, lambda_, bound_0, bound_1, bound_2), A, OPTION, DTYPE, BLOCK_A, DENSE
        )
        a_t, b_t = within_bounds(a_t, b_t, at, T, init, REVERSE)
        a_rows = turned(split_rows(a_t, STEPS, SPREAD), REVERSE)
        b_rows = turned(split_rows(b_t, STEPS, SPREAD), REVERSE)

        seg_a, seg_b = a_rows[0], b_rows[0]
        walked = ((seg_a, seg_b),)
        for step in tl.static_range(1, STEPS):
            seg_a, seg_b = combine(seg_a, seg_b, a_rows[step], b_rows[step])
            walked = walked + ((seg_a, seg_b),)

        after, entering, factors = scan_columns(seg_a, seg_b, carry, column, EXCLUSIVE)
        carry = edge(after, column, LAST)
        if PHASE == REDUCE:
            factor = carried(edge(factors, column, LAST), factor)
        else:
            ys = ()
            aheads = ()
            ahead = entering
            for step in tl.static_range(STEPS):
                y = after
                if STEPS > 1:
                    y = walked[step][0] + carried(walked[step][1], entering)
                ys = ys + (y,)
                aheads = aheads + (ahead,)
                ahead = y
            y = join_rows(turned(ys, REVERSE), STEPS, SPREAD)
            if LOOKS_AHEAD:
                ahead = join_rows(turned(aheads, REVERSE), STEPS, SPREAD)
            EMIT(outputs, out_stride, at, y, ahead, kept)

    if PHASE == REDUCE:
        place = (b * F + f) * chunks + chunk
        tl.store(partials + place, carry, mask=in_rows)
        tl.store(partials + B.to(tl.int64) * F * chunks + place, factor, mask=in_rows)


@triton.jit
def emit_state(outputs, stride, at, y, ahead, kept):
    store(outputs[0], stride, at, y)
