"""The order in which programs take their items: a tile of one matrix each."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def place_of(index, tiles, heads, order):
    """The tile and the matrix, counted over heads and then batch elements, of a program's item.

    A program takes one of every `num_programs`. A few tiles of one matrix lie side by side and
    share what they read in the L2 cache; then come the same ones of all other matrices. Every other
    round runs backwards, so that no program always has the longest item of a round.
    """
    programs = gl.num_programs(0)
    round_first = index // programs * programs
    if index // programs % 2 == 1:
        round_last = min(round_first + programs, order.items) - 1
        index = round_last - (index - round_first)
    block_items = order.beside * heads * order.batches
    done = index // block_items * order.beside
    width = min(order.beside, tiles - done)
    return done + index % block_items % width, index % block_items // width
