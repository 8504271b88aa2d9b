"""One program at another size: what the passes made at three sizes tells what they would make at a fourth.

    numbers.py      numbers at three sizes -> the number at another one
    questions.py    traces at three sizes -> what torch is asked at another one before the program runs there
    texts.py        texts at three sizes -> the text with names in the place of numbers, and what these are at another size
    traces.py       traces at three sizes -> the trace at another one, its values worked out op by op

One size varies, and the three programs differ in numbers alone. Two sizes say what a number follows, the third one confirms
it, and these are told:

    d * size ** power           for a power of 1 or 2, as counts of elements and strides are
    d * size ** power + c       where dynamo's graph has such a number, or a multiple of it: a shape, a stride, an offset, or
                                something that the user's program computes of them (`Sizes.shifts`)
    1 / n, n / (n - 1), 2 / (n - 1)     for such a number n, as means and variances have

All others are refused, with `NotAlike`. What a pass rounds to a multiple is one of them, and what an operator of ATen's does
that is made of others, as long as all three sizes lie in one bucket: what is missing to 1024 is `1024 - size`, and what is
padded by 21 is `size + 21`. Nothing but the rounding makes them, and at another size it makes others. One that dynamo's graph
has too is never told below zero where it was not, so that nothing is cut off that was padded.

The difference of two numbers that are told is `a + b * size + c * size ** 2`, which has at most two positive zeros (Descartes'
rule of signs): **what is equal at three sizes is equal at all of them**. So a rewrite that a pass made in all three programs
because two numbers were equal there, such as two shapes, or the end of one slice and the start of the next, holds at any size.
What a pass chose by comparing costs is right at any size too, if maybe not the best: rows of a chunk that were all of them in
three programs are all of them at another size.

Nothing is taken on trust that can be asked: what each op yields at the new size is worked out by torch's own rules, and is
held against what the numbers say. `NotAlike` is raised wherever something does not fit, and the program is then made anew.

This package never imports passes.
"""
